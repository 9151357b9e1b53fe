variable "kind" {
  description = "Kind of the provider, for the manifest."
  type        = string
}

variable "account" {
  description = "The account, project or subscription of the provider that the machines are in, for the manifest. Null where it is not known."
  type        = string
  default     = null
}

variable "pool" {
  description = "The inputs that every such module has. Null is what a place has none of: machines that stand already have their image, keys and firewall."
  type = object({
    name             = string
    stack            = string
    node_count       = number
    machine_types    = list(string)
    image            = optional(string)
    ssh_public_key   = optional(string)
    allow_cidrs      = optional(list(string))
    labels           = map(string)
    user_data_head   = string
    user_data_worker = string
    # What changes when nodes must be set up again. Null does so for every change of the user data.
    user_data_revision = string
    runner_file        = string
    versions           = object({ python = string, requirements = list(string) })
    slots              = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
    volumes            = optional(list(object({ name = string })), [])
    scheduler_port     = number
    wait_seconds       = number
  })

  validation {
    condition     = length(var.pool.machine_types) > 0
    error_message = "machine_types: at least one."
  }

  validation {
    condition     = var.pool.image != ""
    error_message = "image: the name or id of an image."
  }

  validation {
    condition     = var.pool.ssh_public_key == null || can(regex("^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/]+=*( [^\n]*)?\n?$", var.pool.ssh_public_key))
    error_message = "ssh_public_key: one line such as ssh-ed25519 AAAA..., whose private half ssh or its agent finds. The nodes are set up over SSH."
  }

  validation {
    condition     = var.pool.allow_cidrs == null || length(coalesce(var.pool.allow_cidrs, ["none"])) > 0
    error_message = "allow_cidrs: the nodes are set up over SSH, so the network of the machine that applies must be among them."
  }

  validation {
    condition     = alltrue([for cidr in coalesce(var.pool.allow_cidrs, []) : can(cidrhost(cidr, 0))])
    error_message = "allow_cidrs: networks such as 203.0.113.7/32."
  }

  validation {
    # Compared as addresses: an IPv6 network can be written in several ways. Several providers refuse another one.
    condition = alltrue([
      for cidr in coalesce(var.pool.allow_cidrs, []) : try(cidrhost(cidr, 0) == cidrhost("${split("/", cidr)[0]}/${can(regex(":", cidr)) ? 128 : 32}", 0), true)
    ])
    error_message = "allow_cidrs: the first address of a network, with its length: 203.0.113.7/32 for one address, 203.0.113.0/24 for its network."
  }

  validation {
    condition     = var.pool.wait_seconds >= 1
    error_message = "wait_seconds: at least 1."
  }
}

variable "secret" {
  description = "The resource with the fleet secret."
  type        = object({ id = string, triggers_replace = string })
}

variable "nodes" {
  description = "The names of the nodes, the head first. Null numbers them."
  type        = list(string)
  default     = null
}

variable "zone" {
  description = "Where the nodes stand, for the manifest."
  type        = string
  default     = null
}

variable "ids" {
  description = "By node, what changes when another machine stands there. Machines that are given back have their own."
  type        = map(string)
  default     = {}
}

variable "machines" {
  description = "By node, how it is reached: address, user, port, host_key, key_file, via, hops, by ssh, as in modules/ssh; empty and 0 are what ssh takes, the port of a machine that was bought 22. inside, outside: the addresses at which the other nodes and the clients reach it; null is `address`."
  type = map(object({
    address  = string
    inside   = optional(string)
    outside  = optional(string)
    user     = optional(string, "")
    port     = optional(number, 0)
    host_key = optional(string)
    key_file = optional(string, "")
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
}

variable "give_back" {
  description = "Whether nodes are machines that stand already, which destroying gives back as they were found."
  type        = bool
  default     = false
}

variable "patience" {
  description = "The seconds that a machine that was just bought may take until it answers."
  type        = number
  default     = 900
}

variable "known_hosts" {
  description = "The file that keeps the host keys from the first contact on, where no key can be given to a machine. Empty where one is."
  type        = string
  default     = ""
}

variable "host_keys" {
  description = "By node, the resource of the host key that the machine gets at its first boot: it is made before the machine, so that the first contact over SSH is checked as every later one. Its private half stands in the state, as the fleet secret does, and in the user data of that machine."
  type        = map(object({ private_key_openssh = string, public_key_openssh = string }))
  default     = {}
}

variable "cloud_config" {
  description = "What the cloud-config of a machine has besides its host key, as JSON."
  type        = string
  default     = "{}"
}

variable "names" {
  description = "The names that the provider takes, as ../core has them."
  type        = object({ limit = number, reserve = optional(number) })
  default     = { limit = 63 }
}
