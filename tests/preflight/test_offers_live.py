"""``skyinfra offers --live`` against servers that answer as the API documents of the providers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from servers.provider_tables import all_tables
from servers.rest import Rest, serving, slow
from typer.testing import CliRunner

from skyinfra import offers
from skyinfra.cli.app import app
from skyinfra.offers import Offer, Price
from skyinfra.preflight.live_offers import Live, look_up

KEY = "k3y-of-t3sts"
TODAY = datetime.now(UTC).strftime("%Y-%m-%d")


@pytest.fixture(autouse=True)
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with all_tables(tmp_path, monkeypatch):
        yield


def asked(wanted: str | None, provider: str, environment: dict[str, str], **limits: Any) -> Live:
    return look_up(offers.ask(wanted, provider=provider, **limits), environment=environment)


def of(live: Live, provider: str) -> dict[str, Offer]:
    return {offer.machine_type: offer for offer in live.offers if offer.provider == provider}


def bundle(**fields: Any) -> dict[str, Any]:
    given = {
        "id": 1,
        "gpu_name": "RTX 4090",
        "num_gpus": 2,
        "gpu_ram": 24564,
        "dph_total": 0.71,
        "min_bid": 0.4,
        "geolocation": "Quebec, CA",
        "cpu_cores_effective": 32.0,
        "cpu_ram": 128000,
    }
    return {**given, **fields}


def test_vast_ai_without_a_key() -> None:
    found = [bundle(), bundle(id=2, dph_total=0.9), bundle(id=3, dph_total=1.0), bundle(id=4, dph_total=1.1)]
    found += [bundle(id=5, gpu_name="H100 SXM", num_gpus=8, gpu_ram=81559, dph_total=14.2), bundle(id=6, gpu_name="Z9")]
    with serving({"/api/v0/bundles/": {"offers": found}}) as rest:
        live = asked("RTX 4090:2", "vastai", {"VASTAI_API_URL": rest.address})
    (query,) = rest.queries("/api/v0/bundles/")
    assert json.loads(query["q"][0])["rentable"] == {"eq": True}
    assert rest.headers("Authorization") == {None}
    machines = of(live, "vastai")
    # The three cheapest of a kind; what the catalog does not have is counted.
    assert set(machines) == {f"2x RTX 4090, offer {n}" for n in (1, 2, 3)} | {"8x H100 SXM, offer 5"}
    cheapest = machines["2x RTX 4090, offer 1"]
    assert cheapest.carries == "RTX 4090:2" and cheapest.mig_model is None and cheapest.vcpus == 32
    assert cheapest.on_demand == Price(0.71, "Quebec, CA", TODAY) and cheapest.spot == Price(0.4, "Quebec, CA", TODAY)
    assert (machines["8x H100 SXM, offer 5"].memory_gb, machines["8x H100 SXM, offer 5"].form_factor) == (80, "SXM")
    assert live.remarks()[0] == "vastai listed 5 machine types just now, of them 1 not in the catalog."


def runpod(cloud: str) -> dict[str, Any]:
    return {
        "id": "NVIDIA H100 80GB HBM3",
        "name": "H100 SXM",
        "memory": 80,
        "secure": True,
        "community": False,
        "price": {"secure": 3.49, "community": 9.99},
        "maxCount": {"secure": 8, "community": 0},
        "availability": "LOW" if cloud == "SECURE" else "NONE",
        "dataCenters": [{"id": "US-KS-2", "availability": "LOW"}],
    }


def test_runpod_by_cloud() -> None:
    def gpus(_: Any, query: dict[str, list[str]], __: bytes) -> Any:
        sold_out = {**runpod("COMMUNITY"), "id": "NVIDIA L4", "name": "L4", "memory": 24, "secure": True}
        return {"gpus": [runpod(query["cloud"][0]), {**sold_out, "availability": "NONE"}]}

    with serving({"/v2/catalog/gpus": gpus}) as rest:
        live = asked("H100:1", "runpod", {"RUNPOD_API_KEY": KEY, "RUNPOD_API_BASE_URL": rest.address})
    assert rest.headers("Authorization") == {f"Bearer {KEY}"}
    (offer,) = of(live, "runpod").values()
    assert offer.machine_type == "NVIDIA H100 80GB HBM3 (secure)" and offer.on_demand == Price(
        3.49, "all regions", TODAY
    )
    # What the shipped offers know of it stays.
    assert (offer.vcpus, offer.form_factor) == (20, "SXM")


def test_lambda_with_and_without_capacity() -> None:
    def kind(name: str, cents: int, *regions: str, gpu: str = "H100 (80 GB SXM5)") -> dict[str, Any]:
        return {
            "instance_type": {
                "name": name,
                "gpu_description": gpu,
                "price_cents_per_hour": cents,
                "specs": {"vcpus": 26, "memory_gib": 225, "gpus": 1},
            },
            "regions_with_capacity_available": [{"name": each, "description": "somewhere"} for each in regions],
        }

    data = {
        "gpu_1x_h100_sxm5": kind("gpu_1x_h100_sxm5", 429, "us-west-3", "us-east-1"),
        "gpu_1x_h100_pcie": kind("gpu_1x_h100_pcie", 329),
    }
    with serving({"/api/v1/instance-types": {"data": data}}) as rest:
        environment = {"LAMBDALABS_API_KEY": KEY, "SKYINFRA_LAMBDA_URL": rest.address}
        live = asked("H100:1", "lambda", environment)
    (offer,) = of(live, "lambda").values()
    assert offer.on_demand == Price(4.29, "all regions", TODAY) and offer.regions == ("us-east-1", "us-west-3")
    assert live.sold_out == {"lambda": 1}


def test_verda_joins_prices_and_places() -> None:
    def kind(name: str, price: str, spot: str) -> dict[str, Any]:
        return {
            "instance_type": name,
            "price_per_hour": price,
            "spot_price": spot,
            "currency": "usd",
            "name": "H100 SXM5 80GB",
        }

    answers = {
        "/oauth2/token": {"access_token": "t0ken"},
        "/instance-types": [kind("1H100.80S.32V", "3.95", "1.70"), kind("8H100.80S.176V", "31.6", "13.6")],
        "/instance-availability": [{"location_code": "FIN-02", "availabilities": ["1H100.80S.32V"]}],
    }
    with serving(answers) as rest:
        keys = {"VERDA_CLIENT_ID": "id", "VERDA_CLIENT_SECRET": KEY, "VERDA_BASE_URL": rest.address}
        live = asked("H100", "verda", keys)
    (offer,) = of(live, "verda").values()
    assert (offer.price(), offer.price(spot=True)) == (
        Price(3.95, "all regions", TODAY),
        Price(1.7, "all regions", TODAY),
    )
    assert offer.regions == ("FIN-02",)


def meter(**fields: Any) -> dict[str, Any]:
    given = {
        "currencyCode": "USD",
        "retailPrice": 98.32,
        "armRegionName": "eastus",
        "meterName": "ND96isr H100 v5",
        "productName": "Virtual Machines NDsr H100 v5 Series",
        "type": "Consumption",
        "armSkuName": "Standard_ND96isr_H100_v5",
    }
    return {**given, **fields}


def test_azure_asks_for_the_sizes_of_the_query_page_by_page() -> None:
    def prices(_: Any, query: dict[str, list[str]], __: bytes) -> Any:
        if "$skip" in query:
            return {"Items": [meter(meterName="ND96isr H100 v5 Spot", retailPrice=16.0)], "NextPageLink": None}
        found = [
            meter(),
            meter(productName="Virtual Machines NDsr H100 v5 Series Windows", retailPrice=99.0),
            meter(meterName="ND96isr H100 v5 Low Priority", retailPrice=10.0),
            meter(type="Reservation", retailPrice=350400.0),
        ]
        return {"Items": found, "NextPageLink": "https://prices.azure.com:443/api/retail/prices?$filter=x&$skip=100"}

    with serving({"/api/retail/prices": prices}) as rest:
        live = asked("H100:8", "azure", {"SKYINFRA_AZURE_PRICES_URL": rest.address})
    first, second = rest.queries("/api/retail/prices")
    assert "armRegionName eq 'eastus' and (armSkuName eq 'Standard_ND96isr_H100_v5')" in first["$filter"][0]
    assert second["$skip"] == ["100"]
    offer = of(live, "azure")["Standard_ND96isr_H100_v5"]
    assert (offer.on_demand, offer.spot) == (Price(98.32, "eastus", TODAY), Price(16.0, "eastus", TODAY))
    # Only these sizes were asked for, in that region: the others are as shipped.
    assert of(live, "azure")["Standard_NC4as_T4_v3"].on_demand == Price(0.526, "eastus", "2026-06-18")


def test_partial_answers_and_who_did_not_answer() -> None:
    with (
        serving({"/api/v0/bundles/": {"offers": [bundle()]}}) as vast,
        serving({"/v2/catalog/gpus": slow(9)}) as runpod,
    ):
        environment = {
            "VASTAI_API_URL": vast.address,
            "RUNPOD_API_KEY": KEY,
            "RUNPOD_API_BASE_URL": runpod.address,
            "LAMBDALABS_API_KEY": KEY,
            "SKYINFRA_LAMBDA_URL": "http://127.0.0.1:9",
            "SKYINFRA_AZURE_PRICES_URL": "http://127.0.0.1:9",
            "SCW_API_URL": "http://127.0.0.1:9",
            "VULTR_API_ENDPOINT": "http://127.0.0.1:9",
        }
        begin = time.monotonic()
        live = look_up(offers.ask("RTX 4090"), environment=environment, seconds=1)
        assert time.monotonic() - begin < 4
    assert set(live.answered) == {"vastai"}
    assert live.silent["runpod"] == "it did not answer in time"
    assert live.silent["lambda"].startswith("it cannot be reached from here")
    assert live.silent["verda"] == "it answers with a key only: set VERDA_CLIENT_ID and VERDA_CLIENT_SECRET"
    assert KEY not in " ".join(live.remarks())
    assert live.remarks(offers.find("H100:8"))[-1].startswith("Not asked, with the shipped prices: aws, ")
    # Those keep their shipped offers, with the dates of those.
    assert of(live, "runpod") == {o.machine_type: o for o in offers.load() if o.provider == "runpod"}


@pytest.fixture
def vast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rest]:
    with serving({"/api/v0/bundles/": {"offers": [bundle()]}}) as rest:
        monkeypatch.setenv("VASTAI_API_URL", rest.address)
        yield rest


def test_the_command(vast: Rest) -> None:
    arguments = ["offers", "RTX_4090:2", "--provider", "vastai", "--live"]
    shown = CliRunner().invoke(app, arguments).stdout
    assert f"$0.71 Quebec, CA {TODAY}" in shown and "vastai listed 1 machine types just now." in shown
    (offer,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["offers"]
    assert offer["on_demand"]["date"] == TODAY and offer["source"] == f"Vast.ai, asked on {TODAY}"


def test_a_provider_that_does_not_answer_keeps_no_process_alive() -> None:
    """The program ends when the command does, though a thread still waits for an answer."""
    program = (
        "import sys\n"
        "from skyinfra.preflight.rest import at_once\n"
        "import time\n"
        "print(at_once(lambda name: time.sleep(30), ['x'], time.monotonic() + 0.2)['x'])\n"
    )
    begin = time.monotonic()
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert result.stdout == "it did not answer in time\n" and time.monotonic() - begin < 10
