# The core inputs whose values are this provider's; the others stand in core.tf.

variable "machine_types" {
  description = "Machine types in order of preference, of which the first is taken: the number of GPUs and their name at Vast.ai, such as 2x-RTX_4090; what a list writes after it, -VCPUS-MIB, is not looked at."
  type        = list(string)
  nullable    = false

  validation {
    condition     = try(can(regex("^[0-9]+x-[A-Za-z0-9_-]+$", var.machine_types[0])), false)
    error_message = "machine_types: number and name of the GPUs, such as 2x-RTX_4090."
  }
}

variable "image" {
  description = "Image of the instances, with python3, gzip and base64."
  type        = string
  default     = "python:3.12-slim-bookworm"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", var.image))
    error_message = "image: the name of an image, such as python:3.12-slim-bookworm."
  }
}

variable "disk_gb" {
  description = "Disk of an instance in GB, which holds the jobs of the head too. 0 is 20."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb >= 0 && floor(var.disk_gb) == var.disk_gb
    error_message = "disk_gb: a whole number, 0 for 20."
  }
}

variable "spot" {
  description = "Whether to rent interruptible instances, by a bid."
  type        = bool
  default     = false
  nullable    = false
}

variable "bid" {
  description = "Bid for an interruptible instance, in USD per hour. Vast.ai's API document calls it the price of the whole machine, its Terraform provider one per GPU; it is sent as it stands."
  type        = number
  default     = null

  validation {
    condition     = var.bid == null || coalesce(var.bid, 0) >= 0.001
    error_message = "bid: at least 0.001 USD per hour."
  }
}

variable "max_price" {
  description = "The most that a machine may cost on demand, in USD per hour. Null is any price."
  type        = number
  default     = null
}

variable "min_reliability" {
  description = "The lowest reliability of a machine, as Vast.ai measures it, 0 to 1."
  type        = number
  default     = 0.95
  nullable    = false

  validation {
    condition     = var.min_reliability >= 0 && var.min_reliability <= 1
    error_message = "min_reliability: 0 to 1."
  }
}

variable "datacenter" {
  description = "Whether to take machines of data centers alone."
  type        = bool
  default     = false
  nullable    = false
}

variable "countries" {
  description = "Countries to take, such as SE. Empty is all."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "min_vcpus" {
  description = "CPU cores that an instance has at least."
  type        = number
  default     = 0
  nullable    = false
}

variable "min_memory_gb" {
  description = "Memory that an instance has at least, in GB."
  type        = number
  default     = 0
  nullable    = false
}
