variable "kind" {
  description = "Kind of the provider, for the manifest."
  type        = string
}

variable "pool" {
  description = "The inputs that every such module has."
  type = object({
    name             = string
    stack            = string
    node_count       = number
    user_data_head   = string
    user_data_worker = string
    # Nothing brings one.
    runner_file    = optional(string, "")
    scheduler_port = number
    machine_types  = list(string)
    versions       = object({ python = string, requirements = list(string) })
    slots          = list(object({ index = number, kind = string, accelerator = optional(string), profile = optional(string), gpu = optional(number) }))
    volumes        = optional(list(object({ name = string })), [])
    wait_seconds   = number
  })

  validation {
    condition     = var.pool.wait_seconds >= 1
    error_message = "wait_seconds: at least 1."
  }
}

variable "secret" {
  description = "The resource with the fleet secret."
  type        = object({ id = string, triggers_replace = string })
}

variable "answers" {
  description = "The folder of answers.py, which says how the API of the marketplace tells where a container is reached."
  type        = string
}

variable "head_id" {
  description = "The id of the head."
  type        = string
}

variable "containers" {
  description = "By node, the container, for the manifest."
  type        = map(object({ id = string, zone = string }))
}

variable "deleted" {
  description = "Where a container is to delete itself: the address that takes DELETE, and the key, as variables of its environment say them. null: it does not."
  type        = object({ url = string, key = string })
  default     = null
}

variable "names" {
  description = "The names that the provider takes, as ../core has them."
  type        = object({ limit = number, reserve = optional(number) })
  default     = { limit = 63 }
}
