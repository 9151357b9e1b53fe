"""NVIDIA's mig-manager: where it reads which configuration, and the one that makes it keep a layout.

There are two, both of NVIDIA/mig-parted (v0.15.0, commit bd7160f). ``nvidia-mig-manager.service`` of systemd brings a
machine at every boot to the configuration that MIG_PARTED_SELECTED_CONFIG names, of the file MIG_PARTED_CONFIG_FILE;
both stand in its override.conf, and the file that it takes without one is written anew at every boot
(deployments/systemd).
The mig-manager of the GPU operator brings a node of Kubernetes to the configuration that the node's label
``nvidia.com/mig.config`` names, of a ConfigMap, and answers in ``nvidia.com/mig.config.state``: pending, rebooting,
success, failed (cmd/nvidia-mig-manager, pkg/mig/reconfigure).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from skyinfra.mig.parted import PartedEntry, parted_text

UNIT = "nvidia-mig-manager.service"
# deployments/systemd/service.sh.
DEFAULT_CONFIG = "/etc/nvidia-mig-manager/config.yaml"
_OVERRIDE = f"/etc/systemd/system/{UNIT}.d/override.conf"
_FILE, _LABEL = "MIG_PARTED_CONFIG_FILE", "MIG_PARTED_SELECTED_CONFIG"
# The operator gives it to nodes without a label (ClusterPolicy, migManager.config.default).
_DISABLED = "all-disabled"
# On disks and in clusters our own stands under this name.
_OWN = "skyinfra"
OPERATED_HINT = (
    "Set its label `nvidia.com/mig.config` to a configuration with this layout (`skyinfra mig export --format "
    "mig-manager` writes one; for what exists, `skyinfra-runner partition --export --format mig-manager`), or take the "
    "node from it: `kubectl label node NODE nvidia.com/gpu.deploy.mig-manager=false --overwrite`."
)
BOOT_HINT = (
    f"`systemctl disable {UNIT}` leaves the GPUs to skyinfra; `skyinfra-runner partition --export --format "
    "mig-manager` writes a configuration that keeps what exists."
)


@dataclass(frozen=True, slots=True)
class Selected:
    """The configuration *label* of *file*, to which nvidia-mig-manager.service brings a machine at every boot."""

    file: str
    label: str


def selected(environment: str) -> Selected | None:
    """The configuration that the service selects; *environment*: as `systemctl show --property=Environment` has it.

    None where none is named: the service fails then and changes nothing.
    """
    try:
        words = shlex.split(environment)
    except ValueError:
        return None
    found = dict(word.split("=", 1) for word in words if "=" in word)
    return Selected(found.get(_FILE) or DEFAULT_CONFIG, found[_LABEL]) if found.get(_LABEL) else None


def operated(process: str) -> str:
    """Returns the sentence on the mig-manager of the GPU operator, which runs as *process*."""
    return f"the GPU operator's mig-manager partitions the GPUs of this machine: {process}"


def boots(wanted: Selected) -> str:
    """Returns the sentence on nvidia-mig-manager.service, which selects that configuration."""
    return f"{UNIT} brings this machine to `{wanted.label}` of {wanted.file} at every boot"


def manager_text(entries: Sequence[PartedEntry], label: str = _OWN) -> str:
    """The configuration file with *entries* under *label*, and in comments where each mig-manager takes it from.

    It also has ``all-disabled``, which other nodes of a cluster select.
    """
    file = f"/etc/nvidia-mig-manager/{_OWN}.yaml"
    configs = {_DISABLED: (PartedEntry((), None, False, None),)} if label != _DISABLED else {}
    lines = [
        f"# For {UNIT}: this file as {file},",
        f"# because {DEFAULT_CONFIG} is written anew at every boot, and as {_OVERRIDE}:",
        "#   [Service]",
        f'#   Environment="{_FILE}={file}"',
        f'#   Environment="{_LABEL}={label}"',
        "# For the GPU operator, all of whose nodes take their configurations from it then; the label",
        "# nvidia.com/mig.config.state of the node says success in the end:",
        f"#   kubectl create configmap {_OWN}-mig-config -n gpu-operator --from-file=config.yaml={_OWN}.yaml",
        "#   kubectl patch clusterpolicies.nvidia.com/cluster-policy --type=merge "
        f"""-p '{{"spec": {{"migManager": {{"config": {{"name": "{_OWN}-mig-config"}}}}}}}}'""",
        f"#   kubectl label node NODE nvidia.com/mig.config={label} --overwrite",
    ]
    return "\n".join(lines) + "\n" + parted_text({**configs, label: tuple(entries)})
