"""A booted machine as one of Google Cloud."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

from booted_nodes.fleet import Fleet
from booted_nodes.machine import Machine
from skyinfra.bootstrap import runner_wheel

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
