# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "disk_gb" {
  description = "Disk of a node in GB. That of a machine comes with its type; 0, the default, says so."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0
    error_message = "disk_gb: the disk of a machine comes with its type; leave it 0."
  }
}

variable "spot" {
  description = "Whether to buy interruptible capacity. The provider cannot, so only false is allowed."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !var.spot
    error_message = "spot: Crusoe's Terraform provider buys no interruptible capacity; leave it false."
  }
}
