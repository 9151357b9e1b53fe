# The inputs of every provider come first; ../core and ../google check them.

variable "name" {
  description = "Name of the pool. Nodes are named NAME-0, NAME-1, ...; NAME-0 is the head. Where the workers are a machine group, the head is NAME-head."
  type        = string
  nullable    = false
}

variable "stack" {
  description = "Name of the stack the pool belongs to; recorded in the manifest and on what the module makes."
  type        = string
  default     = "default"
  nullable    = false
}

variable "node_count" {
  description = "Number of nodes that carry slots. The head is one of them, unless the workers are a machine group: then the head is a machine besides them."
  type        = number
  default     = 1
  nullable    = false
}

variable "min_nodes" {
  description = "The least number of nodes, where the head, a machine besides them, starts and ends them as the work asks for it, and node_count is the most; null: an apply alone changes their number. All of them run once when they are made."
  type        = number
  default     = null

  validation {
    condition     = var.min_nodes == null || try(var.min_nodes >= 0 && floor(var.min_nodes) == var.min_nodes, false)
    error_message = "min_nodes: a whole number of at least 0."
  }
}

variable "user_data_head" {
  description = "User data of the head, not compressed. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT, @SKYINFRA_BUCKET@ the address at which `secret` and `versions.json` stand, @SKYINFRA_RUNNER@ that of the runner, @SKYINFRA_VOLUME@ the id of the volume with the jobs of the head. @SKYINFRA_SECRET@ becomes the fleet secret itself, which then is read by whoever may read the user data."
  type        = string
  nullable    = false
}

variable "user_data_worker" {
  description = "User data of the other nodes, with the same placeholders, but @SKYINFRA_VOLUME@. The nodes of a machine group share one text, in which @SKYINFRA_NODE@ becomes the group's name."
  type        = string
  default     = ""
  nullable    = false
}

variable "user_data_revision" {
  description = "What changes when nodes must be replaced for their user data. Null does so for every change of it; a revision computed from what is declared, without the layout, lets a layout change in place."
  type        = string
  default     = null
}

variable "slots" {
  description = "The slots of each node, for the manifest. kind: partition, gpu, chip, cores, host, cpu."
  type        = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
  default     = []
  nullable    = false
}

variable "runner_file" {
  description = "A file that the nodes install at their first boot: the runner as a wheel. The first one is kept: another changes nothing. Empty where the user data need none."
  type        = string
  default     = ""
  nullable    = false
}

variable "versions" {
  description = "The versions that the nodes install, for `versions.json`: of Python where none is declared, and of packages that client and workers share. The first ones are kept: others change nothing. Null where the user data need none."
  type        = object({ python = string, requirements = list(string) })
  default     = null
}

variable "scheduler_port" {
  description = "The port of the head that the scheduler listens on, as user_data_head says. Another one replaces all nodes: it stands in what they were made from."
  type        = number
  default     = 8786
  nullable    = false
}

variable "ssh_public_key" {
  description = "OpenSSH public key to log in with as the user ubuntu; empty for none. `gcloud compute ssh` works without one."
  type        = string
  default     = ""
  nullable    = false
}

variable "allow_cidrs" {
  description = "IPv4 networks that may reach the head's scheduler, and its port 22 where ssh_public_key is given: the head has a static external address then. With none, clients come through Identity-Aware Proxy."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "labels" {
  description = "Labels on everything that takes them."
  type        = map(string)
  default     = {}
  nullable    = false
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

variable "volumes" {
  description = "Disks that are there already and outlive the fleet, attached to its only node, in their order: the user data mount them at their paths. They are in the zone of the node; a machine group has none."
  type        = list(object({ name = string, id = string, path = optional(string) }))
  default     = []
  nullable    = false
}

variable "buckets" {
  description = "What the user data mount of buckets, which are there already: a service account of the module's own may read it below the prefix, and write it where `write` says so. With service_account the rights are those of that account."
  type        = list(object({ bucket = string, prefix = optional(string, ""), write = optional(bool, false) }))
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for each in var.buckets : can(regex("^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$", each.bucket)) && can(regex("^([A-Za-z0-9._=+@-]+(/[A-Za-z0-9._=+@-]+)*)?$", each.prefix))])
    error_message = "buckets: the name of a bucket has lower-case letters, digits, dots, hyphens and underscores; a prefix letters, digits and ._=+@-, with one / between two parts."
  }
}

variable "head_volume_gb" {
  description = "The disk with the jobs of the head in GB, which outlives a head that is replaced. It may only grow; the head takes the room at its next boot."
  type        = number
  default     = 20
  nullable    = false
}

variable "head_machine_type" {
  description = "Machine type of a head that is a machine besides the nodes: on-demand and without slots."
  type        = string
  default     = "e2-standard-2"
  nullable    = false
}

variable "layout" {
  description = "The wanted layout as a short text: the attribute skyinfra-layout of the head, which the head reads through the metadata service. Changing it changes that attribute and nothing else. Empty for none."
  type        = string
  default     = ""
  nullable    = false
}

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

variable "gpu_zones" {
  description = "Zones that are known to have the GPUs that are added to the machine type: where zones is empty, machines are made in these alone, and in all of the region if it has none of them. Google Cloud says of a machine type alone where it is. Machines that stand stay where they are."
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

variable "starts_stopped" {
  description = "Whether an apply starts machines again that have stopped, as those do whose user data declare an end of the node."
  type        = bool
  default     = false
  nullable    = false
}
