# The inputs that are this module's; the others stand in core.tf and google_machines.tf.

variable "machine_types" {
  description = "Machine types in order of preference; N1 with its GPUs as n1-standard-8+nvidia-tesla-t4:1. More than one, or spot with more than one node, makes the workers a managed instance group."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.machine_types) > 0 && length(distinct(var.machine_types)) == length(var.machine_types) && alltrue([for type in var.machine_types : can(regex("^[a-z][a-z0-9]*-[a-z0-9-]+(\\+nvidia-[a-z0-9-]+:[1-8])?$", type))])
    error_message = "machine_types: at least one machine type such as a3-highgpu-8g or n1-standard-8+nvidia-tesla-t4:1, none of them twice."
  }
}

variable "image" {
  description = "Machine image, or the family of which the newest one is taken. The image found at first is kept until this input changes."
  type        = string
  default     = "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
  nullable    = false

  validation {
    condition     = can(regex("^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+$", var.image))
    error_message = "image: projects/PROJECT/global/images/NAME, or projects/PROJECT/global/images/family/FAMILY."
  }
}

variable "disk_gb" {
  description = "Boot disk of a node in GB; 0 makes one of 50."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb >= 0 && var.disk_gb <= 65536 && floor(var.disk_gb) == var.disk_gb
    error_message = "disk_gb: a whole number from 1 to 65536, or 0 for 50."
  }
}

variable "spot" {
  description = "Whether the nodes are spot machines. The head of a managed instance group is on-demand all the same."
  type        = bool
  default     = false
  nullable    = false
}

# What Google Cloud adds. Project, region and credentials are those of the provider that the caller passes.

variable "zones" {
  description = "Zones to use, in order of preference; empty means all of the region that have the machine types. Machines stand in the first one and stay there, a group in all."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "group" {
  description = "Whether the workers are a managed instance group. Null decides by what is declared: several machine types, or spot with several nodes."
  type        = bool
  default     = null
}

variable "flex_start_seconds" {
  description = "How long the nodes may run, in seconds, with FLEX_START: they are made when there is capacity, within the create timeout, and deleted at the end. Null for nodes that stay."
  type        = number
  default     = null

  validation {
    condition     = var.flex_start_seconds == null || try(var.flex_start_seconds >= 600 && var.flex_start_seconds <= 604800, false)
    error_message = "flex_start_seconds: 600 (10 minutes) to 604800 (7 days)."
  }
}

variable "reservation" {
  description = "Name of the reservation to take the machines from, or projects/PROJECT/reservations/NAME; null for none."
  type        = string
  default     = null
}

variable "reservation_bound" {
  description = "Whether the nodes are bound to the reservation and deleted when it ends, which capacity that was reserved for a time wants (calendar mode, AI Hypercomputer)."
  type        = bool
  default     = false
  nullable    = false
}

variable "gpudirect" {
  description = "Whether the nodes have the interfaces of GPUDirect RDMA: machines of a3-ultragpu-8g and a4-highgpu-8g, which are no group."
  type        = bool
  default     = false
  nullable    = false
}

variable "compact_placement" {
  description = "Whether the nodes stand close together, by a compact placement policy. The head of a group does not."
  type        = bool
  default     = false
  nullable    = false
}

variable "head_image" {
  description = "Image of that head, written like `image`; null takes the image of the nodes."
  type        = string
  default     = null
}
