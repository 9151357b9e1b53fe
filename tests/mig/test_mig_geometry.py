from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from skyinfra import MigNotSupported, UnknownProfile, mig

ROOT = Path(__file__).parents[2]

SEVEN_SLICES = {"1g": (0, 1, 2, 3, 4, 5, 6), "2g": (0, 2, 4), "3g": (0, 4), "4g": (0,), "7g": (0,)}


@pytest.mark.parametrize("model", mig.models())
def test_the_rows_of_every_model_agree_with_themselves(model: str) -> None:
    geometry = mig.geometry(model)
    assert geometry.model == model
    names = [profile.name for profile in geometry.profiles]
    assert len(names) == len(set(names))
    for profile in geometry.profiles:
        stem = f"{profile.compute_slices}g.{profile.memory_gb}gb"
        assert profile.name == stem + profile.attributes
        assert geometry.compute_slices is not None and profile.compute_slices <= geometry.compute_slices
        if profile.starts is None:
            assert not profile.expected
            continue
        assert profile.size is not None and geometry.placement_units is not None
        assert list(profile.starts) == sorted(set(profile.starts))
        assert profile.starts[-1] + profile.size <= geometry.placement_units
        apart = [b - a for a, b in zip(profile.starts, profile.starts[1:], strict=False)]
        assert all(gap >= profile.size for gap in apart), "starts of one profile overlap"
        assert profile.max_count is not None and profile.max_count <= len(profile.starts)


@pytest.mark.parametrize("model", mig.models())
def test_every_value_names_its_source_and_unknown_stays_unknown(model: str) -> None:
    for profile in mig.geometry(model).profiles:
        named, of_id, of_placement = profile.sources
        assert named in mig.sources()
        assert (of_id in mig.sources()) == (profile.profile_id is not None)
        assert (of_placement in mig.sources()) == (profile.starts is not None)
        assert (of_placement == "OGKM-SPAN") == profile.expected


@pytest.mark.parametrize("model", ["a100_40gb", "a100_80gb", "h100_80gb", "h200_141gb", "b200_180gb", "gb300_288gb"])
def test_the_grid_of_seven_slice_gpus(model: str) -> None:
    geometry = mig.geometry(model)
    assert (geometry.placement_units, geometry.compute_slices) == (8, 7)
    plain = {p.name.partition(".")[0]: p for p in geometry.profiles if p.nvml_enum in (0, 1, 2, 3, 4)}
    assert {slices: profile.starts for slices, profile in plain.items()} == SEVEN_SLICES


def test_rtx_pro_6000_has_twelve_units() -> None:
    geometry = mig.geometry("rtx_pro_6000_96gb")
    assert (geometry.placement_units, geometry.compute_slices) == (12, 4)
    assert {p.name: (p.size, p.starts) for p in geometry.profiles if not p.attributes} == {
        "1g.24gb": (3, (0, 3, 6, 9)),
        "2g.48gb": (6, (0, 6)),
        "4g.96gb": (12, (0,)),
    }


def test_facts_that_the_documents_had_wrong() -> None:
    small = {profile.name: profile for profile in mig.geometry("a100_40gb").profiles}
    assert (small["1g.10gb"].max_count, small["1g.10gb"].size) == (4, 2)
    assert small["7g.40gb"].max_count == 1
    # one name, two kinds of instance
    assert small["1g.10gb"].profile_id == 15
    assert mig.geometry("a100_80gb").profile("1g.10gb").profile_id == 19


def test_mode_switch_and_driver() -> None:
    assert not mig.geometry("a100_80gb").resetless
    assert mig.geometry("h100_80gb").resetless
    assert mig.geometry("h100_80gb").min_driver == "525.85.12"
    assert mig.geometry("a100_80gb").min_driver == "450.80.02"
    assert mig.geometry("a100_64gb").min_driver is None


