locals {
  disk_gb = var.disk_gb == 0 ? 100 : var.disk_gb
}

# The fleet secret; ../core says why it is made so.
resource "terraform_data" "secret" {
  triggers_replace = sensitive("${uuid()}${uuid()}")

  lifecycle { ignore_changes = [triggers_replace] }
}

# The host key of each machine.
resource "tls_private_key" "host" {
  for_each  = module.hosts.names.nodes
  algorithm = "ED25519"
}

module "hosts" {
  source    = "../hosts"
  kind      = "verda"
  secret    = terraform_data.secret
  zone      = var.region
  ids       = { for node, instance in verda_instance.node : node => instance.id }
  machines  = { for node, instance in verda_instance.node : node => { address = instance.ip, user = "root", key_file = var.key_file } }
  host_keys = tls_private_key.host
  # dstackai/dstack 511c318c verda/compute.py: MAX_INSTANCE_NAME_LEN = 60
  names = { limit = 60 }
  pool = {
    name           = var.name, stack = var.stack, node_count = var.node_count, labels = var.labels
    machine_types  = var.machine_types, image = var.image, ssh_public_key = var.ssh_public_key
    user_data_head = var.user_data_head, user_data_worker = var.user_data_worker, user_data_revision = var.user_data_revision
    runner_file    = var.runner_file, versions = var.versions, slots = var.slots, scheduler_port = var.scheduler_port, wait_seconds = var.wait_seconds
  }
}

resource "verda_ssh_key" "login" {
  name       = module.hosts.names.own
  public_key = trimspace(var.ssh_public_key)

  lifecycle { ignore_changes = [name] }
}

# Gives a machine its host key. Until it has run, the machine answers with another one, and is asked again.
resource "verda_startup_script" "host_key" {
  for_each = module.hosts.names.nodes

  name   = each.value
  script = module.hosts.key_script[each.key]

  # The provider changes none in place.
  lifecycle {
    ignore_changes       = [name, script]
    replace_triggered_by = [tls_private_key.host[each.key]]
  }
}

# The provider would change it in place, and then refuses.
resource "terraform_data" "spot" {
  input = var.spot
}

resource "verda_instance" "node" {
  for_each = module.hosts.names.nodes

  hostname          = each.key
  description       = "skyinfra ${var.stack}/${var.name}"
  location          = var.region
  instance_type     = var.machine_types[0]
  image             = var.image
  is_spot           = var.spot
  ssh_key_ids       = [verda_ssh_key.login.id]
  startup_script_id = verda_startup_script.host_key[each.key].id

  # Goes with the machine, whoever ends it: a volume that stays goes on costing.
  os_volume = {
    name                = each.key
    size                = local.disk_gb
    type                = "NVMe"
    on_destroy          = "delete_permanently"
    on_spot_discontinue = "delete_permanently"
  }

  timeouts { create = "30m" }

  lifecycle {
    # A key, and a name, that is changed is for machines that are made later.
    ignore_changes       = [description, ssh_key_ids]
    replace_triggered_by = [terraform_data.spot]
  }
}
