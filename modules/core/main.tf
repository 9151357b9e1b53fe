# What the modules of all providers share: the inputs of every pool are checked, the placeholders of the user data filled
# in, their size compared with what the provider takes, and names given.

locals {
  # Terraform has no loop over replace(). The name of the node is filled in where the node is made.
  user_data = {
    for which, text in { head = var.pool.user_data_head, worker = var.pool.user_data_worker } : which => replace(replace(replace(replace(text, "@SKYINFRA_HEAD@", var.places.head), "@SKYINFRA_BUCKET@", var.places.bucket), "@SKYINFRA_SECRET@", var.secret.triggers_replace), "@SKYINFRA_RUNNER@", var.places.runner)
  }

  # The size of the user data, with stand-ins of the same length, and as hard to compress, as the real values, which no
  # plan knows.
  sample_secret = "${uuidv5("dns", "skyinfra")}${uuidv5("dns", "skyinfra.fleet")}"
  # The prefix of a bucket's name is continued with 26 digits.
  sample_bucket = "s3://skyinfra-${var.pool.name}-20261122004911123456789012"
  samples = {
    for which, text in { head = var.pool.user_data_head, worker = var.pool.user_data_worker } : which => replace(replace(replace(replace(replace(replace(text, "@SKYINFRA_HEAD@", "198.51.100.247:${var.pool.scheduler_port}"), "@SKYINFRA_BUCKET@", local.sample_bucket), "@SKYINFRA_SECRET@", local.sample_secret), "@SKYINFRA_NODE@", "${var.pool.name}-100"), "@SKYINFRA_RUNNER@", "${local.sample_bucket}/${basename(var.pool.runner_file)}"), "@SKYINFRA_VOLUME@", "vol-0a1b2c3d4e5f60718")
  }
  sizes  = { for which, text in local.samples : which => var.limit.gzip ? length(base64gzip(text)) * 3 / 4 : length(base64encode(text)) * 3 / 4 }
  packed = var.limit.gzip ? " after gzip" : ""
  # The real values may compress a little worse.
  slack = 48

  # Small letters, digits and dashes, a letter first and no dash last, which every provider takes; as long as the provider
  # allows, with a part of the fleet's own at the end. What a long stack and pool have too much is cut in the middle of the
  # name. A resource that exists keeps its name: modules ignore changes of it.
  plain = lower(replace("${var.pool.stack}-${var.pool.name}", "/[^A-Za-z0-9]+/", "-"))
  room  = var.names.limit - var.names.reserve - length("skyinfra--") - 8
  own   = "skyinfra-${trim(substr(local.plain, 0, local.room), "-")}-${substr(var.secret.id, 0, 8)}"
}
