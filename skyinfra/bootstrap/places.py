"""Paths on a cloud node."""

from __future__ import annotations

FOLDER = "/var/lib/skyinfra"
CONFIG = f"{FOLDER}/node.json"
STATUS = f"{FOLDER}/status.json"
# Not in the folder of the runner's user, who could put a link in its place.
SECRET = "/etc/skyinfra/secret"  # noqa: S105 - the name of a file
OPT = "/opt/skyinfra"
STEPS = f"{OPT}/steps.json"
VERSIONS = f"{OPT}/versions.json"
PROGRAM = f"{OPT}/first_boot"
VENV = f"{OPT}/venv"
TOOLS = f"{OPT}/tools"
BUNDLE = f"{OPT}/ca.pem"
APT_STAMP = f"{OPT}/packages.json"
LOG = "/var/log/skyinfra/boot.jsonl"
# Files that a reboot removes.
RUN = "/run/skyinfra"
FAILURE = f"{RUN}/failure.json"
MARKER = f"{RUN}/booted"
UNITS = "/etc/systemd/system"
SCRATCH = "/mnt/scratch"
INSTANCE_ID = "/var/lib/cloud/data/instance-id"
USER = "skyinfra"
