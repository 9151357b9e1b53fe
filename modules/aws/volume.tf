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

# Volumes that outlive the fleet, which it neither makes nor removes. A group has none.
data "aws_ebs_volume" "kept" {
  for_each = { for volume in var.volumes : volume.name => volume.id }

  filter {
    name   = "volume-id"
    values = [each.value]
  }
}

resource "aws_volume_attachment" "kept" {
  for_each = { for index, volume in var.volumes : volume.name => { id = volume.id, letter = substr("ghijklmn", index, 1) } }

  # On Xen machines /dev/xvdg and on; all others have it by its id.
  device_name = "/dev/sd${each.value.letter}"
  volume_id   = each.value.id
  instance_id = aws_instance.head.id
  # As for the jobs: EC2 detaches it when the machine has shut down, with all of it written.
  skip_destroy = true

  lifecycle {
    precondition {
      condition     = data.aws_ebs_volume.kept[each.key].availability_zone == terraform_data.zone["head"].output
      error_message = "volumes: ${each.key} (${each.value.id}) is in ${data.aws_ebs_volume.kept[each.key].availability_zone}, and the node in ${terraform_data.zone["head"].output}. Name that zone in zones, or take a volume there: a snapshot of it makes one."
    }
  }
}
