# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "compartment_id" {
  description = "The compartment in which everything is made: its OCID."
  type        = string
  nullable    = false
}

variable "availability_domain" {
  description = "Where in the region the nodes stand, such as Uocm:PHX-AD-1: `oci iam availability-domain list`. Another one makes the nodes anew."
  type        = string
  nullable    = false
}

variable "ssh_user" {
  description = "The user of the image, who has sudo: ubuntu, opc of Oracle Linux."
  type        = string
  default     = "ubuntu"
  nullable    = false
}

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
  description = "Whether the nodes are preemptible, which virtual machines can be. Another one makes them anew."
  type        = bool
  default     = false
  nullable    = false
}
