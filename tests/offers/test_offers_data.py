"""The shipped offers: every row of the table, by the catalog's names and sizes, no price without region and date."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra import mig, offers, providers
from skyinfra.accelerators import Accelerator, catalog
from skyinfra.offers import Offer, Price
from skyinfra.offers.offer import COLUMNS

ALL = offers.load()
FILE = Path(offers.__file__).with_name("offers.json")


def one(provider: str, machine_type: str) -> Offer:
    (found,) = [each for each in ALL if (each.provider, each.machine_type) == (provider, machine_type)]
    return found


def test_every_row_of_the_table_is_one_offer() -> None:
    assert len(ALL) == 519
    assert Counter(offer.provider for offer in ALL) == {
        "aws": 88,
        "gcp": 81,
        "vastai": 91,
        "azure": 36,
        "runpod": 86,
        "lambda": 23,
        "verda": 19,
        "nebius": 17,
        "crusoe": 17,
        "scaleway": 14,
        "hyperstack": 13,
        "coreweave": 13,
        "digitalocean": 9,
        "vultr": 7,
        "oci": 5,
    }
    assert len({(offer.provider, offer.machine_type) for offer in ALL}) == len(ALL)


@pytest.mark.parametrize("offer", ALL, ids=lambda offer: f"{offer.provider} {offer.machine_type}")
def test_a_row_is_whole(offer: Offer) -> None:
    row = catalog.choose(offer.accelerator, offer.memory_gb, offer.form_factor)
    assert (row.name, row.memory_gb, row.vendor) == (offer.accelerator, offer.memory_gb, offer.vendor)
    assert offer.count >= 1 and 0 < offer.fraction <= 1 and offer.source
    assert offer.mig_model is None or offer.mig_model in mig.models()
    assert list(offer.regions) == sorted(set(offer.regions)) and all(each.strip(", ") == each for each in offer.regions)
    assert all(offer.notes)
    for price in (offer.on_demand, offer.spot):
        if price is not None:
            assert price.usd_per_hour > 0 and price.region
            assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", price.date)
            assert price.basis in ("listed", "undated", "estimated", "suspect")
            assert price.basis != "suspect" or any("doubtful" in note for note in offer.notes)
    believed, spot = offer.price(), offer.price(spot=True)
    if believed and spot:
        assert spot.usd_per_hour < believed.usd_per_hour
    if offer.fraction == 1:
        declared = sky.accelerators.parse(offer.carries)
        assert (declared.name, declared.memory_gb, declared.count) == (offer.accelerator, offer.memory_gb, offer.count)
        assert offers.carries(offer, declared) or offer.form_factor is None


def test_no_text_means_a_list_of_texts_that_is_not_used() -> None:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    assert tuple(data["columns"]) == COLUMNS
    for column, name in (("source", "sources"), ("regions", "regions")):
        index = COLUMNS.index(column)
        assert {row[index] for row in data["offers"]} == set(range(len(data[name])))
    notes = {note for row in data["offers"] for note in row[COLUMNS.index("notes")]}
    assert notes == set(range(len(data["notes"])))


@pytest.mark.parametrize(
    ("provider", "machine_type", "carries", "share_gb"),
    [
        # The EC2 API counts no GPU in a fraction, and gives decimal GB as MiB.
        ("aws", "g6f.large", "1/8 L4", 3),
        ("aws", "g6f.2xlarge", "1/4 L4", 6),
        ("aws", "gr6f.4xlarge", "1/2 L4", 12),
        ("aws", "g5.xlarge", "A10G:1", 24),
        ("aws", "g6e.48xlarge", "L40S:8", 48),
        ("aws", "p6-b200.48xlarge", "B200:8", 180),
        ("aws", "p6-b300.48xlarge", "B300:8", 288),
        # It says 512 GiB of each Trainium2.
        ("aws", "trn2.48xlarge", "Trainium2:16", 96),
        ("aws", "dl1.24xlarge", "Gaudi:8", 32),
        ("aws", "p4d.24xlarge", "A100-40GB:8", 40),
        ("aws", "p4de.24xlarge", "A100:8", 80),
        ("azure", "Standard_NC40ads_H100_v5", "H100-94GB:1", 94),
        ("azure", "Standard_NV6ads_A10_v5", "1/6 A10", 4),
        ("azure", "Standard_NV4as_v4", "1/8 MI25", 2),
        ("azure", "Standard_NV32as_v4", "MI25:1", 16),
        ("gcp", "a3-megagpu-8g", "H100:8", 80),
        ("gcp", "v5p-8", "TPUv5p-8:1", 95),
        # Its list gives the memory of all GPUs together, and drops the end of a name.
        ("vastai", "8x-H200-32-65536", "H200:8", 141),
        ("vastai", "2x-A100_PCIE-32-65536", "A100-40GB-PCIe:2", 40),
        ("vastai", "1x-RTX_3060_Ti-32-65536", "RTX 3060 Ti:1", 8),
        ("vastai", "4x-RTX_4060_Ti-32-65536", "RTX 4060 Ti-16GB:4", 16),
        ("vastai", "4x-RTX_4070S_Ti-32-65536", "RTX 4070 Ti Super:4", 16),
        ("hyperstack", "n3-H100x8", "H100-PCIe:8", 80),
        ("verda", "1B300.30V", "B300:1", 288),
        ("vultr", "NVIDIA L40S (bare metal)", "L40S:8", 48),
        ("crusoe", "gb200-186gb-nvl-ib.4x", "GB200:4", 186),
        ("crusoe", "a100-80gb-sxm-ib.8x", "A100:8", 80),
        ("scaleway", "L4-8-24G", "L4:8", 24),
    ],
)
def test_what_the_lists_have_wrong(provider: str, machine_type: str, carries: str, share_gb: float) -> None:
    offer = one(provider, machine_type)
    assert (offer.carries, offer.share_gb) == (carries, share_gb)


def test_a_cloud_is_called_the_same_by_its_declaration_and_its_offers() -> None:
    having = [kind for kind in providers.deployable() if providers.read(kind).terraform]
    clouds = {providers.sold_by(kind) for kind in having}
    assert clouds and clouds <= set(offers.providers())
    assert set(json.loads(providers._NOT_DEPLOYABLE.read_text())) <= set(offers.providers()) - set(clouds)


def test_prices_that_cannot_be_right_are_marked_and_not_counted() -> None:
    gcp = one("gcp", "a3-edgegpu-8g")
    assert gcp.on_demand == Price(43.0662, "us-central1", "2026-05-20", "suspect")
    assert str(gcp.on_demand) == "$43.07/h? in us-central1, 2026-05-20"
    assert gcp.price() is None and gcp.price(spot=True) == Price(35.8736, "us-central1", "2026-05-20")
    assert any("doubtful" in note and "10.98" in note for note in gcp.notes)
    azure = one("azure", "Standard_ND96isr_H200_v5")
    assert azure.spot is not None and azure.spot.basis == "suspect" and azure.price(spot=True) is None
    # A better source says them; one GPU of that machine is sold as spot or by a flex start alone.
    assert one("gcp", "a3-highgpu-8g").price() == Price(88.49, "us-central1", "2026-08-03")
    assert one("gcp", "a3-highgpu-1g").on_demand is None and one("gcp", "a3-highgpu-1g").price(spot=True) is not None


def test_prices_of_something_else_are_left_out_with_the_reason() -> None:
    assert one("gcp", "v6e-8").on_demand is None
    host_is_extra = one("gcp", "n1-standard-8+nvidia-tesla-t4:1")
    assert host_is_extra.on_demand is None and any("0.35" in note for note in host_is_extra.notes)


def test_prices_in_euros_are_estimates_that_say_their_rate() -> None:
    scaleway = one("scaleway", "H100-1-80G")
    assert scaleway.on_demand == Price(3.2687, "fr-par-2", "2026-09-26", "estimated")
    assert "EUR 2.8665" in scaleway.notes[0] and "1.1403 of 2026-09-25" in scaleway.notes[1]
    assert (scaleway.carries, scaleway.regions) == ("H100-PCIe:1", ("fr-par-2", "pl-waw-2"))


def test_marketplaces_have_the_gpus_of_consumers_and_several_of_each() -> None:
    two, mi300x = one("runpod", "2x NVIDIA GeForce RTX 4090 (secure)"), one("vastai", "1x-InstinctMI300X")
    assert two.on_demand == Price(1.38, offers.EVERYWHERE, "2026-05-24") and any(
        "2 times" in note for note in two.notes
    )
    assert mi300x.on_demand is None and "no price is listed" in mi300x.notes[0]
    # Nobody can buy them any more.
    assert not any("(spot)" in offer.machine_type for offer in ALL)


def test_what_is_known_of_a_price_is_kept() -> None:
    p5 = one("aws", "p5.48xlarge")
    assert p5.on_demand == Price(55.04, "us-east-1", "2026-07-20")
    assert p5.spot == Price(26.4192, "us-east-1", "2025-07-28", "estimated")
    assert (p5.efa_interfaces, p5.network_cards) == (32, 32)
    assert (one("aws", "p6-b300.48xlarge").efa_interfaces, one("aws", "p6-b300.48xlarge").network_cards) == (16, 17)
    assert one("verda", "1H100.80S.32V").on_demand == Price(2.29, "FIN-02", "2026-05-24")
    assert one("nebius", "gpu-h100-sxm/8gpu-128vcpu-1600gb").spot == Price(10, "eu-north1", "2026-09-25", "undated")
    assert one("crusoe", "l40s-48gb.10x").on_demand == Price(15, "us-east1-a", "2026-09-28")
    assert one("digitalocean", "gpu-h100x8-640gb").on_demand == Price(23.92, offers.EVERYWHERE, "2026-08")
    assert one("vultr", "NVIDIA L40S (bare metal)").on_demand == Price(8 * 0.848, offers.EVERYWHERE, "2026-05-24")


def test_the_tenant_of_a_container_partitions_nothing() -> None:
    assert one("runpod", "NVIDIA H200 (secure)").mig_model is None
    assert one("vastai", "8x-H100_SXM-32-65536").mig_model is None
    assert one("vultr", "vcg-a100-12c-120g-80vram").mig_model is None
    assert one("vultr", "NVIDIA GH200 (bare metal)").mig_model == "gh200_96gb"
    assert one("aws", "p5.48xlarge").mig_model == "h100_80gb"
    assert one("hyperstack", "n3-H100x8").mig_model == "h100_pcie_80gb"
    assert one("aws", "g6.xlarge").mig_model is None


def test_the_chips_of_a_slice_are_counted() -> None:
    assert (one("gcp", "v5p-8").chips, one("gcp", "v5litepod-8").chips, one("aws", "trn1.32xlarge").chips) == (4, 8, 16)
    assert Accelerator("v5p-8").chips == one("gcp", "v5p-8").chips


def test_importing_skyinfra_does_not_read_the_offers() -> None:
    program = "import sys, skyinfra, skyinfra.offers; from skyinfra.offers.offer import load; print(load.cache_info())"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "currsize=0" in result.stdout
    program = "import sys, skyinfra; print('skyinfra.offers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_amounts_are_written_as_people_write_them() -> None:
    assert [offers.usd(amount) for amount in (55.04, 1234.5, 0.202, 0.5, 0.12345, 6.88)] == [
        "$55.04",
        "$1,234.50",
        "$0.202",
        "$0.50",
        "$0.1235",
        "$6.88",
    ]
    assert str(Price(0.9, "FIN-02", "2026-05-24", "undated")) == "$0.90/h in FIN-02, before 2026-05-24"


@pytest.mark.parametrize(
    ("date", "old"),
    [("2025-11-24", True), ("2025-11-25", False), ("2025-11", False), ("2025-10", True), ("2026-11-25", False)],
)
def test_a_price_of_more_than_twelve_months_is_old(date: str, old: bool) -> None:
    assert Price(1.0, "us-east-1", date).is_old("2026-11-25") is old
    assert not Price(1.0, "us-east-1", "2024-02-28").is_old("2024-02-29")
