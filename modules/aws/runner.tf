# The runner that the nodes install: a wheel in a bucket of the pool, which nobody but its nodes reads. User data have
# no room for it.

locals {
  carries_runner = var.runner_file != ""
  runner_url     = local.carries_runner ? "s3://${aws_s3_bucket.runner[0].bucket}/${aws_s3_object.runner[0].key}" : ""
}

resource "aws_s3_bucket" "runner" {
  count = local.carries_runner ? 1 : 0

  # Names of buckets are small letters, and a prefix has room for 37 of them.
  bucket_prefix = substr(lower(replace(local.prefix, "_", "-")), 0, 37)
  force_destroy = true
  tags          = merge(local.tags, { Name = local.title })
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runner" {
  count = local.carries_runner && var.kms_key_id != null ? 1 : 0

  bucket = aws_s3_bucket.runner[0].id

  rule {
    bucket_key_enabled = true

    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = var.kms_key_id
    }
  }
}

resource "aws_s3_bucket_public_access_block" "runner" {
  count = local.carries_runner ? 1 : 0

  bucket                  = aws_s3_bucket.runner[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_object" "runner" {
  count = local.carries_runner ? 1 : 0

  bucket      = aws_s3_bucket.runner[0].id
  key         = basename(var.runner_file)
  source      = var.runner_file
  source_hash = filesha256(var.runner_file)

  depends_on = [aws_s3_bucket_public_access_block.runner]
}

# The role of the nodes: the module's own, or that of the caller's instance profile, which the bucket lets in.
data "aws_iam_instance_profile" "own" {
  count = local.carries_runner && !local.own_profile ? 1 : 0

  name = var.iam_instance_profile
}

resource "aws_s3_bucket_policy" "runner" {
  count = local.carries_runner ? 1 : 0

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
