"""NVIDIA's mig-manager: what it selects, and the file that makes it keep a layout."""

from __future__ import annotations

import pytest
import yaml

from skyinfra import mig
from skyinfra.mig.manager import DEFAULT_CONFIG

H100 = mig.geometry("h100_80gb")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("MIG_PARTED_SELECTED_CONFIG=all-disabled", mig.Selected(DEFAULT_CONFIG, "all-disabled")),
        ('"A=b c" MIG_PARTED_CONFIG_FILE=/etc/x.yaml MIG_PARTED_SELECTED_CONFIG=x', mig.Selected("/etc/x.yaml", "x")),
        ("MIG_PARTED_SELECTED_CONFIG=a MIG_PARTED_SELECTED_CONFIG=b", mig.Selected(DEFAULT_CONFIG, "b")),
        ("MIG_PARTED_CONFIG_FILE=/etc/x.yaml", None),
        ("MIG_PARTED_SELECTED_CONFIG=", None),
        ("", None),
        ("MIG_PARTED_SELECTED_CONFIG='x", None),
    ],
)
def test_what_the_service_selects(environment: str, expected: mig.Selected | None) -> None:
    assert mig.selected(environment) == expected


def test_the_file_holds_the_layout_beside_what_other_nodes_select() -> None:
    layouts: dict[int, mig.Layout | None] = {0: mig.resolve("3g.40gb+1g.10gb*2", H100, 1)[0], 1: None}
    entries, _ = mig.parted_from_layouts(layouts, H100, 2)
    text = mig.manager_text(entries, "mine")
    configs = mig.read_parted(yaml.safe_load(text))
    assert configs["mine"] == entries
    assert mig.layouts_from_parted(configs["all-disabled"], H100, 2)[0] == {0: None, 1: None}
    comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
    assert "kubectl label node NODE nvidia.com/mig.config=mine --overwrite" in comments
    (environment,) = [" ".join(line.split("=", 1)[1] for line in comments if line.startswith("Environment="))]
    assert mig.selected(environment) == mig.Selected("/etc/nvidia-mig-manager/skyinfra.yaml", "mine")
    (patch,) = [line for line in comments if line.startswith("kubectl patch")]
    told = yaml.safe_load(patch.partition(" -p '")[2].rstrip("'"))
    (made,) = [line.split()[3] for line in comments if line.startswith("kubectl create configmap")]
    assert told == {"spec": {"migManager": {"config": {"name": made}}}}
    assert len(mig.read_parted(yaml.safe_load(mig.manager_text(entries, "all-disabled")))) == 1
