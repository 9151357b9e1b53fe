variable "stack" {
  description = "The stack."
  type        = string
}

variable "name" {
  description = "The pool."
  type        = string
}

variable "fleet" {
  description = "An id that no other fleet has: two people may give one account stacks and pools of one name."
  type        = string
}

variable "node_count" {
  description = "How many nodes get a name."
  type        = number
}

variable "limit" {
  description = "The length that the provider takes, of its strictest kind of resource."
  type        = number

  validation {
    condition     = var.limit >= 40
    error_message = "limit: at least 40, of which 18 are skyinfra- and the fleet's own part."
  }
}

variable "reserve" {
  description = "Characters that the module itself appends."
  type        = number
  default     = 6
}
