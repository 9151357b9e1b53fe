"""Mirrors of Terraform providers on this machine, and configurations of Terraform that use them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Names the folder that holds a mirror of Terraform providers, where it is in no usual place.
MIRROR = "SKYINFRA_PROVIDER_MIRROR"


def _mirrors() -> Iterator[Path]:
    """Where a mirror of providers may be: named, Terraform's own places, its cache, two levels below the root."""
    if os.environ.get(MIRROR):
        yield Path(os.environ[MIRROR])
    shares = os.environ.get("XDG_DATA_DIRS", "/usr/local/share:/usr/share").split(":")
    home = Path.home()
    yield from (home / ".terraform.d" / "plugins", home / ".local" / "share" / "terraform" / "plugins")
    yield from (Path(share) / "terraform" / "plugins" for share in shares)
    yield Path(os.environ.get("TF_PLUGIN_CACHE_DIR", home / ".terraform.d" / "plugin-cache"))
    for top in sorted(Path("/").iterdir()):
        if top.name not in ("dev", "proc", "sys", "run") and os.access(top, os.R_OK | os.X_OK) and top.is_dir():
            yield from (each.parent for each in sorted(top.glob("*/registry.terraform.io")))


@cache
def provider_mirror(source: str = "hashicorp/aws") -> Path | None:
    """The folder with a mirror that holds the provider *source*; None where there is none."""
    return next((path for path in _mirrors() if (path / "registry.terraform.io" / source).is_dir()), None)


def provider_configuration(folder: Path, source: str = "hashicorp/aws") -> Path | None:
    """A configuration of the terraform program, written to *folder*, that takes *source* from its mirror.

    None where there is no mirror, or a configuration already: Terraform then asks the registry, or does as told.
    """
    mirror = provider_mirror(source)
    if mirror is None or Path(os.environ.get("TF_CLI_CONFIG_FILE", os.devnull)).is_file():
        return None
    return mirror_configuration(folder, mirror, [f"registry.terraform.io/{source}"])


def mirror_configuration(folder: Path, mirror: Path, addresses: list[str]) -> Path:
    """A configuration of the terraform program, written to *folder*, that takes the providers *addresses* from *mirror*
    and all others from where they come otherwise."""
    path, selected = folder / "terraform.rc", json.dumps(addresses)
    path.write_text(
        "provider_installation {\n"
        f"  filesystem_mirror {{\n    path    = {json.dumps(str(mirror))}\n    include = {selected}\n  }}\n"
        f"  direct {{\n    exclude = {selected}\n  }}\n}}\n"
    )
    return path
