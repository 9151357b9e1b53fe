"""tools/build_offers.py: what it makes of a table, and that a bad one does not pass."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

HEAD = (
    "provider,instance_type,accelerator,accel_count,accel_mem_gib_each,accel_fraction,vcpu,ram_gib,on_demand_usd_h,"
    "on_demand_region,on_demand_date,spot_usd_h,spot_region,spot_date,regions,source,notes"
)


def build(folder: Path, *rows: str) -> subprocess.CompletedProcess[str]:
    table, out = folder / "table.csv", folder / "offers.json"
    table.write_text("\n".join([HEAD, *rows]) + "\n")
    command = [sys.executable, str(ROOT / "tools" / "build_offers.py"), str(table), str(out)]
    return subprocess.run(command, capture_output=True, text=True)


def built(folder: Path, *rows: str) -> list[dict[str, object]]:
    result = build(folder, *rows)
    assert result.returncode == 0, result.stderr
    data = json.loads((folder / "offers.json").read_text())
    named = [dict(zip(data["columns"], row, strict=True)) for row in data["offers"]]
    for row in named:
        row["notes"] = [data["notes"][note] for note in row["notes"]]
        row["regions"] = data["regions"][row["regions"]]
    return named


G5 = "aws,g5.xlarge,A10G,1,22.35,,4,16.0,1.006,us-east-1,2026-07-20,0.4,us-east-1,2026-07-20,us-west-2 us-east-1,s,"


def test_units_and_order(tmp_path: Path) -> None:
    (row,) = built(tmp_path, G5)
    assert (row["accelerator"], row["memory_gb"], row["fraction"], row["vcpus"]) == ("A10G", 24, None, 4)
    assert row["on_demand"] == [1.006, "us-east-1", "2026-07-20", "listed"]
    assert row["regions"] == ["us-east-1", "us-west-2"]
    first = (tmp_path / "offers.json").read_bytes()
    built(tmp_path, G5)
    assert (tmp_path / "offers.json").read_bytes() == first


def test_a_spot_price_as_high_as_the_other_is_marked(tmp_path: Path) -> None:
    (row,) = built(tmp_path, G5.replace("0.4,", "1.006,"))
    assert row["spot"] == [1.006, "us-east-1", "2026-07-20", "suspect"]
    assert row["notes"] == ["the spot price is doubtful: it is the on-demand price"]


def test_a_price_in_another_currency_is_an_estimate(tmp_path: Path) -> None:
    (row,) = built(tmp_path, f"{G5}converted from EUR at the ECB rate 1.1403 of 2026-09-25")
    assert row["on_demand"] == [1.006, "us-east-1", "2026-07-20", "estimated"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (G5.replace("22.35", "20"), "is none of"),
        (G5.replace("A10G", "A10Z"), "no accelerator of that name"),
        (G5.replace("2026-07-20", "last week"), "no date"),
        (f"{G5}\n{G5}", "stand twice"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path: Path, row: str, why: str) -> None:
    result = build(tmp_path, row)
    assert result.returncode != 0 and why in result.stderr
    assert not (tmp_path / "offers.json").exists()


def test_the_shipped_offers_are_those_of_the_table(tmp_path: Path) -> None:
    out = tmp_path / "offers.json"
    table = ROOT / "tools" / "instances.csv"
    subprocess.run([sys.executable, str(ROOT / "tools" / "build_offers.py"), str(table), str(out)], check=True)
    assert out.read_bytes() == (ROOT / "skyinfra" / "offers" / "offers.json").read_bytes()
