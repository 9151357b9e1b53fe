# The names of what a module makes: small letters, digits and dashes, a letter first and no dash last, which every
# provider takes; as long as the provider allows, with a part of the fleet's own at the end. What a long stack and pool have
# too much is cut in the middle of the name. A resource that exists keeps its name: modules ignore changes of it.

locals {
  suffix = substr(var.fleet, 0, 8)
  plain  = lower(replace("${var.stack}-${var.name}", "/[^A-Za-z0-9]+/", "-"))
  room   = var.limit - var.reserve - length("skyinfra--") - 8
  own    = "skyinfra-${trim(substr(local.plain, 0, local.room), "-")}-${local.suffix}"
}
