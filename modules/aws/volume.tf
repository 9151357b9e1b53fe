# What outlives a head that is replaced: its jobs, on a volume that is there for as long as the fleet is.

resource "aws_ebs_volume" "head" {
  availability_zone = terraform_data.zone["head"].output
  encrypted         = true
  kms_key_id        = var.kms_key_id
  type              = "gp3"
  size              = var.head_volume_gb
  tags              = merge(local.tags, { Name = "${var.stack}/${local.head}/jobs" })

  lifecycle {
    # Another key would make another volume, without the jobs.
    ignore_changes = [kms_key_id]
  }
}

resource "aws_volume_attachment" "head" {
  # On Xen machines /dev/xvdf; all others have it by its id.
  device_name = "/dev/sdf"
  volume_id   = aws_ebs_volume.head.id
  instance_id = aws_instance.head.id
  # A head that is terminated shuts down and lets go of it. To detach it before would cut the head off while it writes,
  # and a spot instance cannot be stopped for it.
  skip_destroy = true
}
