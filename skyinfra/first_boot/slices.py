"""A host of a TPU slice. It is in the user data of nodes whose metadata service is Google Cloud's only."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import gce
from .programs import Failed, read, read_json, replace

# What the attribute `tpu-env` calls a value, and the variables in which libtpu reads it without the metadata service,
# which tasks cannot reach: those that GKE's plugin sets, for the same reason
# (github.com/ai-on-gke/tpu-device-plugin, pkg/tpu/util/util.go). The attributes are those that JAX
# (jax/_src/clusters/cloud_tpu_cluster.py) and torch_xla (torch_xla/_internal/tpu.py) read. 2026-11-24
_KNOWN = {
    "ACCELERATOR_TYPE": ("TPU_ACCELERATOR_TYPE",),
    "TOPOLOGY": ("TPU_TOPOLOGY",),
    "ALT": ("TPU_TOPOLOGY_ALT", "ALT"),
    "WRAP": ("TPU_TOPOLOGY_WRAP", "WRAP"),
    "HOST_BOUNDS": ("TPU_HOST_BOUNDS", "HOST_BOUNDS"),
    "CHIPS_PER_HOST_BOUNDS": ("TPU_CHIPS_PER_HOST_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
}


@dataclass(frozen=True)
class SliceHost:
    """The node configuration *node* of one host, out of the one that all *hosts* of the slice have, *shared*.

    The name of the slice becomes that of the host, SLICE-NUMBER; the variables are added to those of the workers.
    """

    shared: str
    node: str
    hosts: int

    def done(self) -> bool:
        return Path(self.node).exists() and bool(read_json(self.node) == self._wanted())

    def do(self) -> None:
        if not Path(self.node).exists():
            # Where the metadata do not answer, the report of that has to find the head.
            replace(self.node, read(self.shared))
        replace(self.node, json.dumps(self._wanted(), separators=(",", ":")) + "\n")

    def _wanted(self) -> dict[str, Any]:
        document: dict[str, Any] = read_json(self.shared)
        number = int(_attribute("agent-worker-number"))
        # Of each host, in the order of their numbers: two words without a meaning here, and its address.
        addresses = [each.split(":")[2] for each in _attribute("worker-network-endpoints").split(",")]
        if len(addresses) != self.hosts or number >= self.hosts:
            raise Failed(f"this is host {number} of {len(addresses)}, and the slice is declared with {self.hosts}")
        width = len(str(self.hosts - 1))
        document["node"] = f"{document['node']}-{number:0{width}}"
        of_slice = {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_ID": str(number),
            "TPU_WORKER_HOSTNAMES": ",".join(addresses),
            **_topology(self.hosts),
        }
        document["env"] = {**document["env"], **of_slice}
        return document


def _topology(hosts: int) -> dict[str, str]:
    found = dict(re.findall(r"^(\w+): *'?([^'\n]*)'?$", _attribute("tpu-env"), re.MULTILINE))
    if "HOST_BOUNDS" not in found:
        # v2 and v3 say none: hosts of 2x2 chips in a square, or in two of them side by side (torch_xla, as above).
        across = 2 ** ((hosts.bit_length() - 1) // 2)
        found.update(HOST_BOUNDS=f"{across},{hosts // across},1", CHIPS_PER_HOST_BOUNDS="2,2,1")
    return {each: found[name] for name, variables in _KNOWN.items() if found.get(name) for each in variables}


def _attribute(name: str) -> str:
    try:
        return gce.metadata(f"attributes/{name}").strip()
    except OSError as error:
        raise Failed(f"the metadata of this host have no {name}: {error}") from None


OPERATIONS = {"slice_host": SliceHost}
