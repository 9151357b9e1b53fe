# The core inputs whose values are this provider's; the others stand in core.tf and google_machines.tf.

variable "machine_types" {
  description = "The accelerator type of a slice, such as v5litepod-8."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.machine_types) == 1 && can(regex("^v[0-9][a-z]*-[0-9]+$", var.machine_types[0]))
    error_message = "machine_types: one accelerator type, such as v5litepod-8 or v4-8."
  }
}

variable "image" {
  description = "Runtime version of the slices, which is that of their generation: https://cloud.google.com/tpu/docs/runtimes"
  type        = string
  nullable    = false
}

variable "disk_gb" {
  description = "Boot disk of a node in GB. That of a slice is as large as it is, so only 0 is allowed."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0
    error_message = "disk_gb: the boot disk of a TPU is as large as it is; leave it 0."
  }
}

variable "spot" {
  description = "Whether the slices are spot capacity. The head is on-demand all the same."
  type        = bool
  default     = false
  nullable    = false
}

# What Google Cloud adds. Project, region and credentials are those of the providers that the caller passes.

variable "zones" {
  description = "Zones that have the accelerator type, in order of preference. Head and slices stand in the first one and stay there."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.zones) > 0
    error_message = "zones: at least one zone that has the accelerator type."
  }
}

variable "hosts" {
  description = "How many hosts the accelerator type has. Of one with several, each is a node, NODE-0, NODE-1, ..., and node_count is 1: they run one program."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "hosts: a whole number of at least 1."
  }
}

variable "head_image" {
  description = "Image of the head: projects/PROJECT/global/images/NAME, or projects/PROJECT/global/images/family/FAMILY. The one found at first is kept until this input changes."
  type        = string
  default     = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
  nullable    = false

  validation {
    condition     = can(regex("^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+$", var.head_image))
    error_message = "head_image: projects/PROJECT/global/images/NAME, or projects/PROJECT/global/images/family/FAMILY."
  }
}
