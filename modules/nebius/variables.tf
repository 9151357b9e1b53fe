# The inputs that are this provider's; the others stand in core.tf, machines.tf and hosts.tf.

variable "project_id" {
  description = "The project, such as project-e00abc, which is of one region. Another one makes the nodes anew."
  type        = string
  nullable    = false
}

variable "subnet_id" {
  description = "A subnet of the project, such as vpcsubnet-e00abc. Another one makes the nodes anew."
  type        = string
  nullable    = false
}

variable "disk_gb" {
  description = "Disk of a node in GiB; 0 takes 100. Another one makes the nodes anew."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0 || var.disk_gb >= 50
    error_message = "disk_gb: at least 50, or 0 for 100."
  }
}

variable "spot" {
  description = "Whether the nodes are preemptible. Another one makes them anew."
  type        = bool
  default     = false
  nullable    = false
}
