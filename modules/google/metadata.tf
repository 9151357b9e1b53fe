# What the nodes fetch at their first boot stands in their own metadata: the fleet secret, and the runner with the
# versions of what it needs. A fleet keeps the runner and the versions that it was made with, whoever applies it later:
# nodes that come later get the same.

locals {
  carried       = var.pool.runner_file == "" ? "" : filebase64(var.pool.runner_file)
  carried_bytes = length(local.carried)
  # A value takes 256 KB; 240,000 characters of base64 are whole bytes.
  part   = 240000
  runner = one(terraform_data.runner[*].triggers_replace)
  parts  = local.runner == null ? 0 : nonsensitive(ceil(length(local.runner.content) / local.part))

  delivered = merge(
    { skyinfra-secret = var.secret.triggers_replace },
    { for each in terraform_data.versions : "skyinfra-versions-json" => jsonencode(merge(each.output, {
      version = 1
      wheel   = local.runner == null ? null : { name = local.runner.name, sha256 = local.runner.sha256 }
    })) },
    { for n in range(local.parts) : "skyinfra-${replace(nonsensitive(local.runner.name), "/[^A-Za-z0-9_-]/", "-")}-${n}" => substr(local.runner.content, n * local.part, local.part) },
    var.pool.ssh_public_key == "" ? {} : { ssh-keys = "ubuntu:${trimspace(var.pool.ssh_public_key)}", enable-oslogin = "FALSE" },
  )
  places = {
    head   = "${google_compute_address.head.address}:${var.pool.scheduler_port}"
    bucket = "gce://skyinfra"
    runner = local.runner == null ? "" : "gce://skyinfra/${local.runner.name}"
  }
}

# In `triggers_replace`, as the secret is: `input` would be printed in the plan of a destroy.
resource "terraform_data" "runner" {
  count = var.pool.runner_file == "" ? 0 : 1

  triggers_replace = sensitive({ name = basename(var.pool.runner_file), sha256 = filesha256(var.pool.runner_file), content = local.carried })

  lifecycle { ignore_changes = [triggers_replace] }
}

resource "terraform_data" "versions" {
  count = var.pool.versions == null ? 0 : 1

  input = var.pool.versions

  lifecycle { ignore_changes = [input] }
}
