"""Debian's PyTorch, as `make torch` unpacks it or as it is installed: for processes that are given `variables`."""

from __future__ import annotations

import os
import platform
import sysconfig
from pathlib import Path

from support import ROOT

UNPACKED = ROOT / "build" / "torch"
_PACKAGES = [root / "usr" / "lib" / "python3" / "dist-packages" for root in (UNPACKED, Path("/"))]
_LIBRARIES = UNPACKED / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
# It goes with Debian's NumPy; what else it needs the virtual environment has.
_NAMES = ("torch", "torchgen", "functorch", "numpy")


def there() -> bool:
    """Whether it can be imported by this Python."""
    torch = _find("torch")
    return torch is not None and (torch / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}").exists()


def variables(folder: Path) -> dict[str, str]:
    """The environment of a process that imports it, and nothing else of Debian's, by way of the empty *folder*."""
    for name in _NAMES:
        found = _find(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    # BLAS and LAPACK lie in folders of their own, from where the system links one of several.
    libraries = [str(_LIBRARIES / part) for part in ("..", ".", "blas", "lapack")]
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(os.pathsep),
    }


def _find(name: str) -> Path | None:
    return next((path / name for path in _PACKAGES if (path / name).is_dir()), None)
