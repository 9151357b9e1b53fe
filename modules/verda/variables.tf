# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "disk_gb" {
  description = "Disk of a node in GB; 0 takes 100. Another one makes the nodes anew."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0 || var.disk_gb >= 50
    error_message = "disk_gb: at least 50, or 0 for 100."
  }
}

variable "spot" {
  description = "Whether the nodes are spot instances. Another one makes them anew."
  type        = bool
  default     = false
  nullable    = false
}
