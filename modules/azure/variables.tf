# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "resource_group" {
  description = "A resource group of yours in the region; null makes one. Another one makes everything anew."
  type        = string
  default     = null
}

variable "zone" {
  description = "The availability zone of the nodes: 1, 2 or 3; null leaves it to Azure. Another one makes the nodes anew."
  type        = string
  default     = null

  validation {
    condition     = var.zone == null ? true : contains(["1", "2", "3"], var.zone)
    error_message = "zone: 1, 2 or 3."
  }
}

variable "infiniband" {
  description = "Whether the nodes stand in an availability set, within which InfiniBand connects machines of sizes such as Standard_ND96isr_H100_v5. Another one makes them anew."
  type        = bool
  default     = false
  nullable    = false
}

variable "accelerated_networking" {
  description = "Whether the network interfaces are accelerated, which machines with few cores may not be."
  type        = bool
  default     = true
  nullable    = false
}

variable "disk_gb" {
  description = "Disk of a node in GB; 0 takes 128. Another one makes the nodes anew."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0 || (var.disk_gb >= 64 && var.disk_gb <= 4095)
    error_message = "disk_gb: 64 to 4095, or 0 for 128."
  }
}

variable "spot" {
  description = "Whether the nodes are spot machines. Another one makes them anew."
  type        = bool
  default     = false
  nullable    = false
}
