# What the nodes fetch at their first boot stands in a bucket of the pool, which lets their role alone in: the fleet
# secret, which user data would show to whoever may describe instances, and the runner with the versions of what it
# needs, for which user data have no room. A fleet keeps the runner and the versions that it was made with, whoever
# applies it later: nodes that come later get the same.

locals {
  carries_runner = var.runner_file != ""
  has_bucket     = local.carries_runner || var.versions != null
  bucket_url     = local.has_bucket ? "s3://${aws_s3_bucket.runner[0].bucket}" : ""
  runner_url     = local.carries_runner ? "${local.bucket_url}/${aws_s3_object.runner[0].key}" : ""
}

resource "aws_s3_bucket" "runner" {
  count = local.has_bucket ? 1 : 0

  # Names of buckets are small letters, and a prefix has room for 37 of them.
  bucket_prefix = substr(lower(replace(local.prefix, "_", "-")), 0, 37)
  force_destroy = true
  tags          = merge(local.tags, { Name = local.title })
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runner" {
  count = local.has_bucket ? 1 : 0

  bucket = aws_s3_bucket.runner[0].id

  rule {
    bucket_key_enabled = var.kms_key_id != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_id == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_id
    }
  }
}

resource "aws_s3_bucket_public_access_block" "runner" {
  count = local.has_bucket ? 1 : 0

  bucket                  = aws_s3_bucket.runner[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

# S3 takes ten tags on an object, and a provider may give more by default: objects take none of those.
resource "aws_s3_object" "secret" {
  count = local.has_bucket ? 1 : 0

  bucket  = aws_s3_bucket.runner[0].id
  key     = "secret"
  content = terraform_data.secret.triggers_replace

  override_provider {
    default_tags {
      tags = {}
    }
  }

  depends_on = [aws_s3_bucket_public_access_block.runner, aws_s3_bucket_server_side_encryption_configuration.runner]
}

resource "aws_s3_object" "runner" {
  count = local.carries_runner ? 1 : 0

  bucket      = aws_s3_bucket.runner[0].id
  key         = basename(var.runner_file)
  source      = var.runner_file
  source_hash = filesha256(var.runner_file)

  override_provider {
    default_tags {
      tags = {}
    }
  }

  # An upgrade replaces it; until versions.json names the new one, nodes that boot find the old one.
  lifecycle {
    create_before_destroy = true
    ignore_changes        = [key, source, source_hash]
  }

  depends_on = [aws_s3_bucket_public_access_block.runner, aws_s3_bucket_server_side_encryption_configuration.runner]
}

resource "terraform_data" "versions" {
  count = var.versions == null ? 0 : 1

  input = var.versions

  lifecycle {
    ignore_changes = [input]
  }
}

resource "aws_s3_object" "versions" {
  count = var.versions == null ? 0 : 1

  bucket = aws_s3_bucket.runner[0].id
  key    = "versions.json"

  # Of the wheel what was put there, not what is declared now.
  content = jsonencode(merge(terraform_data.versions[0].output, {
    version = 1
    wheel   = one([for file in aws_s3_object.runner : { name = file.key, sha256 = file.source_hash }])
  }))

  override_provider {
    default_tags {
      tags = {}
    }
  }

  depends_on = [aws_s3_bucket_public_access_block.runner, aws_s3_bucket_server_side_encryption_configuration.runner]
}

# The role of the nodes: the module's own, or that of the caller's instance profile, which the bucket lets in.
data "aws_iam_instance_profile" "own" {
  count = local.has_bucket && !local.own_profile ? 1 : 0

  name = var.iam_instance_profile

  # Read when the bucket is made: a profile of the same root is not there before.
  depends_on = [aws_s3_bucket.runner]
}

resource "aws_s3_bucket_policy" "runner" {
  count = local.has_bucket ? 1 : 0

  bucket = aws_s3_bucket.runner[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "Nodes"
      Effect    = "Allow"
      Action    = "s3:GetObject"
      Resource  = "${aws_s3_bucket.runner[0].arn}/*"
      Principal = { AWS = local.own_profile ? aws_iam_role.this[0].arn : data.aws_iam_instance_profile.own[0].role_arn }
    }]
  })

  depends_on = [aws_s3_bucket_public_access_block.runner]
}
