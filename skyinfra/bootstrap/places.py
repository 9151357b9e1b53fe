"""Paths on a cloud node."""

from __future__ import annotations

# The folder of the runner's user and of the tasks: root writes there, and reads nothing but messages.
FOLDER = "/var/lib/skyinfra"
STATUS = f"{FOLDER}/status.json"
END = f"{FOLDER}/end.request"
# Root's folder: the configuration, the secret, and what root remembers of the GPUs.
ROOT = "/etc/skyinfra"
CONFIG = f"{ROOT}/node.json"
# The configuration that all hosts of a TPU slice have, of which each makes its own.
SLICE = f"{ROOT}/slice.json"
SECRET = f"{ROOT}/secret"
OPT = "/opt/skyinfra"
STEPS = f"{OPT}/steps.json"
VERSIONS = f"{OPT}/versions.json"
PROGRAM = f"{OPT}/first_boot"
VENV = f"{OPT}/venv"
TOOLS = f"{OPT}/tools"
BUNDLE = f"{OPT}/ca.pem"
# Of a container that may delete itself: where, and with which key.
RENTED = f"{OPT}/rented"
# In the containers of an elastic pool: what the head wants of them, below it, and which starts have ended.
GROUP = f"{OPT}/group"
APT_STAMP = f"{OPT}/packages.json"
LOG = "/var/log/skyinfra/boot.jsonl"
# Files that a reboot removes.
RUN = "/run/skyinfra"
FAILURE = f"{RUN}/failure.json"
MARKER = f"{RUN}/booted"
# Of a container that waits until its head wants it.
WAITS = f"{RUN}/waits"
UNITS = "/etc/systemd/system"
SCRATCH = "/mnt/scratch"
# The volume with the jobs of the head: its top is root's, what is below is of the runner's user.
STATE = "/var/lib/skyinfra-head"
INSTANCE_ID = "/var/lib/cloud/data/instance-id"
# cloud-init's folder of this very instance: the marker that our files are on the disk, and its own of what it has done.
_INSTANCE = "/var/lib/cloud/instance"
WRITTEN = f"{_INSTANCE}/skyinfra-written"
DONE_ONCE = " ".join(f"{_INSTANCE}/sem/config_{module}" for module in ("write_files", "runcmd", "scripts_user"))
# What an image that was made of a node brings of the fleet of that one: of the folder drain, desired-layout, idle and
# status, in as few letters as user data have room for. What was installed stays.
OTHERS = f"{SECRET} {VERSIONS} {FOLDER}/[dis]*.json"
USER = "skyinfra"
