# The inputs of every provider come first; ../core and ../market check them.

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

variable "min_cuda" {
  description = "The oldest CUDA that the driver of the host has to serve, such as 12.8."
  type        = string
  default     = null

  validation {
    condition     = var.min_cuda == null || can(regex("^[0-9]+\\.[0-9]+$", var.min_cuda))
    error_message = "min_cuda: such as 12.8."
  }
}

variable "wait_seconds" {
  description = "How long a container may take to start, in seconds, and the head until its port is mapped."
  type        = number
  default     = 1200
  nullable    = false
}

variable "machine_types" {
  description = "Machine types in order of preference, of which the first is taken: the number of GPUs and their name at Vast.ai, such as 2x-RTX_4090; what a list writes after it, -VCPUS-MIB, is not looked at."
  type        = list(string)
  nullable    = false

  validation {
    condition     = try(can(regex("^[0-9]+x-[A-Za-z0-9_-]+$", var.machine_types[0])), false)
    error_message = "machine_types: number and name of the GPUs, such as 2x-RTX_4090."
  }
}

variable "image" {
  description = "Image of the instances, with python3, gzip and base64."
  type        = string
  default     = "python:3.12-slim-bookworm"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", var.image))
    error_message = "image: the name of an image, such as python:3.12-slim-bookworm."
  }
}

variable "disk_gb" {
  description = "Disk of an instance in GB, which holds the jobs of the head too. 0 is 20."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.disk_gb >= 0 && floor(var.disk_gb) == var.disk_gb
    error_message = "disk_gb: a whole number, 0 for 20."
  }
}

variable "spot" {
  description = "Whether to rent interruptible instances, by a bid."
  type        = bool
  default     = false
  nullable    = false
}

variable "bid" {
  description = "Bid for an interruptible instance, in USD per hour. Vast.ai's API document calls it the price of the whole machine, its Terraform provider one per GPU; it is sent as it stands."
  type        = number
  default     = null

  validation {
    condition     = var.bid == null || coalesce(var.bid, 0) >= 0.001
    error_message = "bid: at least 0.001 USD per hour."
  }
}

variable "max_price" {
  description = "The most that a machine may cost on demand, in USD per hour. Null is any price."
  type        = number
  default     = null
}

variable "min_reliability" {
  description = "The lowest reliability of a machine, as Vast.ai measures it, 0 to 1."
  type        = number
  default     = 0.95
  nullable    = false

  validation {
    condition     = var.min_reliability >= 0 && var.min_reliability <= 1
    error_message = "min_reliability: 0 to 1."
  }
}

variable "datacenter" {
  description = "Whether to take machines of data centers alone."
  type        = bool
  default     = false
  nullable    = false
}

variable "countries" {
  description = "Countries to take, such as SE. Empty is all."
  type        = list(string)
  default     = []
  nullable    = false
}

variable "min_vcpus" {
  description = "CPU cores that an instance has at least."
  type        = number
  default     = 0
  nullable    = false
}

variable "min_memory_gb" {
  description = "Memory that an instance has at least, in GB."
  type        = number
  default     = 0
  nullable    = false
}

variable "deletes_itself" {
  description = "Whether instances whose user data declare an end of the node delete themselves. Root keeps the key for that, which each has for itself alone."
  type        = bool
  default     = false
  nullable    = false
}
