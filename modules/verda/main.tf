locals {
  kind  = "verda"
  order = local.names
  head  = local.names[0]
  zone  = var.region

  ids = { for node, instance in verda_instance.node : node => instance.id }
  machines = {
    for node, instance in verda_instance.node : node => {
      address  = instance.ip
      inside   = instance.ip
      outside  = instance.ip
      user     = "root"
      port     = 22
      host_key = local.host_keys[node]
      key_file = var.key_file
      via      = null
    }
  }
  contact = { for node in local.names : node => { PATIENCE = "900" } }

  cloud_config = {}

  # The jobs of the head stand on its own disk.
  volume = ""
  limit  = { bytes = null, gzip = false, called = "Verda" }

  disk_gb = var.disk_gb == 0 ? 100 : var.disk_gb
}

resource "verda_ssh_key" "login" {
  name       = "skyinfra-${var.stack}-${var.name}"
  public_key = trimspace(var.ssh_public_key)
}

# Gives a machine its host key. Until it has run, the machine answers with another one, and is asked again.
resource "verda_startup_script" "host_key" {
  for_each = toset(local.names)

  name   = "skyinfra-${var.stack}-${each.key}"
  script = <<-EOT
    #!/bin/sh
    set -eu
    umask 077
    cat >/etc/ssh/skyinfra_host_key <<'KEY'
    ${indent(4, trimspace(tls_private_key.host[each.key].private_key_openssh))}
    KEY
    rm -f /etc/ssh/ssh_host_*
    mv /etc/ssh/skyinfra_host_key /etc/ssh/ssh_host_ed25519_key
    echo '${local.host_keys[each.key]}' >/etc/ssh/ssh_host_ed25519_key.pub
    systemctl restart ssh 2>/dev/null || systemctl restart sshd
  EOT

  # The provider changes none in place.
  lifecycle {
    ignore_changes       = [script]
    replace_triggered_by = [tls_private_key.host[each.key]]
  }
}

# The provider would change it in place, and then refuses.
resource "terraform_data" "spot" {
  input = var.spot
}

resource "verda_instance" "node" {
  for_each = toset(local.names)

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

  timeouts {
    create = "30m"
  }

  lifecycle {
    # A key that is changed is for machines that are made later.
    ignore_changes       = [ssh_key_ids]
    replace_triggered_by = [terraform_data.spot]
  }
}
