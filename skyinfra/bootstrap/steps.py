"""The steps of a node's first boot, compiled from the declaration.

`skyinfra.first_boot.operations` says what each operation does and how it finds out that there is nothing to do; the
node reads the steps from one JSON file.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyinfra import mig
from skyinfra.bootstrap import places, runner_wheel
from skyinfra.compiler import Deployment
from skyinfra.first_boot import buckets, conditions, disks, mounts, operations, slices
from skyinfra.mig import drivers
from skyinfra.protocol.nodeconfig import (
    BUCKET_PLACEHOLDER,
    VOLUME_PLACEHOLDER,
    VOLUMES_PLACEHOLDER,
    NodeAccelerator,
    NodeConfig,
)

VERSION = 1
# A declared runner with its hash, which nodes hold it to.
PINNED = r"(?P<url>(https?|file)://\S+/(?P<file>[^/#\s]+\.whl))#sha256=(?P<sha256>[0-9a-f]{64})"
_MINUTE = 60.0
# No node has an earlier time: 2026-01-01, moved on with releases.
_MADE = 1_767_225_600
# Not read by client and workers from each other, but what the runner was tested with.
_TESTED = ("cryptography", "nvidia-ml-py")
_GROUPS = ("video", "render", "neuron")
# What mounts a bucket.
_FOR_BUCKETS = ("fuse3", "rclone")
# What of the node's folder outlives a head: its jobs, and the files that they need.
_STATE = ("jobs", "kept")
_NAMES = {kind: name for name, kind in operations.OPERATIONS.items()}
# Where Pythons and caches stand does not depend on whose home it is; nobody answers questions.
_ENVIRONMENT = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "UV_CACHE_DIR": "/var/cache/skyinfra",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_INSTALL_DIR": f"{places.OPT}/python",
}

Operation = (
    conditions.Clock
    | operations.File
    | conditions.Space
    | operations.NodeName
    | operations.User
    | operations.Trust
    | disks.Scratch
    | operations.Packages
    | operations.Driver
    | operations.Python
    | operations.Runner
    | disks.Volume
    | operations.Units
    | mounts.Mount
    | buckets.Bucket
    | slices.SliceHost
)


@dataclass(frozen=True)
class Step:
    """A step. name: as people read it. operation: the action, and the check whether it is done already.

    timeout_s: for all attempts together, with the pauses between them; what runs then is ended. attempts: more than
    one where trying again may help.
    """

    name: str
    operation: Operation
    timeout_s: float
    attempts: int = 1

    def to_json(self) -> dict[str, object]:
        """Returns plain JSON values, as the node reads them."""
        return {
            "name": self.name,
            "timeout_s": self.timeout_s,
            "attempts": self.attempts,
            "operation": _NAMES[type(self.operation)],
            # User data have no room for what is seldom known.
            "arguments": {name: v for name, v in vars(self.operation).items() if (name, v) != ("sha256", None)},
        }


def document(steps: tuple[Step, ...], config: NodeConfig, *, report_unit: str | None) -> str:
    """Returns the text of ``steps.json``. *report_unit*: the unit to start when a step has failed."""
    packages = config.packages
    environment = {**_ENVIRONMENT, **(packages.environment(bundle=places.BUNDLE) if packages else {})}
    content = {
        "version": VERSION,
        "node": places.CONFIG,
        "secret": places.SECRET,
        "log": places.LOG,
        "status": places.STATUS,
        "failure": places.FAILURE,
        "report_unit": report_unit,
        "environment": environment,
        "steps": [step.to_json() for step in steps],
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def compose(deployment: Deployment, config: NodeConfig, *, units: tuple[str, ...]) -> tuple[Step, ...]:
    """Returns the steps of the node *config* of *deployment*, in order. *units*: the units to start at the end."""
    return tuple(_steps(deployment, config, units))


def _steps(deployment: Deployment, config: NodeConfig, units: tuple[str, ...]) -> Iterator[Step]:
    image, pool, traits = deployment.pool.image, deployment.pool.name, deployment.pool.provider.data.traits
    # It gives this node its name, under which it tells of what fails.
    if config.slice_hosts:
        host = slices.SliceHost(places.SLICE, places.CONFIG, config.slice_hosts)
        yield Step("host of the slice", host, 5 * _MINUTE, attempts=6)
    # Over a wrong clock nothing can be fetched.
    yield Step("clock", conditions.Clock(_MADE, 30), _MINUTE)
    # The bucket may be signed for by the authority of the certificate. Without the secret nobody is told of a failure.
    if config.packages is not None and config.packages.ca_certificate:
        yield Step("CA certificate", operations.Trust(places.CONFIG, places.BUNDLE), 2 * _MINUTE)
    for file, path in (("secret", places.SECRET), ("versions", places.VERSIONS)):
        fetched = operations.File(f"{BUCKET_PLACEHOLDER}/{path.rpartition('/')[2]}", path)
        yield Step(file, fetched, 5 * _MINUTE, attempts=6)
    if deployment.selection.grouped and not config.head and not config.slice_hosts:
        name = operations.NodeName(places.CONFIG, f"{pool}-asg", f"{pool}-", places.INSTANCE_ID)
        yield Step("name of the node", name, 30)
    yield Step("user and folders", operations.User(places.USER, list(_GROUPS), places.FOLDER), _MINUTE)
    yield Step("disk", conditions.Space(places.FOLDER), _MINUTE)
    if traits.scratch is not None:
        scratch = disks.Scratch(traits.scratch, places.SCRATCH, "skyinfra", places.USER)
        yield Step("instance store", scratch, 5 * _MINUTE, attempts=2)
    if apt := [*image.apt, *(_FOR_BUCKETS if deployment.pool.mounts else ())]:
        packages = operations.Packages(list(dict.fromkeys(apt)), places.APT_STAMP)
        yield Step("packages of the system", packages, 15 * _MINUTE, attempts=3)
    accelerator = None if config.scheduler_only or config.simulate else config.accelerator
    if accelerator is not None and (accelerator.vendor == "nvidia" or accelerator.vendor in operations.Driver.DEVICES):
        driver = operations.Driver(accelerator.vendor, accelerator.name, _oldest_driver(accelerator))
        yield Step("driver", driver, 2 * _MINUTE, attempts=4)
    python = operations.Python(image.python, places.VENV, places.TOOLS, places.VERSIONS)
    yield Step("Python", python, 10 * _MINUTE, attempts=3)
    own = [image.runner] if image.runner is not None else []
    if pinned := re.fullmatch(PINNED, image.runner or ""):
        own = [f"{places.OPT}/{pinned['file'].replace('%2B', '+')}"]
        yield Step("runner's wheel", operations.File(pinned["url"], own[0], pinned["sha256"]), 5 * _MINUTE, attempts=6)
    runner = operations.Runner(places.VENV, places.TOOLS, own, places.VERSIONS, BUCKET_PLACEHOLDER)
    yield Step("runner", runner, 10 * _MINUTE, attempts=4)
    if config.head and traits.head_volume:
        # Terraform attaches it when the machine runs: it may come later than the rest.
        kept = places.STATE, places.FOLDER, list(_STATE), places.USER
        volume = disks.Volume(VOLUME_PLACEHOLDER, list(traits.head_volume), *kept)
        yield Step("volume of the head", volume, 10 * _MINUTE, attempts=30)
    yield from _mounts(deployment)
    if units:
        services = operations.Units(list(units), ["skyinfra-runner.service"], places.MARKER, places.VENV, places.UNITS)
        yield Step("services", services, _MINUTE, attempts=2)


def _mounts(deployment: Deployment) -> Iterator[Step]:
    """Yields a step for each volume that outlives the fleet, and for each folder of a bucket. Terraform attaches disks
    when the machine runs."""
    for index, (path, volume) in enumerate(deployment.pool.volumes.items()):
        data = volume.data
        devices = [each.replace("{letter}", "ghijklmn"[index]).replace("{index}", str(index)) for each in data.devices]
        ids = VOLUMES_PLACEHOLDER if any("{}" in each for each in devices) else ""
        mounted = mounts.Mount(volume.name, path, places.USER, data.mounted, devices, ids, index)
        yield Step(f"volume {volume.name}", mounted, 10 * _MINUTE, attempts=30)
    for index, mount in enumerate(deployment.pool.mounts):
        unit = f"{places.UNITS}/skyinfra-mount-{index}.service"
        bucket = buckets.Bucket(mount.bucket.rstrip("/"), mount.path, mount.mode, mount.cache, places.USER, unit)
        # IAM may take a minute until a role has what it was given.
        yield Step(f"bucket at {mount.path}", bucket, 10 * _MINUTE, attempts=30)


def carries_runner(deployment: Deployment) -> bool:
    """Returns whether the runner travels with the stack, as a wheel of the code that compiles it."""
    return deployment.pool.provider.data.boot.form != "node.json" and deployment.pool.image.runner is None


def versions() -> dict[str, Any]:
    """The versions that the nodes of a fleet that is made now get: the Python of this machine, packages of the release.

    They are no part of the user data: a fleet keeps those that it was made with, whoever deploys it later.
    """
    return {"python": ".".join(platform.python_version_tuple()[:2]), "requirements": pins()}


def pins() -> list[str]:
    """Returns the runner's dependencies in the versions of this release, whatever this machine has."""
    return [*runner_wheel.pins(), *(f"{name}=={runner_wheel.release()[name]}" for name in _TESTED)]


def _oldest_driver(accelerator: NodeAccelerator) -> str | None:
    """Returns the oldest driver that offers every layout of the node; None where unknown."""
    if accelerator.mig_model not in mig.models() or not any(accelerator.layouts):
        return None
    geometry = mig.geometry(accelerator.mig_model)
    layouts = {tuple(partition.profile for partition in layout) for layout in accelerator.layouts if layout}
    found = [mig.required_driver(layout, geometry) for layout in layouts]
    return max((driver for driver in found if driver), key=drivers.version, default=None)
