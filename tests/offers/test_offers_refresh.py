"""tools/refresh_offers.py: prices of published lists come into the table, with a report of what they change."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from support import ROOT

HEAD = (
    "provider,instance_type,accelerator,accel_count,accel_mem_gib_each,accel_fraction,vcpu,ram_gib,on_demand_usd_h,"
    "on_demand_region,on_demand_date,spot_usd_h,spot_region,spot_date,regions,source,notes"
)
VERDA = "verda,1H100.80S.30V,H100,1,80,,30,120,2.29,FIN-02,2026-05-24,0.8,FIN-02,2026-05-24,FIN-02,snapshot,"
GONE = "verda,1V100.6V,V100,1,16,,6,23,0.14,FIN-01,2026-05-24,,,,FIN-01,snapshot,"
G5 = "aws,g5.xlarge,A10G,1,22.35,,4,16.0,1.006,us-east-1,2026-07-20,0.4,us-east-1,2026-07-20,us-east-1,moto,efa=1"
CATALOG = (
    "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone"
)
B200 = "{'Gpus': [{'Name': 'B200', 'Count': 1, 'MemoryInfo': {'SizeInMiB': 184320}}]}"


def refresh(folder: Path, rows: list[str], *given: str) -> tuple[str, list[dict[str, str]]]:
    """The report, and the rows of the table afterwards."""
    table = folder / "table.csv"
    table.write_text("\n".join([HEAD, *rows]) + "\n")
    command = [sys.executable, str(ROOT / "tools" / "refresh_offers.py"), "--table", str(table), *given]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    with table.open(newline="") as file:
        return result.stdout, list(csv.DictReader(file))


def vms(folder: Path, *lines: str) -> str:
    (folder / "vms.csv").write_text("\n".join([CATALOG, *lines]) + "\n")
    return "verda=vms.csv@2026-11-01"


def test_a_catalog_renews_prices_and_adds_machine_types(tmp_path: Path) -> None:
    given = vms(
        tmp_path,
        "1H100.80S.30V,H100,1,30,120,,3.9,0,FIN-01,",
        "1H100.80S.30V,H100,1,30,120,,4.58,1.2,FIN-02,",
        f'1B200.30V,B200,1,31,184,"{B200}",4.89,1.7,FIN-03,',
        "1X9.30V,X9,1,31,184,,4.89,1.7,FIN-03,",
        "0.5H100,H100,0.5,31,184,,4.89,1.7,FIN-03,",
        "CPU.4V.16G,,,4,16,,0.02,0.01,FIN-01,",
    )
    report, rows = refresh(tmp_path, [VERDA, GONE, G5], "--write", given)
    assert report.splitlines() == [
        "verda, vms.csv of 2026-11-01: 2 prices renewed, 2 moved",
        "  1H100.80S.30V: on demand $2.29 -> $4.58 (+100 %) in FIN-02",
        "  1H100.80S.30V: spot $0.8 -> $1.2 (+50 %) in FIN-02",
        "  added: 1B200.30V: 1 x B200, $4.89",
        "  no longer listed, kept: 1V100.6V",
        "  left out: 1X9.30V (no accelerator of that name (given: 'X9'))",
        "  left out: 0.5H100 (a part of a device: to be written by hand)",
    ]
    assert [row["instance_type"] for row in rows] == ["1H100.80S.30V", "1V100.6V", "1B200.30V", "g5.xlarge"]
    first, _, new, _ = rows
    assert (first["on_demand_usd_h"], first["on_demand_region"], first["on_demand_date"]) == (
        "4.58",
        "FIN-02",
        "2026-11-01",
    )
    assert (first["regions"], first["source"]) == ("FIN-01 FIN-02", "snapshot; prices vms.csv of 2026-11-01")
    assert (new["accel_mem_gib_each"], new["spot_usd_h"], new["source"]) == ("180", "1.7", "vms.csv of 2026-11-01")


def test_without_write_the_table_stays(tmp_path: Path) -> None:
    report, rows = refresh(tmp_path, [VERDA], vms(tmp_path, "1H100.80S.30V,H100,1,30,120,,2.0,,FIN-03,"))
    assert "  1H100.80S.30V: on demand $2.29 -> $2 (-13 %) in FIN-03" in report
    assert rows[0]["on_demand_usd_h"] == "2.29"


def test_what_is_gone_is_removed_when_asked(tmp_path: Path) -> None:
    given = vms(tmp_path, "1H100.80S.30V,H100,1,30,120,,2.29,0.8,FIN-02,")
    report, rows = refresh(tmp_path, [VERDA, GONE], "--write", "--drop", given)
    assert "2 prices renewed, 0 moved" in report and "  removed: 1V100.6V" in report
    assert [row["instance_type"] for row in rows] == ["1H100.80S.30V"]


def test_the_same_list_twice_changes_nothing_more(tmp_path: Path) -> None:
    given = vms(tmp_path, "1H100.80S.30V,H100,1,30,120,,3,,FIN-01,")
    refresh(tmp_path, [VERDA], "--write", given)
    first = (tmp_path / "table.csv").read_text().splitlines()
    report, _ = refresh(tmp_path, first[1:], "--write", given)
    assert "0 moved" in report and (tmp_path / "table.csv").read_text().splitlines() == first


def test_prices_of_aws_and_then_the_savings_of_its_advisor(tmp_path: Path) -> None:
    (tmp_path / "pricing.go").write_text(
        "// generated at 2026-11-02T13:23:24Z for us-east-1\n\npackage pricing\n\n"
        'var USEast1 = map[string]map[string]float64{\n\t"us-east-1": {\n\t\t// g5 family\n'
        '\t\t"g5.xlarge": 1.100000, "m5.large": 0.096000,\n\t},\n'
        '\t"us-west-2": {\n\t\t"g5.xlarge": 1.000000,\n\t},\n}\n'
    )
    advice = {"spot_advisor": {"us-east-1": {"Linux": {"g5.xlarge": {"s": 60, "r": 3}}}}}
    (tmp_path / "advisor.json").write_text(json.dumps(advice))
    report, (row,) = refresh(tmp_path, [G5], "--write", "aws=pricing.go", "aws=advisor.json@2026-11-03")
    assert "  g5.xlarge: on demand $1.006 -> $1.1 (+9 %) in us-east-1" in report
    assert "  g5.xlarge: spot $0.4 -> $0.44 (+10 %) in us-east-1" in report
    assert (row["on_demand_date"], row["spot_date"]) == ("2026-11-02", "2026-11-03")
    assert row["notes"] == "spot derived: on-demand x (1-60% advisor saving), interruption band r=3; efa=1"
    _, (row,) = refresh(tmp_path, [G5], "--write", "aws=advisor.json@2026-11-03", "aws=advisor.json@2026-11-03")
    assert row["notes"].count("spot derived") == 1


def test_a_list_of_offerings_by_device_and_tier(tmp_path: Path) -> None:
    entry = {"provider_id": "runpod", "gpu_model": "NVIDIA L4", "vram_gb": 24, "is_spot": False}
    entries = [
        entry | {"tier": "secure", "price_usd_hour": 0.5, "collected_at": "2026-11-04"},
        entry | {"tier": "community", "price_usd_hour": 0.3, "collected_at": "2026-11-04"},
    ]
    (tmp_path / "offerings.json").write_text(json.dumps(entries))
    row = "runpod,NVIDIA L4 (secure),NVIDIA L4,1,24,,12,50,0.44,,2026-05-24,,,,,list,"
    two = (
        "runpod,2x NVIDIA L4 (secure),NVIDIA L4,2,24,,24,100,0.88,,2026-05-24,,,,,list,"
        "price and size are 2 times those of one GPU"
    )
    report, rows = refresh(tmp_path, [row, two], "--write", "runpod=offerings.json")
    assert "  NVIDIA L4 (secure): on demand $0.44 -> $0.5 (+14 %)\n" in report
    assert [each["on_demand_usd_h"] for each in rows] == ["0.5", "1"]
    assert rows[0]["on_demand_date"] == "2026-11-04"


def test_a_price_of_google_that_is_as_low_as_spot_stays_doubtful(tmp_path: Path) -> None:
    row = "gcp,a3-highgpu-1g,H100,1,80,,26,234,5.5,us-central1,2026-05-20,5,us-central1,2026-05-20,us-central1,list,"
    old = "SUSPECT: spot >= 80% of on-demand in the source (why)"
    (tmp_path / "gcp.csv").write_text(f"{CATALOG}\na3-highgpu-1g,H100,1,26,234,,5.6,5,us-central1,\n")
    _, (renewed,) = refresh(tmp_path, [row + old], "--write", "gcp=gcp.csv@2026-11-01")
    assert renewed["notes"].count("SUSPECT") == 1 and "why" not in renewed["notes"]
    (tmp_path / "gcp.csv").write_text(f"{CATALOG}\na3-highgpu-1g,H100,1,26,234,,10.98,5,us-central1,\n")
    _, (right,) = refresh(tmp_path, [row + old], "--write", "gcp=gcp.csv@2026-11-01")
    assert right["notes"] == ""


def test_devices_of_google_have_lines_of_their_own(tmp_path: Path) -> None:
    row = "gcp,g2-standard-4,L4,1,24,,4,16,0.7,us-central1,2026-05-20,0.3,us-central1,2026-05-20,us-central1,list,"
    lines = [
        "g2-standard-4,,,4,16,,0.17,0.06,us-central1,us-central1-a",
        ",L4,1,,,,0.65,0.31,us-central1,us-central1-a",
    ]
    lines += [
        "n1-standard-4,,,4,16,,0.19,0.04,us-central1,us-central1-a",
        ",tpu-v9-8,1,,,,5,2,us-central1,us-central1-a",
    ]
    (tmp_path / "gcp.csv").write_text("\n".join([CATALOG, *lines]) + "\n")
    report, (renewed,) = refresh(tmp_path, [row], "--write", "gcp=gcp.csv@2026-11-01")
    assert (renewed["on_demand_usd_h"], renewed["spot_usd_h"]) == ("0.82", "0.37")
    assert len(report.splitlines()) == 3


def test_one_name_with_devices_of_two_sizes(tmp_path: Path) -> None:
    rows = [f"coreweave,A100,A100,1,{size},,,,2,,2026-05-24,,,,,list," for size in (40, 80)]
    entry = {"provider_id": "coreweave", "gpu_model": "A100", "tier": "on-demand", "collected_at": "2026-11-04"}
    entries = [entry | {"vram_gb": size, "price_usd_hour": size / 20} for size in (40, 80)]
    (tmp_path / "offerings.json").write_text(json.dumps(entries))
    _, renewed = refresh(tmp_path, rows, "--write", "coreweave=offerings.json")
    assert [each["on_demand_usd_h"] for each in renewed] == ["2", "4"]


def test_a_list_without_a_date_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"{HEAD}\n{VERDA}\n")
    given = vms(tmp_path, "1H100.80S.30V,H100,1,30,120,,3,,FIN-01,").partition("@")[0]
    command = [sys.executable, str(ROOT / "tools" / "refresh_offers.py"), "--table", "table.csv", given]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode != 0 and "does not say of which day it is" in result.stderr


def test_prices_of_karpenter_for_azure_and_google(tmp_path: Path) -> None:
    azure = "azure,Standard_NC4as_T4_v3,T4,1,16,,4,28,0.6,eastus,2026-05-20,0.1,eastus,2026-05-20,eastus,snapshot,"
    google = "gcp,a2-ultragpu-1g,A100,1,80,,12,170,2.9,us-central1,2026-05-20,2.5,us-central1,2026-05-20,,snapshot,"
    (tmp_path / "list.go").write_text(
        "// generated at 2026-06-18T03:43:41Z\n"
        'initialOnDemandPrices["australiaeast"] = map[string]float64{\n\t"Standard_NC4as_T4_v3":   0.684000,\n}\n'
        'initialOnDemandPrices["eastus"] = map[string]float64{\n\t"Standard_NC4as_T4_v3":   0.526000,\n\t"X": 1.0,\n}\n'
    )
    prices = {"us-central1": {"on_demand": {"a2-ultragpu-1g": 5.06879}, "spot": {"a2-ultragpu-1g": 2.7595, "x": 1}}}
    (tmp_path / "list.json").write_text(json.dumps({"prices": {**prices, "us-east1": {"on_demand": {}}}}))
    given = ("azure=list.go", "gcp=list.json@2026-08-03", "--write")
    report, (first, second) = refresh(tmp_path, [azure, google], *given)
    assert "azure, list.go of 2026-06-18: 1 prices renewed, 1 moved" in report
    assert (first["on_demand_usd_h"], first["on_demand_region"], first["spot_date"]) == (
        "0.526",
        "eastus",
        "2026-05-20",
    )
    assert "a2-ultragpu-1g: on demand $2.9 -> $5.0688 (+75 %) in us-central1" in report
    assert (second["spot_usd_h"], second["on_demand_date"]) == ("2.7595", "2026-08-03")
