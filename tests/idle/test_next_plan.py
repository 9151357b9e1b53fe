"""What the next plan says of nodes that ended themselves, and what ``with`` blocks declare beside their pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skyinfra as sky
from skyinfra.deploy.missing_nodes import ended_nodes, stopped_nodes
from skyinfra.deploy.places import refuse_gone
from skyinfra.deploy.session import with_end
from skyinfra.errors import WrongAccount
from skyinfra.idle.meter import Meter
from skyinfra.node.folder import NodeDirectory, Status
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

AWS = "registry.terraform.io/hashicorp/aws"


def stack(folder: Path, pool: dict[str, Any], **inputs: Any) -> SynthesizedStack:
    return SynthesizedStack("fleet", folder, (pool,), {pool["name"]: inputs}, backend={})


def plan(*, gone: tuple[str, ...] = (), again: tuple[str, ...] = (), replaced: tuple[str, ...] = ()) -> Plan:
    changes = tuple(("create", each) for each in gone) + tuple(("replace", each) for each in (*again, *replaced))
    return Plan(Path("plan"), changes=changes, gone=frozenset(gone), reasons=dict.fromkeys(again, "requested"))


CLOUD = {"name": "train", "provider": "aws", "stop_after_idle": "30m"}
MACHINES = ("module.train.aws_instance.head", 'module.train.aws_instance.worker["train-1"]')


def test_instances_that_ended_come_back(tmp_path: Path) -> None:
    attached = "module.train.aws_volume_attachment.head"
    (said,) = ended_nodes(stack(tmp_path, CLOUD), plan(gone=(*MACHINES, attached)))
    assert said == (
        "train: 2 nodes ended without a deploy, as stop_after_idle=30m has it, probably; a deploy brings 2 back. "
        "Volumes and the jobs of its head are still there."
    )
    (said,) = ended_nodes(stack(tmp_path, CLOUD), plan(gone=MACHINES[1:]))
    assert "train: 1 node ended" in said


def test_pods_that_ended_come_back_without_the_jobs_of_their_head(tmp_path: Path) -> None:
    pods = ("module.train.runpod_pod.head", 'module.train.runpod_pod.worker["train-1"]')
    (said,) = ended_nodes(stack(tmp_path, {**CLOUD, "provider": "runpod"}), plan(gone=pods))
    assert said.startswith("train: 2 nodes ended without a deploy, as stop_after_idle=30m has it, probably")
    assert "Their disks are gone with them, and with that of the head its jobs; volumes are still there." in said


def test_machines_that_stopped_are_started(tmp_path: Path) -> None:
    machines = [f'module.train.module.google.google_compute_instance.node["train-{n}"]' for n in range(2)]
    made = stack(tmp_path, {**CLOUD, "provider": "gcp"})
    stopped = Plan(
        Path("plan"), changes=(("update", machines[0]), ("update", machines[1])), stopped=frozenset(machines)
    )
    (said,) = ended_nodes(made, stopped)
    assert (
        "train: 2 nodes ended without a deploy, as stop_after_idle=30m has it, probably; a deploy brings 2 back."
        in said
    )
    assert "the jobs of its head are still there" in said


class Shown:
    """Terraform, as far as it says what a refresh has found."""

    def __init__(self, **found: set[str]) -> None:
        self.values, self.asked = found, 0

    def found(self, plan: Plan) -> dict[str, set[str]]:
        self.asked += 1
        return {f"module.train.module.google.{name}": names for name, names in self.values.items()}


def test_a_machine_that_somebody_labelled_has_not_stopped(tmp_path: Path) -> None:
    made = stack(tmp_path, {**CLOUD, "provider": "gcp"})
    a, b = (f"module.train.module.google.google_compute_instance.{name}" for name in "ab")
    drifted = Plan(Path("plan"), drifted=frozenset([a, b, "module.train.google_compute_disk.head"]))
    shown: Any = Shown(
        **{"google_compute_instance.a": {"desired_status", "id"}, "google_compute_instance.b": {"labels"}}
    )
    assert stopped_nodes(made, shown, drifted) == {a}
    assert shown.asked == 1
    # Elsewhere nothing stops, and Terraform is not asked.
    assert stopped_nodes(stack(tmp_path, CLOUD), shown, drifted) == frozenset() and shown.asked == 1


def test_nothing_is_said_where_nothing_ended_or_no_end_is_declared(tmp_path: Path) -> None:
    assert ended_nodes(stack(tmp_path, CLOUD), plan()) == []
    assert ended_nodes(stack(tmp_path, CLOUD), plan(replaced=MACHINES)) == []
    assert ended_nodes(stack(tmp_path, {**CLOUD, "stop_after_idle": None}), plan(gone=MACHINES)) == []
    assert ended_nodes(stack(tmp_path, {**CLOUD, "name": "other"}), plan(gone=MACHINES)) == []


def test_a_local_node_says_why_it_ended(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "fleet" / "mig" / "mig-0"
    folder.mkdir(parents=True)
    node = NodeDirectory(folder)
    pool = {"name": "mig", "provider": "local", "stop_after_idle": "30m"}
    made = stack(tmp_path, pool, root="root")
    again = ("module.mig.terraform_data.head", 'module.mig.terraform_data.worker["mig-1"]')
    (said,) = ended_nodes(made, plan(again=(*again, "module.mig.terraform_data.credential")))
    assert "mig: 2 nodes ended without a deploy, as stop_after_idle=30m has it, probably" in said
    status = Status("fleet/mig", "mig-0", "stopped", "c", stops="not used for 30m (stop_after_idle)")
    node.write(node.status_file, status.dumps())
    (said,) = ended_nodes(made, plan(again=again))
    assert "2 nodes ended without a deploy, not used for 30m (stop_after_idle); a deploy brings 2 back" in said


def of(type: str, name: str) -> Resource:
    return Resource("train", type, name, f'provider["{AWS}"].us-east-1', {})


def test_what_was_attached_to_an_instance_says_nothing_of_the_credentials() -> None:
    machine, attached, vpc = of("aws_instance", "head"), of("aws_volume_attachment", "head"), of("aws_vpc", "this")
    made = stack(Path(), CLOUD)
    refuse_gone(made, [machine, attached, vpc], plan(gone=(machine.address, attached.address)), destroy=False)
    with pytest.raises(WrongAccount):
        refuse_gone(made, [machine, attached, vpc], plan(gone=(machine.address, vpc.address)), destroy=False)


def test_a_block_of_machines_that_cost_something_ends_by_itself() -> None:
    pool = sky.ComputePool(provider=sky.AWS(region="us-east-1"))
    given, said = with_end(pool)
    assert (given.stop_after_idle, given.max_lifetime) == ("30m", None)
    assert 'end themselves when nothing has used them for 30m; sky.ComputePool(..., stop_after_idle="never")' in said


@pytest.mark.parametrize(
    "fields",
    [{"stop_after_idle": "never"}, {"max_lifetime": "12h"}, {"stop_after_idle": "2h"}, {"max_lifetime": "never"}],
)
def test_what_a_block_declares_stays(fields: dict[str, str]) -> None:
    pool = sky.ComputePool(provider=sky.AWS(region="us-east-1"), **fields)
    assert with_end(pool) == (pool, "")


def test_a_block_that_costs_nothing_stays_as_it_is() -> None:
    pool = sky.ComputePool(provider=sky.Local())
    assert with_end(pool) == (pool, "")


def test_a_block_whose_nodes_cannot_end_says_so() -> None:
    pool = sky.ComputePool(provider=sky.GCP(project="p", region="us-central1", group=True))
    given, said = with_end(pool)
    assert given is pool
    assert said.startswith("nothing stops it if this program does not come back: a node of Google Cloud cannot end")


def test_the_status_of_a_node_of_the_version_before_is_read() -> None:
    status = Status("f", "n", "ready", "c", stops="stops in 3m")
    assert Status.loads(status.dumps()) == status
    before = status.dumps().replace(' "stops": "stops in 3m",\n', "")
    assert Status.loads(before).stops is None
    assert Meter().dumps()
