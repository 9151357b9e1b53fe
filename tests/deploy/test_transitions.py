"""The change of a fleet's layout where compute instances share GPU instances."""

from __future__ import annotations

import json
from pathlib import Path

from skyinfra import mig
from skyinfra.deploy.transitions import Transition, changes
from skyinfra.mig import Compute
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.terminal.drawing import write_svg

H100 = mig.geometry("h100_80gb")


def slot(index: int, profile: str, start: int, size: int, compute: Compute | None = None) -> InstanceInfo:
    where = {"start": start, "size": size, "units": 8, "compute": compute}
    return InstanceInfo("n1", index, f"n1/{index}", "partition", "s/p", profile, "H100", 0, f"MIG-{index}", **where)  # type: ignore[arg-type]


def test_compute_instances_go_and_stay_one_by_one(tmp_path: Path) -> None:
    ones = [slot(index, "1c.3g.40gb", 4, 4, Compute(index, 1)) for index in range(3)]
    layouts = mig.resolve("2c.3g.40gb+1c.3g.40gb+1g.10gb", H100, 1)
    (change,) = changes([*ones, slot(3, "1g.10gb", 0, 1)], {"n1/2": ["train"], "n1/0": ["eval"]}, layouts, "h100_80gb")
    assert [str(each) for each in change.kept] == ["1g.10gb at 0:1", "1c.3g.40gb at 4:4 (2:1)"]
    assert [str(each) for each in change.destroyed] == ["1c.3g.40gb at 4:4 (0:1)", "1c.3g.40gb at 4:4 (1:1)"]
    assert [str(each) for each in change.created] == ["2c.3g.40gb at 4:4 (0:2)"]
    assert change.ends == (("n1/0", ("eval",)), ("n1/1", ()))
    document = json.loads(json.dumps(change.to_json()))
    assert (
        document["comes"]
        == document["created"]
        == [{"profile": "3g.40gb", "start": 4, "size": 4, "compute": [{"start": 0, "size": 2}]}]
    )
    assert document["stays"][0] == document["kept"][0] == {"profile": "1g.10gb", "start": 0, "size": 1}
    picture = tmp_path / "plan.svg"
    write_svg(picture, Transition("s/p", (change,), 0, 60.0))
    assert ">1c*3<" in picture.read_text() and ">2c+1c<" in picture.read_text()
