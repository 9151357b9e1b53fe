variable "pool" {
  description = "The inputs that every module has."
  type = object({
    name             = string
    stack            = string
    node_count       = number
    user_data_head   = string
    user_data_worker = string
    runner_file      = string
    versions         = object({ python = string, requirements = list(string) })
    scheduler_port   = number
    slots            = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
    volumes          = optional(list(object({ name = string })), [])
  })

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,39}$", var.pool.name))
    error_message = "name: lower-case letters, digits and dashes, beginning with a letter, at most 40 characters."
  }

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", var.pool.stack))
    error_message = "stack: letters, digits, dashes and underscores, at most 64 characters."
  }

  validation {
    condition     = var.pool.node_count >= 1 && floor(var.pool.node_count) == var.pool.node_count
    error_message = "node_count: a whole number of at least 1."
  }

  validation {
    condition     = var.pool.runner_file == "" || try(fileexists(var.pool.runner_file), false)
    error_message = "runner_file: there is no such file; the path counts from where Terraform runs."
  }

  validation {
    condition     = var.pool.scheduler_port >= 1 && var.pool.scheduler_port <= 65535 && floor(var.pool.scheduler_port) == var.pool.scheduler_port
    error_message = "scheduler_port: a port, 1 to 65535."
  }

  validation {
    condition     = length(var.pool.volumes) <= 8 && length(distinct(var.pool.volumes[*].name)) == length(var.pool.volumes)
    error_message = "volumes: at most 8, of different names."
  }
}

variable "secret" {
  description = "The resource with the fleet secret. It stands in the module of the provider, where `-replace` names it; in `triggers_replace`, since terraform_data copies `input` to `output`, which Terraform does not treat as sensitive and prints in the plan of a destroy."
  type        = object({ id = string, triggers_replace = string })
}

variable "names" {
  description = "The length of a name that the provider takes, of its strictest kind of resource, and the characters that the module itself appends."
  type        = object({ limit = number, reserve = optional(number, 6) })
  default     = { limit = 63 }

  validation {
    condition     = var.names.limit >= 40
    error_message = "names: a limit of at least 40, of which 18 are skyinfra- and the fleet's own part."
  }
}

variable "head_apart" {
  description = "Whether the head is a machine besides the nodes."
  type        = bool
  default     = false
}

variable "places" {
  description = "What the placeholders become: @SKYINFRA_HEAD@, @SKYINFRA_BUCKET@ and @SKYINFRA_RUNNER@."
  type        = object({ head = string, bucket = string, runner = string })
}

variable "volume" {
  description = "What @SKYINFRA_VOLUME@ becomes: the id of the volume with the jobs of the head. Empty where they stand on its own disk."
  type        = string
  default     = ""
}

variable "limit" {
  description = "Bytes of user data that the provider takes, null for no limit; whether it takes them compressed; what it is called."
  type        = object({ bytes = number, gzip = bool, called = string })
  default     = { bytes = null, gzip = false, called = "" }
}
