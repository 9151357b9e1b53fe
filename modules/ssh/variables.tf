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

variable "wait_seconds" {
  description = "How long a node may take, in seconds, until every slot is ready."
  type        = number
  default     = 1800
  nullable    = false
}

variable "machine_types" {
  description = "Machine types in order of preference. A machine that stands already has none; the first one is recorded in the manifest."
  type        = list(string)
  default     = ["ssh"]
  nullable    = false
}

variable "labels" {
  description = "Labels, recorded in the state with every host."
  type        = map(string)
  default     = {}
  nullable    = false
}

variable "hosts" {
  description = "The machines, the head first. address: name, address, or host of the SSH configuration. user, port, key_file: what `ssh` takes where they are left out; the user is root or has sudo without a password. host_key: its public key, without a name; known_hosts say it where it is left out. inside: the address at which clients and other nodes reach it, where that is another one. name: the last part of its node's name, which a host needs whose address is not known before the apply. via: the machine to go through. hops: those to go through to reach that one, the one next to it first."
  type = list(object({
    address  = string
    name     = optional(string)
    user     = optional(string, "")
    port     = optional(number, 0)
    host_key = optional(string, "")
    key_file = optional(string, "")
    inside   = optional(string, "")
    via = optional(object({
      address  = string
      user     = optional(string, "")
      port     = optional(number, 0)
      host_key = optional(string, "")
      key_file = optional(string, "")
    }))
    hops = optional(list(object({
      address  = string
      user     = optional(string, "")
      port     = optional(number, 0)
      host_key = optional(string, "")
      key_file = optional(string, "")
    })), [])
  }))
  nullable = false

  validation {
    condition     = length(var.hosts) > 0
    error_message = "hosts: at least one."
  }

  validation {
    condition     = alltrue([for name in flatten([for host in var.hosts : [host.address, host.inside == "" ? "x" : host.inside, try(host.via.address, "x"), host.hops[*].address]]) : can(regex("^[A-Za-z0-9][A-Za-z0-9._:-]*$", name))])
    error_message = "hosts: an address is a name or an address of letters, digits and . _ : -"
  }

  validation {
    condition     = alltrue([for user in flatten([for host in var.hosts : [host.user, try(host.via.user, ""), host.hops[*].user]]) : user == "" || can(regex("^[A-Za-z_][A-Za-z0-9._@-]*$", user))])
    error_message = "hosts: a user is a name of letters, digits and . _ @ -"
  }

  validation {
    condition     = alltrue([for key in flatten([for host in var.hosts : [host.host_key, try(host.via.host_key, ""), host.hops[*].host_key]]) : key == "" || can(regex("^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/]+=*( [^\n]*)?$", key))])
    error_message = "hosts: a host_key is one line that begins with its kind, such as ssh-ed25519 AAAA...; `ssh-keyscan` puts a name before it, which goes."
  }
}
