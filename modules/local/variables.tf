variable "name" {
  description = "Name of the pool. Nodes are named NAME-0, NAME-1, ...; NAME-0 is the head."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.name))
    error_message = "name: lower-case letters, digits and dashes, beginning with a letter, at most 40 characters."
  }
}

variable "stack" {
  description = "Name of the stack the pool belongs to; recorded in the manifest and part of the nodes' folder."
  type        = string
  default     = "default"

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", var.stack))
    error_message = "stack: letters, digits, dashes and underscores, at most 64 characters."
  }
}

variable "node_count" {
  description = "Number of nodes, the head included; with min_nodes the most besides the head."
  type        = number
  default     = 1

  validation {
    condition     = var.node_count >= 1 && floor(var.node_count) == var.node_count
    error_message = "node_count: a whole number of at least 1."
  }
}

variable "min_nodes" {
  description = "The least number of nodes besides the head, where the head starts and ends them as the work asks for it, and node_count is the most; null: their number is fixed, and the head is one of them."
  type        = number
  default     = null

  validation {
    condition     = var.min_nodes == null || try(var.min_nodes >= 0 && floor(var.min_nodes) == var.min_nodes, false)
    error_message = "min_nodes: a whole number of at least 0."
  }
}

variable "machine_types" {
  description = "Machine types in order of preference. A local node has none; the first one is recorded in the manifest."
  type        = list(string)
  default     = ["local"]
}

variable "user_data_head" {
  description = "Node configuration of the head, as JSON. @SKYINFRA_NODE@ becomes the node's name."
  type        = string
}

variable "user_data_worker" {
  description = "Node configuration of the other nodes, as JSON. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT."
  type        = string
  default     = ""
}

variable "labels" {
  description = "Labels, recorded on every node."
  type        = map(string)
  default     = {}
}

variable "slots" {
  description = "The slots of each node, for the manifest: index, kind (partition, gpu, chip, cores, host, cpu), accelerator, profile, gpu."
  type        = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
  default     = []
}

variable "simulate" {
  description = "Whether the nodes have simulated accelerators; recorded in the manifest so that every place that shows the fleet can say so."
  type        = bool
  default     = false
}

variable "root" {
  description = "Folder below which every node has its own: ROOT/STACK/NAME/NODE. A relative path counts from where Terraform runs."
  type        = string
  default     = ".skyinfra"
}

variable "runner" {
  description = "The skyinfra-runner program: a path, or a name on PATH. The environment variable SKYINFRA_RUNNER goes before it."
  type        = string
  default     = "skyinfra-runner"
}

variable "wait_seconds" {
  description = "How long a node may take, in seconds, from its start until every slot is ready, apart from tasks that end on slots that go."
  type        = number
  default     = 300
}
