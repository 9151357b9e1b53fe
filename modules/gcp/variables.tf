# The core inputs whose values are this provider's; the others stand in core.tf.

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

variable "ssh_public_key" {
  description = "OpenSSH public key to log in with as the user ubuntu; empty for none. `gcloud compute ssh` works without one."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.ssh_public_key == "" || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", trimspace(var.ssh_public_key)))
    error_message = "ssh_public_key: one line, beginning with ssh-ed25519 or ssh-rsa."
  }
}

variable "allow_cidrs" {
  description = "IPv4 networks that may reach the head's scheduler, and its port 22 where ssh_public_key is given: the head has a static external address then. With none, clients come through Identity-Aware Proxy."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.allow_cidrs : can(cidrnetmask(cidr)) && try(cidrhost(cidr, 0) == split("/", cidr)[0], false)])
    error_message = "allow_cidrs: the first address of an IPv4 network, with its length: 203.0.113.7/32 for one address."
  }
}

variable "labels" {
  description = "Labels on everything that takes them."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value)) && !startswith(key, "skyinfra-")]) && length(var.labels) <= 60
    error_message = "labels: at most 60 names and values of small letters, digits, dashes and underscores, at most 63 characters; a name begins with a letter, and not with skyinfra-."
  }
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

variable "subnetwork" {
  description = "Self link of the subnetwork to stand in (projects/PROJECT/regions/REGION/subnetworks/NAME), which needs a way to the internet. Null makes a network with Cloud NAT."
  type        = string
  default     = null
}

variable "network_tags" {
  description = "Network tags of the nodes, whose firewall rules are the caller's: nodes reach each other, clients the head. Empty makes rules of the module's own."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "service_account" {
  description = "E-mail address of the service account of the nodes; null for none."
  type        = string
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

variable "compact_placement" {
  description = "Whether the nodes stand close together, by a compact placement policy. The head of a group does not."
  type        = bool
  default     = false
  nullable    = false
}

variable "head_volume_gb" {
  description = "The disk with the jobs of the head in GB, which outlives a head that is replaced. It may only grow; the head takes the room at its next boot."
  type        = number
  default     = 20
  nullable    = false

  validation {
    condition     = var.head_volume_gb >= 10 && var.head_volume_gb <= 65536 && floor(var.head_volume_gb) == var.head_volume_gb
    error_message = "head_volume_gb: a whole number from 10 to 65536."
  }
}

variable "head_machine_type" {
  description = "Machine type of the head where the workers are a group: on-demand and without slots."
  type        = string
  default     = "e2-standard-2"
  nullable    = false
}

variable "head_image" {
  description = "Image of that head, written like `image`; null takes the image of the nodes."
  type        = string
  default     = null
}

variable "layout" {
  description = "The wanted layout as a short text: the attribute skyinfra-layout of the head, which the head reads through the metadata service. Changing it changes that attribute and nothing else. Empty for none."
  type        = string
  default     = ""
  nullable    = false
}
