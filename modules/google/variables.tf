variable "kind" {
  description = "Kind of the provider, for the manifest."
  type        = string
}

variable "pool" {
  description = "The inputs that every module of Google Cloud has."
  type = object({
    name               = string
    stack              = string
    node_count         = number
    user_data_head     = string
    user_data_worker   = string
    user_data_revision = string
    runner_file        = string
    versions           = object({ python = string, requirements = list(string) })
    slots              = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
    scheduler_port     = number
    ssh_public_key     = string
    allow_cidrs        = list(string)
    labels             = map(string)
    subnetwork         = string
    network_tags       = list(string)
    service_account    = string
    head_volume_gb     = number
    layout             = string
    volumes            = optional(list(object({ name = string, id = string })), [])
    buckets            = optional(list(object({ bucket = string, prefix = string, write = bool })), [])
    starts_stopped     = optional(bool, false)
  })

  validation {
    condition     = var.pool.ssh_public_key == "" || can(regex("^(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( .*)?$", trimspace(var.pool.ssh_public_key)))
    error_message = "ssh_public_key: one line, beginning with ssh-ed25519 or ssh-rsa."
  }

  validation {
    condition     = alltrue([for cidr in var.pool.allow_cidrs : can(cidrnetmask(cidr)) && try(cidrhost(cidr, 0) == split("/", cidr)[0], false)])
    error_message = "allow_cidrs: the first address of an IPv4 network, with its length: 203.0.113.7/32 for one address."
  }

  validation {
    condition     = alltrue([for key, value in var.pool.labels : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value)) && !startswith(key, "skyinfra-")]) && length(var.pool.labels) <= 60
    error_message = "labels: at most 60 names and values of small letters, digits, dashes and underscores, at most 63 characters; a name begins with a letter, and not with skyinfra-."
  }

  validation {
    condition     = var.pool.head_volume_gb >= 10 && var.pool.head_volume_gb <= 65536 && floor(var.pool.head_volume_gb) == var.pool.head_volume_gb
    error_message = "head_volume_gb: a whole number from 10 to 65536."
  }
}

variable "secret" {
  description = "The resource with the fleet secret."
  type        = object({ id = string, triggers_replace = string })
}

variable "head" {
  description = "The name of the head."
  type        = string
}

variable "nodes" {
  description = "The names of the machines that stand here, the head among them."
  type        = list(string)
}

variable "group_nodes" {
  description = "How many nodes there are besides, at least."
  type        = number
}

variable "elastic" {
  description = "The least and the most nodes, where the machines besides the head stand ready, stopped, and the head starts them: it gets a service account that may do that alone. Null where an apply alone changes their number."
  type        = object({ least = number, most = number })
  default     = null
}

variable "zone" {
  description = "Where the machines stand."
  type        = string
}

variable "images" {
  description = "By role: an image, or a family of which the newest one is taken and kept."
  type        = map(string)
}

variable "user_data_key" {
  description = "The attribute with the user data."
  type        = string
}

variable "machines" {
  description = "By role, what a machine is: `head`, where the head is another one than the nodes or the only one that stands here, and `nodes`. type, machine, gpus: as it is declared; the name of Google Cloud, and the GPUs that are added. disk, disk_gb: kind and size of the boot disk. model, stops: provisioning model; whether maintenance of its host stops it. flex, reservation: seconds to run with FLEX_START; the reservation to stand in; null for none. policies, compact: placement policies, and whether there are any. direct: interfaces besides the first."
  type = map(object({
    type        = string
    machine     = string
    gpus        = optional(list(object({ type = string, count = number })), [])
    disk        = string
    disk_gb     = number
    model       = optional(string, "STANDARD")
    stops       = optional(bool, false)
    flex        = optional(number)
    reservation = optional(string)
    policies    = optional(list(string), [])
    compact     = optional(bool, false)
    direct      = optional(list(object({ subnetwork = string, nic_type = string })), [])
  }))
}
