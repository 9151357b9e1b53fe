# The host key of each machine: `python -m tools.core` copies it into the modules whose machines get theirs with the user
# data. It is made before the machine, so that the first contact over SSH is checked as every later one. Its private half
# stands in the state, as the fleet secret does, and in the user data of that machine. A module says in a local what its
# cloud-config has besides: `cloud_config`.

resource "tls_private_key" "host" {
  for_each  = toset(local.names)
  algorithm = "ED25519"
}

locals {
  host_keys = { for node, key in tls_private_key.host : node => trimspace(key.public_key_openssh) }
  # A cloud-config, of which JSON is a form. Keys of the image and of other kinds go.
  host_key_data = {
    for node, key in tls_private_key.host : node => "#cloud-config\n${jsonencode(merge(local.cloud_config, {
      ssh_deletekeys = true
      ssh_keys = {
        ed25519_private = key.private_key_openssh
        ed25519_public  = trimspace(key.public_key_openssh)
      }
    }))}\n"
  }
}
