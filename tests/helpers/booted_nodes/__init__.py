"""Nodes that really boot: a Debian with systemd and cloud-init in systemd-nspawn, QEMU, or Podman."""
