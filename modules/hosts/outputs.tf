output "fleet" {
  description = "The manifest of the fleet. Whoever reads it may use the fleet, so it waits for every node."
  value       = local.fleet
  depends_on  = [terraform_data.head, terraform_data.worker, terraform_data.layout, terraform_data.worker_layout]
}

output "cloud_config" {
  description = "By node, the cloud-config that gives a machine its host key. JSON is a form of it. Keys of the image and of other kinds go."
  value = {
    for node, key in var.host_keys : node => "#cloud-config\n${jsonencode(merge(jsondecode(var.cloud_config), {
      ssh_deletekeys = true
      ssh_keys = {
        ed25519_private = key.private_key_openssh
        ed25519_public  = trimspace(key.public_key_openssh)
      }
    }))}\n"
  }
}

output "key_script" {
  description = "By node, a script that does the same. Until it has run, the machine answers with another key, and is asked again."
  value = {
    for node, key in var.host_keys : node => <<-EOT
      #!/bin/sh
      set -eu
      umask 077
      cat >/etc/ssh/skyinfra_host_key <<'KEY'
      ${trimspace(key.private_key_openssh)}
      KEY
      rm -f /etc/ssh/ssh_host_*
      mv /etc/ssh/skyinfra_host_key /etc/ssh/ssh_host_ed25519_key
      echo '${trimspace(key.public_key_openssh)}' >/etc/ssh/ssh_host_ed25519_key.pub
      systemctl restart ssh 2>/dev/null || systemctl restart sshd
    EOT
  }
}

output "names" {
  description = "The names for the provider, as ../core gives them."
  value       = module.core.names
}
