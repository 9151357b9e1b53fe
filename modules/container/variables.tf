# The inputs of every provider come first; ../core checks them.

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
  description = "Number of nodes that carry slots. The head is one of them; with min_nodes a container besides them, and they are the most."
  type        = number
  default     = 1
  nullable    = false
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

variable "user_data_head" {
  description = "User data of the head, not compressed. @SKYINFRA_NODE@ becomes the node's name, @SKYINFRA_HEAD@ the scheduler's HOST:PORT, @SKYINFRA_BUCKET@ the address at which `secret` and `versions.json` stand, @SKYINFRA_RUNNER@ that of the runner, @SKYINFRA_VOLUME@ the id of the volume with the jobs of the head. @SKYINFRA_SECRET@ becomes the fleet secret itself, which then is read by whoever may read the user data."
  type        = string
  nullable    = false
}

variable "user_data_worker" {
  description = "User data of the other nodes, with the same placeholders, but @SKYINFRA_VOLUME@."
  type        = string
  default     = ""
  nullable    = false
}

variable "user_data_revision" {
  description = "What changes when nodes must be replaced for their user data. Null does so for every change of it; a revision computed from what is declared, without the layout, lets a layout change in place."
  type        = string
  default     = null
}

variable "restart" {
  description = "When the engine starts a container again that has ended: always, or on-failure, where nodes end that nothing uses."
  type        = string
  default     = "always"
  nullable    = false

  validation {
    condition     = contains(["always", "on-failure"], var.restart)
    error_message = "restart: always or on-failure."
  }
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

variable "machine_types" {
  description = "Machine types in order of preference. A container has none; the first one is recorded in the manifest."
  type        = list(string)
  default     = ["container"]
  nullable    = false
}

variable "image" {
  description = "Image of the containers, with python3: what `docker pull` takes. The engine's own copy is used where it has one."
  type        = string
  default     = "python:3.12-slim-bookworm"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", var.image))
    error_message = "image: the name of an image, such as python:3.12-slim-bookworm."
  }
}

variable "labels" {
  description = "Labels of the containers. Others reach the containers that are made from then on."
  type        = map(string)
  default     = {}
  nullable    = false

  validation {
    condition     = alltrue([for key, value in var.labels : can(regex("^[A-Za-z0-9][A-Za-z0-9._/-]*$", key)) && !startswith(key, "skyinfra.") && !can(regex("\n", value))])
    error_message = "labels: names of letters, digits and . _ / -, not beginning with skyinfra., which is taken; values of one line."
  }
}

variable "engine" {
  description = "The program of the engine: docker or podman. Empty takes the first of them that answers, and keeps it."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = contains(["", "docker", "podman"], var.engine)
    error_message = "engine: docker, podman, or empty for the first of them that answers."
  }
}

variable "host" {
  description = "Address of the engine of another machine (ssh://user@host), or of its socket here (unix:///...). Empty is what the program finds by itself. The head's port is published on all addresses of another machine, and on the loopback of this one."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.host == "" || can(regex("^(ssh://[A-Za-z0-9._@:\\[\\]/-]+|unix:///\\S+)$", var.host))
    error_message = "host: ssh://user@host, or unix:///path/of/the.sock."
  }
}

variable "network" {
  description = "A network of the engine in which containers find each other by name, or host for that of the machine. Empty makes one for the pool."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = var.network == "" || (can(regex("^[A-Za-z0-9][A-Za-z0-9_.-]*$", var.network)) && !contains(["none", "bridge", "default"], var.network))
    error_message = "network: the name of a network of your own, host, or empty for one of the pool; in none, bridge and default containers do not find each other."
  }
}

variable "gpus" {
  description = "GPUs of the nodes: [\"all\"], or ids as `nvidia-smi -L` lists them, the first ones for the first node, as many for each."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for gpu in var.gpus : can(regex("^[A-Za-z0-9:-]+$", gpu))]) && length(distinct(var.gpus)) == length(var.gpus)
    error_message = "gpus: all, or ids of GPUs or MIG devices, none twice."
  }
}

variable "port" {
  description = "The port of the host at which clients reach the head. Null takes one between 20000 and 31999, and keeps it. In the network of the host it is scheduler_port."
  type        = number
  default     = null

  validation {
    condition     = var.port == null || try(var.port >= 1 && var.port <= 65535 && floor(var.port) == var.port, false)
    error_message = "port: 1 to 65535."
  }
}

variable "root" {
  description = "Folder for a file that says which engine was found. A relative path counts from where Terraform runs."
  type        = string
  default     = ".skyinfra"
  nullable    = false
}

variable "wait_seconds" {
  description = "How long a node may take, in seconds, until every slot is ready."
  type        = number
  default     = 600
  nullable    = false
}
