"""Fleets of the version before, as their states and clouds were recorded: one file for each module in states/.

`PYTHONPATH=.:tests:tests/helpers python -m cloud_modules.states MODULES` records them anew with the modules in the
folder MODULES, such as those of the last release: git archive TAG modules | tar -x -C FOLDER.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from far_end.stand_in import far_end
from mock_provider.bed import Bed, served
from support import ROOT

from cloud_modules import cases as module_cases
from cloud_modules.cases import ModuleCase, root

STATES = ROOT / "tests" / "integration" / "states"
_HOST = {"host_key": module_cases.PUBLIC_KEY}
_PLACE = {"project": "p", "region": "us-central1"}
SSH = dataclasses.replace(
    module_cases.over_ssh(
        "ssh",
        inputs={
            "hosts": [{**_HOST, "address": "192.0.2.1"}, {**_HOST, "address": "192.0.2.2", "user": "lab", "port": 2022}]
        },
    ),
    nodes=r"module\.hosts\.terraform_data\.node\[",
)
del SSH.inputs["ssh_public_key"]
GCPTPU = dataclasses.replace(
    module_cases.GCP,
    name="gcptpu",
    mock=("google", "google-beta"),
    providers={"google": _PLACE, "google-beta": _PLACE},
    inputs={
        **{name: text for name, text in module_cases.GCP.inputs.items() if name.startswith(("user_data", "versions"))},
        "machine_types": ["v5litepod-4"],
        "image": "v2-alpha-tpuv5-lite",
        "zones": ["us-central1-a"],
    },
    nodes=r"google_tpu_v2_vm\.",
)
# All but local: nothing of it was moved.
CASES = (*(each for each in module_cases.CASES if each.name != "local"), SSH, GCPTPU)
# A fleet with a runner; each with what makes it have more resources.
INPUTS = {"node_count": 2, "runner_file": "runner.whl"}
MORE = {
    "gcp": {
        "allow_cidrs": ["203.0.113.0/24"],
        "machine_types": ["a3-ultragpu-8g"],
        "gpudirect": True,
        "compact_placement": True,
    },
    # The family of the images then, which is retired.
    "nebius": {"image": "ubuntu24.04-cuda12"},
    "gcptpu": {"ssh_public_key": module_cases.PUBLIC_KEY},
    # The image that was declared then.
    "verda": {"image": "ubuntu-24.04-cuda-12.8-open-docker"},
}


@contextmanager
def place(case: ModuleCase, folder: Path) -> Iterator[Bed]:
    """A root of the module in a cloud of its own, with a runner."""
    with served(folder, *case.mock) as bed, ExitStack() as api:
        if case.over_ssh:
            bed.environment |= far_end(folder / "far-end", bed.environment["PATH"])
        case.answers(bed.world)
        if case.api is not None:
            bed.environment |= api.enter_context(case.api(bed.world))[1]
        bed.write("runner", "runner.whl")
        yield bed


def declare(bed: Bed, case: ModuleCase, source: str, **inputs: object) -> None:
    declared = json.loads(root(case, **{**INPUTS, **MORE.get(case.name, {}), **inputs}))
    declared["module"]["train"]["source"] = source
    if case.api is not None:  # nothing brings a runner to containers of a marketplace
        del declared["module"]["train"]["runner_file"]
    bed.write(json.dumps(declared), "main.tf.json")


def record(case: ModuleCase, modules: Path) -> None:
    """Applies the module below *modules* and writes what then stands, in the state and in the cloud."""
    with tempfile.TemporaryDirectory() as folder, place(case, Path(folder)) as bed:
        declare(bed, case, f"{modules}//{case.name}")
        bed.run("init", "-no-color")
        bed.apply()
        assert bed.changes() == {}
        world = {path.name: path.read_text() for path in sorted(bed.world.folder.iterdir())}
        state = json.loads((bed.folder / "terraform.tfstate").read_text())
    STATES.mkdir(exist_ok=True)
    text = json.dumps({"state": state, "world": world}, indent=1)
    (STATES / f"{case.name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def restore(case: ModuleCase, bed: Bed) -> None:
    """Puts what was recorded in the place of what stands."""
    recorded = json.loads(gzip.decompress((STATES / f"{case.name}.json.gz").read_bytes()))
    for name, text in recorded["world"].items():
        (bed.world.folder / name).write_text(text)
    bed.write(json.dumps(recorded["state"]), "terraform.tfstate")


if __name__ == "__main__":
    for each in [case for case in CASES if case.name in sys.argv[2:] or not sys.argv[2:]]:
        record(each, Path(sys.argv[1]).resolve())
        print(each.name)
