# The core inputs whose values are this provider's; the others stand in core.tf.

variable "machine_types" {
  description = "The accelerator type of a slice, such as v5litepod-8."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.machine_types) == 1 && can(regex("^v[0-9][a-z]*-[0-9]+$", var.machine_types[0]))
    error_message = "machine_types: one accelerator type, such as v5litepod-8 or v4-8."
  }
}

variable "image" {
  description = "Runtime version of the slices, which is that of their generation: https://cloud.google.com/tpu/docs/runtimes"
  type        = string
  nullable    = false
}

variable "disk_gb" {
  description = "Boot disk of a node in GB. That of a slice is as large as it is, so only 0 is allowed."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb == 0
    error_message = "disk_gb: the boot disk of a TPU is as large as it is; leave it 0."
  }
}

variable "spot" {
  description = "Whether the slices are spot capacity. The head is on-demand all the same."
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

# What Google Cloud adds. Project, region and credentials are those of the providers that the caller passes.

variable "zones" {
  description = "Zones that have the accelerator type, in order of preference. Head and slices stand in the first one and stay there."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.zones) > 0
    error_message = "zones: at least one zone that has the accelerator type."
  }
}

variable "hosts" {
  description = "How many hosts the accelerator type has. Of one with several, each is a node, NODE-0, NODE-1, ..., and node_count is 1: they run one program."
  type        = number
  default     = 1
  nullable    = false

  validation {
    condition     = var.hosts >= 1 && floor(var.hosts) == var.hosts
    error_message = "hosts: a whole number of at least 1."
  }
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
  description = "E-mail address of the service account of the nodes; with null the head has none, and slices have the default one of Compute Engine."
  type        = string
  default     = null
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
  description = "Machine type of the head on-demand and without slots."
  type        = string
  default     = "e2-standard-2"
  nullable    = false
}

variable "head_image" {
  description = "Image of the head: projects/PROJECT/global/images/NAME, or projects/PROJECT/global/images/family/FAMILY. The one found at first is kept until this input changes."
  type        = string
  default     = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
  nullable    = false

  validation {
    condition     = can(regex("^projects/[a-z0-9.:-]+/global/images/(family/)?[a-z0-9-]+$", var.head_image))
    error_message = "head_image: projects/PROJECT/global/images/NAME, or projects/PROJECT/global/images/family/FAMILY."
  }
}