@pytest.mark.parametrize(
    ("model", "alias", "name"),
    [
        ("a100_80gb", "3g.39gb", "3g.40gb"),
        ("a100_80gb", "7g.79gb", "7g.80gb"),
        ("a100_80gb", " 3G.40GB ", "3g.40gb"),
        ("gb200_186gb", "1g.24gb", "1g.23gb"),
        ("gb200_186gb", "1g.24gb+me", "1g.23gb+me"),
        ("gb200_186gb", "3g.95gb", "3g.93gb"),
        ("gb200_186gb", "7g.189gb", "7g.186gb"),
    ],
)
def test_names_of_other_drivers(model: str, alias: str, name: str) -> None:
    assert mig.geometry(model).profile(alias).name == name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("a100_80gb", "3g.44gb"),
        ("h100_80gb", "1g.12gb"),  # of the 94 GB part: not a smaller partition without a word
        ("a30_24gb", "1g.5gb"),
        ("b200_180gb", "7g.186gb"),  # of GB200
        ("a100_80gb", "3g.40gb+me"),
        ("a100_80gb", "nonsense"),
    ],
)
def test_a_profile_of_another_gpu_is_unknown(model: str, name: str) -> None:
    with pytest.raises(UnknownProfile) as caught:
        mig.geometry(model).profile(name)
    for profile in mig.geometry(model).profiles:
        assert profile.name in str(caught.value)


def test_the_nearest_profile_is_named() -> None:
    with pytest.raises(UnknownProfile, match=r"Did you mean 3g\.40gb"):
        mig.geometry("h100_80gb").profile("3g40gb")


def test_unknown_models_and_models_without_known_profiles() -> None:
    with pytest.raises(MigNotSupported, match=r"Did you mean h100_80gb"):
        mig.geometry("h100_80")
    with pytest.raises(MigNotSupported, match="not known"):
        mig.geometry("b100").profile("1g.24gb")


def test_geometry_is_immutable_and_hashable() -> None:
    geometry = mig.geometry("h100_80gb")
    assert hash(geometry) == hash(mig.geometry("h100_80gb"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.model = "other"  # type: ignore[misc]


def _facts() -> dict[str, object]:
    row = {
        "name": "1g.5gb",
        "id": 9,
        "nvml_enum": 0,
        "count": 2,
        "compute_slices": 1,
        "memory_slices": 1,
        "memory_gb": 5,
        "sm": 14,
        "placements": [0, 1],
        "placements_expected": None,
        "source": "ONE",
        "id_source": "ONE (19); 9/5 from GKE map",
        "placement_source": "ONE",
    }
    unseen = row | {"name": "1g.5gb+me", "id": None, "placements": None, "placements_expected": [0], "id_source": None}
    unknown = unseen | {"name": "2g.10gb", "placements_expected": None, "placement_source": None, "sm": None}
    entry = {
        "products": ["A"],
        "pci_device_ids": None,
        "arch": "Ampere",
        "memory_gib": 10,
        "memory_slices": 2,
        "compute_slices": 2,
        "placement_units": 2,
        "resetless_mig": False,
        "min_driver": "R450.80.02; +me R470",
        "notes": ["cut in the stored copy"],
        "profiles": [row, unseen, unknown],
    }
    texts = {"ONE": "a listing (stored copy 123)", "GKE": "a map", "OGKM-SPAN": "the driver", "UNUSED": "-"}
    return {"_meta": {"sources": texts}, "a": entry}


def test_the_data_are_built_from_facts_the_same_way_each_time(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(json.dumps(_facts()))
    for out in ("one.json", "two.json"):
        command = [sys.executable, ROOT / "tools" / "build_mig_data.py", tmp_path / "facts.json", tmp_path / out]
        subprocess.run(command, check=True)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    built = json.loads((tmp_path / "one.json").read_text())
    shipped = json.loads((ROOT / "skyinfra" / "mig" / "geometry.json").read_text())
    assert built["columns"] == shipped["columns"]
    assert built["sources"] == {"GKE": "a map", "OGKM-SPAN": "the driver", "ONE": "a listing"}
    gpu = built["gpus"]["a"]
    assert gpu.keys() == shipped["gpus"]["h100_80gb"].keys()
    assert (gpu["min_driver"], gpu["min_driver_detail"]) == ("450.80.02", "R450.80.02; +me R470")
    rows = [dict(zip(built["columns"], row, strict=True)) for row in gpu["profiles"]]
    assert [(r["starts"], r["expected"], r["id_source"]) for r in rows] == [
        ([0, 1], False, "GKE"),
        ([0], True, None),
        (None, False, None),
    ]
    assert [r["placement_source"] for r in rows] == ["ONE", "OGKM-SPAN", None]
