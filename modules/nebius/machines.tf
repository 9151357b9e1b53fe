# The inputs that are the same of every cloud whose machines are set up over SSH: `python -m tools.core` copies them.

variable "region" {
  description = "Where the nodes stand. Another one makes all of them anew."
  type        = string
  nullable    = false
}

variable "machine_types" {
  description = "Machine types in order of preference. Without machine groups the first one is taken. Another one makes the nodes anew."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.machine_types) > 0
    error_message = "machine_types: at least one."
  }
}

variable "image" {
  description = "Machine image. Another one makes the nodes anew."
  type        = string
  nullable    = false

  validation {
    condition     = var.image != ""
    error_message = "image: the name or id of an image."
  }
}

variable "ssh_public_key" {
  description = "OpenSSH public key of who applies, with which ssh logs in to set the nodes up. Another one is for nodes that are made after it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^(ssh-(ed25519|rsa)|ecdsa-sha2-nistp(256|384|521)) [A-Za-z0-9+/]+=*( [^\n]*)?\n?$", var.ssh_public_key))
    error_message = "ssh_public_key: one line such as ssh-ed25519 AAAA..., whose private half ssh or its agent finds. The nodes are set up over SSH."
  }
}

variable "key_file" {
  description = "The private half of ssh_public_key; empty: the one that ssh or its agent finds."
  type        = string
  default     = ""
  nullable    = false
}

variable "allow_cidrs" {
  description = "Networks that may reach port 22 of the nodes and the scheduler's port of the head; the machine that applies stands in one of them."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for cidr in var.allow_cidrs : can(cidrhost(cidr, 0))])
    error_message = "allow_cidrs: networks such as 203.0.113.7/32."
  }

  validation {
    # Compared as addresses: an IPv6 network can be written in several ways. Several providers refuse another one.
    condition = alltrue([
      for cidr in var.allow_cidrs : try(cidrhost(cidr, 0) == cidrhost("${split("/", cidr)[0]}/${can(regex(":", cidr)) ? 128 : 32}", 0), true)
    ])
    error_message = "allow_cidrs: the first address of a network, with its length: 203.0.113.7/32 for one address, 203.0.113.0/24 for its network."
  }
}

variable "labels" {
  description = "Labels, on everything of the module that the cloud labels."
  type        = map(string)
  default     = {}
  nullable    = false
}
