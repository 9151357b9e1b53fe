# The core inputs whose values are this provider's; the others stand in core.tf.

variable "machine_types" {
  description = "Machine types in order of preference, of which the first is taken: a GPU of RunPod's list with its number and cloud, such as 2x NVIDIA GeForce RTX 4090 (secure), or FLAVOR-VCPUS-GIB without GPUs, such as cpu3c-8-16."
  type        = list(string)
  nullable    = false

  validation {
    condition     = try(can(regex("^(([0-9]+x )?[A-Z].* \\((secure|community)\\)|cpu[0-9][a-z]-[0-9]+-[0-9]+)$", var.machine_types[0])), false)
    error_message = "machine_types: a GPU with its cloud, such as NVIDIA GeForce RTX 4090 (secure), or such as cpu3c-8-16."
  }
}

variable "image" {
  description = "Image of the pods, with python3, gzip and base64."
  type        = string
  default     = "python:3.12-slim-bookworm"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", var.image))
    error_message = "image: the name of an image, such as python:3.12-slim-bookworm."
  }
}

variable "disk_gb" {
  description = "Disk of a pod in GB, which holds the jobs of the head too. 0 is 20."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb >= 0 && floor(var.disk_gb) == var.disk_gb
    error_message = "disk_gb: a whole number, 0 for 20."
  }
}

variable "spot" {
  description = "Whether to buy interruptible capacity. RunPod's API 2 has none, so only false is allowed."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !var.spot
    error_message = "spot: RunPod's API 2 has no interruptible pods; leave it false."
  }
}

variable "data_centers" {
  description = "Data centers to take, such as EU-RO-1. Empty is all."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for name in var.data_centers : can(regex("^[A-Z]+(-[A-Z0-9]+)+$", name))])
    error_message = "data_centers: such as EU-RO-1."
  }
}

variable "registry" {
  description = "Id of the credential in RunPod for a private image."
  type        = string
  default     = null
}
