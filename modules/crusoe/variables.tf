# The inputs of every provider come first; ../core and ../hosts check them.

variable "name" {
  description = "Name of the pool. Nodes are named NAME-0, NAME-1, ...; NAME-0 is the head."
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
  description = "Number of nodes that carry slots. The head is one of them."
  type        = number
  default     = 1
  nullable    = false
}

variable "user_data_head" {
  description = "User data of the head, not compressed. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT, @SKYINFRA_BUCKET@ the address at which `secret` and `versions.json` stand, @SKYINFRA_RUNNER@ that of the runner. @SKYINFRA_SECRET@ becomes the fleet secret itself, which then is read by whoever may read the user data."
  type        = string
  nullable    = false
}

variable "user_data_worker" {
  description = "User data of the other nodes, with the same placeholders."
  type        = string
  default     = ""
  nullable    = false
}

variable "user_data_revision" {
  description = "What changes when nodes must be set up again for their user data. Null does so for every change of it; a revision computed from what is declared, without the layout, lets a layout change in place."
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
  description = "The port of the head that the scheduler listens on, as user_data_head says. Another one sets up all nodes: it stands in what they were made from."
  type        = number
  default     = 8786
  nullable    = false
}

variable "region" {
  description = "Where the nodes stand. Another one makes all of them anew."
  type        = string
  nullable    = false
}

variable "machine_types" {
  description = "Machine types in order of preference. Without machine groups the first one is taken. Another one makes the nodes anew."
  type        = list(string)
  nullable    = false
}

variable "image" {
  description = "Machine image. Another one makes the nodes anew."
  type        = string
  nullable    = false
}

variable "ssh_public_key" {
  description = "OpenSSH public key of who applies, with which ssh logs in to set the nodes up. Another one is for nodes that are made after it."
  type        = string
  nullable    = false
}

variable "key_file" {
  description = "The private half of ssh_public_key; empty: the one that ssh or its agent finds."
  type        = string
  default     = ""
  nullable    = false
}

variable "allow_cidrs" {
  description = "Networks that may reach port 22 of the nodes and the scheduler's port of the head; the machine that applies stands in one of them. Known when Terraform plans: a rule has its network in its name."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "labels" {
  description = "Labels, on everything of the module that the cloud labels."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "wait_seconds" {
  description = "How long a node may take, in seconds, until every slot is ready."
  type        = number
  default     = 1800
  nullable    = false
}

variable "rdma" {
  description = "Whether the nodes are in an InfiniBand partition of their own: types that end in -ib. Another one makes the nodes anew."
  type        = bool
  default     = false
  nullable    = false
}

variable "ib_network_id" {
  description = "The InfiniBand network of the partition; null takes one of the region that has machines of the type. Another one makes the nodes anew."
  type        = string
  default     = null
}
