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

variable "spot" {
  description = "Whether the slices are spot capacity. The head is on-demand all the same."
  type        = bool
  default     = false
  nullable    = false
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
