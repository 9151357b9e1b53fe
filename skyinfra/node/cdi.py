"""CDI specifications: the files by which container engines give devices to containers.

NVIDIA's container toolkit has a service that writes one since 1.18, below /run, where it does not outlive a boot. One
in /etc was made by hand. The same devices in two files are a conflict: none is made where there was none (NVIDIA,
"Support for Container Device Interface", read 2026-11-24).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

_SERVICE = "nvidia-cdi-refresh.service"
_PROGRAM = "nvidia-ctk"
# Where container engines look, and the names that the toolkit's documents give.
_BY_HAND = ("etc/cdi/nvidia.yaml", "etc/cdi/nvidia.json")
_AT_RUN_TIME = ("run/cdi/nvidia.yaml", "run/cdi/nvidia.json")
_GENERATE_S = 60


def refresh(
    systemctl: Callable[..., str | None], execute: Callable[[Sequence[str], float], str | None], root: Path
) -> str | None:
    """Makes the specifications below *root* list the devices that stand now.

    *systemctl* and *execute* run a command and return None, or why it failed. Returns why the refresh failed; an empty
    string where it did not, and None where this machine gives no devices to containers in this way.
    """
    # With --no-block: while the machine boots the service may be ordered after this very one.
    known = systemctl("cat", _SERVICE) is None
    reasons = [systemctl("--no-block", "restart", _SERVICE)] if known else []
    written = (root / name for name in (_BY_HAND if known else (*_BY_HAND, *_AT_RUN_TIME)))
    stale = [file for file in written if file.exists()]
    program = shutil.which(_PROGRAM) if stale else None
    if program is not None:
        reasons += [execute([program, "cdi", "generate", f"--output={file}"], _GENERATE_S) for file in stale]
    elif stale:
        files = ", ".join(map(str, stale))
        reasons.append(f"{files} may list devices that have gone: there is no {_PROGRAM} to write it anew")
    return "; ".join(reason for reason in reasons if reason) if reasons else None
