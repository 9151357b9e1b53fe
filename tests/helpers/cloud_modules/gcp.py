"""modules/gcp on a mock of its provider: what a plan would do with some inputs, and what the cloud was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mock_provider.bed import Bed, served

from cloud_modules.cases import GCP, gcp_answers

# The machines, the disk of the head and what reaches the nodes stand in the module that gcp calls.
GOOGLE = "module.google."
INSTANCE, TEMPLATE = "google_compute_instance", "google_compute_instance_template"
GROUP = "google_compute_region_instance_group_manager"


@contextlib.contextmanager
def google(folder: Path) -> Iterator[Bed]:
    """A bed of the provider of Google Cloud, in this *folder*, which answers as the cloud does."""
    with served(folder, "google") as made:
        gcp_answers(made.world)
        yield made


def long_runner(folder: Path) -> Path:
    """Returns a wheel that is longer than one value of the metadata takes."""
    file = folder / "skyinfra-0.1.0+1-py3-none-any.whl.bz2"
    file.write_bytes(bytes(hashlib.sha512(b"x").digest()) * 4000)
    return file


def declare(bed: Bed, **inputs: Any) -> dict[str, str]:
    """Returns what a plan would do, in the module."""
    first = not (bed.folder / ".terraform").exists()
    root = {
        "terraform": {"required_providers": {"google": {"source": "registry.terraform.io/hashicorp/google"}}},
        "provider": GCP.providers,
        "module": {"train": {"source": GCP.source, "name": "train", **GCP.inputs, **inputs}},
        "output": {"fleet": {"value": "${module.train.fleet}", "sensitive": True}},
    }
    bed.write(json.dumps(root), "main.tf.json")
    if first:
        bed.run("init", "-no-color")
    return {address.removeprefix("module.train."): action for address, action in bed.changes().items()}


def refused(bed: Bed, message: str, **inputs: Any) -> None:
    """Asserts that a plan with these *inputs* is refused with the *message*."""
    with pytest.raises(AssertionError) as caught:
        declare(bed, **inputs)
    assert message in str(caught.value)


def instances(bed: Bed) -> dict[str, dict[str, Any]]:
    """Returns the machines that were asked for, by the names of their nodes."""
    return {each["labels"]["skyinfra-node"]: each for each in bed.world.asked(INSTANCE)}
