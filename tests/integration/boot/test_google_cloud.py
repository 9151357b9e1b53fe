"""A node of Google Cloud: set up, watched and taken back through the metadata service of its machine alone."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable

import pytest
from bed_fleet import BOOT_S, Bed, Fleet
from bed_machine import Machine
from bed_tasks import look
from fleet import until

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-more")]

_PART = 240_000


def on_google(machine: Machine, fleet: Fleet) -> None:
    """Makes *machine*, which is off, one of Google Cloud, with what modules/gcp puts into its metadata."""
    name, content = runner_wheel.packed(runner_wheel.wheel())
    fleet.bucket.wheel = {"name": name, "sha256": hashlib.sha256(content).hexdigest()}
    text = base64.b64encode(content).decode()
    key = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    versions = json.loads((fleet.bucket.folder / "versions.json").read_text())
    machine.metadata.attributes = {
        "user-data": gzip.decompress(machine.metadata.user_data).decode().replace(fleet.bucket.url, "gce://skyinfra"),
        "skyinfra-secret": fleet.secret,
        "skyinfra-versions-json": json.dumps({**versions, "wheel": fleet.bucket.wheel}),
        **{f"skyinfra-{key}-{n}": text[n * _PART : (n + 1) * _PART] for n in range(-(-len(text) // _PART))},
    }
    machine.metadata.user_data = b""
    # cloud-init tells by DMI, which no container has, and asks for an address by DHCP, which this network has not.
    source = machine.root / "usr/lib/python3/dist-packages/cloudinit/sources/DataSourceGCE.py"
    code = source.read_text().replace("perform_dhcp_setup = True", "perform_dhcp_setup = False")
    known = 'dmi.read_dmi_data("system-product-name")'
    assert known in code
    source.write_text(code.replace(known, '"Google Compute Engine"'))
    config = machine.root / "etc/cloud/cloud.cfg.d/91-google.cfg"
    config.write_text("datasource_list: [GCE]\n")
    with (machine.root / "etc/hosts").open("a") as hosts:
        hosts.write("169.254.169.254 metadata.google.internal\n")


def test_a_node_is_set_up_watched_and_taken_back_by_its_metadata(bed: Bed, fleet: Callable[..., Fleet]) -> None:
    made = fleet(bed.declare(provider=sky.GCP(flex_start_hours=1)))
    # Nothing but the packages comes from elsewhere.
    for machine in made.nodes:
        on_google(machine, made)
    for file in made.bucket.folder.iterdir():
        file.unlink()
    node = made.boot().head
    with made.connect() as pool:
        assert len(look() @ pool) == 4
        node.metadata.attributes["skyinfra-layout"] = "7g.80gb"
        until(lambda: len(node.status()["slots"]) == 1, seconds=BOOT_S)
        until(lambda: len(pool.slots()) == 1 and len(look() @ pool) == 1)
    assert [each["profile"] for gpu in node.gpus() for each in gpu["instances"]] == ["7g.80gb"]
    assert node.metadata.refused == 0
    node.metadata.preempted = "TRUE"
    status = until(lambda: (s := node.status()) and s.get("drain_reason") and s, seconds=60) or {}
    assert "Google Cloud takes the spot machine back" in json.dumps(status["drain_reason"])
