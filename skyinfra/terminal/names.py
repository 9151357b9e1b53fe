"""Names for the completion of a shell: of stacks, pools, nodes, jobs, profiles and accelerators.

Read from cdktf.out and the state's file, and those of jobs from what was listed last. Nothing is started or asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from skyinfra.errors import SkyinfraError
from skyinfra.protocol.manifest import Manifest
from skyinfra.terraform.project import Project
from skyinfra.terraform.synthesized import SynthesizedStack

# Below the folder of the synthesized stacks, which version control leaves out: the jobs of each fleet, as listed last.
_JOBS = "skyinfra-jobs.json"


def stacks() -> list[str]:
    """Returns the names of the synthesized stacks."""
    return [stack.name for stack in _stacks()]


def fleets() -> list[str]:
    """Returns ``STACK/POOL`` of every pool that is synthesized."""
    return [f"{stack.name}/{pool['name']}" for stack in _stacks() for pool in stack.pools]


def both() -> list[str]:
    """Returns the names of the synthesized stacks, and ``STACK/POOL`` of every pool."""
    return [*stacks(), *fleets()]


def nodes(fleet: str) -> list[str]:
    """Returns the names of the nodes of a deployed fleet."""
    found = _manifest(fleet)
    return [node.name for node in found.nodes] if found else []


def profiles(fleet: str) -> list[str]:
    """Returns the profiles of the slots of a deployed fleet."""
    found = _manifest(fleet)
    return sorted({slot.profile for slot in found.slots if slot.profile}) if found else []


def jobs(fleet: str) -> list[str]:
    """Returns the names of the jobs of *fleet* as they were listed last."""
    with suppress(SkyinfraError, OSError, ValueError, AttributeError):
        found = json.loads((Project.find(quiet=True).output / _JOBS).read_text(encoding="utf-8")).get(fleet, ())
        return [name for name in found if isinstance(name, str)]
    return []


def remember_jobs(fleet: str, names: Iterable[str], *, more: bool = False) -> None:
    """Keeps the names of the jobs of *fleet* for `jobs`; *more*: beside those that are kept. Does nothing elsewhere."""
    with suppress(SkyinfraError, OSError, ValueError):
        file = Project.find(quiet=True).output / _JOBS
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        kept[fleet] = sorted({*names, *(kept.get(fleet, ()) if more else ())})
        file.write_text(json.dumps(kept), encoding="utf-8")


def accelerators() -> list[str]:
    """Returns the names of the accelerators in the catalog."""
    from skyinfra.accelerators import names

    return list(names())


def layouts(accelerator: str) -> list[str]:
    """Returns the profiles of a GPU."""
    from skyinfra import mig
    from skyinfra.accelerators import Accelerator

    with suppress(SkyinfraError):
        geometry = mig.geometry(accelerator) if accelerator in mig.models() else Accelerator.parse(accelerator)
        found = geometry if isinstance(geometry, mig.Geometry) else geometry.mig_geometry()
        return [profile.name for profile in found.profiles]
    return []


def _stacks() -> tuple[SynthesizedStack, ...]:
    with suppress(SkyinfraError, OSError):
        project = Project.find(quiet=True)
        return (*project.stacks(), *(block.stack for block in project.blocks()))
    return ()


def _manifest(fleet: str) -> Manifest | None:
    with suppress(SkyinfraError, OSError):
        if fleet.endswith(".json"):
            return Manifest.load(Path(fleet))
        name, _, pool = fleet.partition("/")
        stack = Project.find(quiet=True).stack(name, stacks=_stacks())
        return stack.known_fleets().get(pool or stack.only_pool)
    return None
