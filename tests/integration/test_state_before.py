"""States of the version before: the first plan of this version moves their resources, and does nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mock_provider.bed import Bed
from module_cases import ModuleCase
from module_states import CASES, declare, place, restore

# One of each kind: machines over SSH, Google Cloud, a marketplace, and the one that stands for itself.
EVERYDAY = ("digitalocean", "gcp", "runpod", "ssh")


def secret_and_ids(bed: Bed) -> tuple[str, dict[str, str]]:
    fleet = bed.output("fleet")
    return fleet["secret"], {node["name"]: node["id"] for node in fleet["nodes"]}


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[] if each.name in EVERYDAY else pytest.mark.slow, id=each.name) for each in CASES],
)
def test_a_fleet_of_the_version_before_is_served_as_it_is(case: ModuleCase, tmp_path: Path) -> None:
    with place(case, tmp_path) as bed:
        restore(case, bed)
        before = secret_and_ids(bed)
        declare(bed, case, case.source)
        bed.run("init", "-no-color")
        planned = bed.changes()
        # Nothing but another address in the state; the output is the same.
        assert set(planned.values()) <= {"move"} and bool(planned) is (case.folder / "moved.tf").exists()
        assert '"add":0,"change":0' in bed.printed[-1] and '"remove":0' in bed.printed[-1]
        bed.apply()
        assert bed.changes() == {} and secret_and_ids(bed) == before
        # Its nodes then are those that this version changes and ends.
        declare(bed, case, case.source, **case.layout)
        changed = {at.removeprefix("module.train."): what for at, what in bed.changes().items() if what != "update"}
        assert not [at for at in changed if not re.match(case.carriers, at)]
        assert not (tmp_path / "far-end" / "calls").exists()
        assert before[0] not in "".join(bed.printed)
