# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "disk_gb" {
  description = "Disk of a node in GB. That of a droplet comes with its size; 0, the default, says so."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0
    error_message = "disk_gb: the disk of a droplet comes with its size; leave it 0."
  }
}

variable "spot" {
  description = "Whether to buy interruptible capacity. DigitalOcean has none, so only false is allowed."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !var.spot
    error_message = "spot: DigitalOcean has no interruptible capacity; leave it false."
  }
}

variable "ssh_key_id" {
  description = "Id or fingerprint of ssh_public_key where the account has it already, for DigitalOcean takes a key once; null registers it."
  type        = string
  default     = null
}

variable "vpc_id" {
  description = "A VPC of yours in the region; null makes one. Another one makes the nodes anew."
  type        = string
  default     = null
}

variable "gpu_partition_mode" {
  description = "How the GPUs of AMD are partitioned, which DigitalOcean does when it makes the droplet: PARTITION_MODE_SPX_NPS1, PARTITION_MODE_DPX_NPS2; null leaves it to DigitalOcean. Another one makes the nodes anew."
  type        = string
  default     = null

  validation {
    condition     = var.gpu_partition_mode == null ? true : contains(["PARTITION_MODE_SPX_NPS1", "PARTITION_MODE_DPX_NPS2"], var.gpu_partition_mode)
    error_message = "gpu_partition_mode: PARTITION_MODE_SPX_NPS1 or PARTITION_MODE_DPX_NPS2."
  }
}
