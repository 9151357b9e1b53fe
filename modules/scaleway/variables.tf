# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "disk_gb" {
  description = "Disk of a node in GB; 0 takes 125. Another one makes the nodes anew."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0 || var.disk_gb >= 50
    error_message = "disk_gb: at least 50, or 0 for 125."
  }
}

variable "spot" {
  description = "Whether to buy interruptible capacity. Scaleway has none, so only false is allowed."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !var.spot
    error_message = "spot: Scaleway has no interruptible capacity; leave it false."
  }
}
