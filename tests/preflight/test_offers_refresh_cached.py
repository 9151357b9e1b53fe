"""``skyinfra offers --refresh`` against servers that answer as the API documents of the providers do, and otherwise."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from servers.rest import serving, slow
from typer.testing import CliRunner

from skyinfra import offers
from skyinfra.cli.app import app
from skyinfra.offers import Offer, Price
from skyinfra.preflight import refreshed
from skyinfra.preflight.refreshed import Answer, cache_file, refresh, with_cached

KEY = "k3y-of-t3sts"
TODAY = "2026-11-25"
NOWHERE = "http://127.0.0.1:9"
ELSEWHERE = {
    "VASTAI_API_URL": NOWHERE,
    "SKYINFRA_AZURE_PRICES_URL": NOWHERE,
    "SCW_API_URL": NOWHERE,
    "VULTR_API_ENDPOINT": NOWHERE,
}
SXM = "gpu_1x_h100_sxm5"


def asked(file: Path, environment: dict[str, str], *providers: str, **more: Any) -> dict[str, Answer]:
    found = refresh(providers, file=file, environment=environment, today=TODAY, **more)
    return {answer.provider: answer for answer in found}


def offer(file: Path, provider: str, name: str) -> Offer:
    return next(o for o in with_cached(offers.load(), file) if (o.provider, o.machine_type) == (provider, name))


def of_lambda(*prices: tuple[str, Any]) -> dict[str, Any]:
    return {
        "data": {
            name: {
                "instance_type": {"name": name, "price_cents_per_hour": cents},
                "regions_with_capacity_available": [],
            }
            for name, cents in prices
        }
    }


def lambda_at(address: str) -> dict[str, str]:
    return {"LAMBDALABS_API_KEY": KEY, "SKYINFRA_LAMBDA_URL": address}


def ask_lambda(file: Path, answer: Any) -> Answer:
    with serving({"/api/v1/instance-types": answer}) as rest:
        return asked(file, lambda_at(rest.address), "lambda")["lambda"]


def test_prices_are_kept_with_their_day(tmp_path: Path) -> None:
    file = tmp_path / "new" / "prices.json"
    before = offer(file, "lambda", SXM)
    assert before.on_demand is not None
    same = round(before.on_demand.usd_per_hour * 100)
    said = ask_lambda(file, of_lambda((SXM, same + 11), ("gpu_1x_a10", 999_999), ("gpu_9x_unheard", 5)))
    assert (said.result, said.prices, said.changed, said.refused) == ("asked", 1, 1, 1)
    now = offer(file, "lambda", SXM)
    assert now.on_demand == Price((same + 11) / 100, "all regions", TODAY)
    assert now.source.endswith(f"; asked on {TODAY}")
    # The units of the other one cannot be right.
    assert offer(file, "lambda", "gpu_1x_a10") in offers.load()
    again = ask_lambda(file, of_lambda((SXM, same + 11)))
    assert (again.prices, again.changed) == (1, 0) and str(again) == "lambda: asked, 1 price, 0 changed."


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"<html>", b"[" * 200_000, b"\xff\xfe", b"null", b"[]", b'{"data": 1e999}', 500, 429, 302),
        *({}, {"data": []}, {"data": {SXM: None}}, {"data": {SXM: {"instance_type": "x"}}}),
        *(of_lambda((SXM, cents)) for cents in (0, -429, None, "free", "NaN", [], {}, "1e999")),
        of_lambda(("\x1b]0;x\x07", 429)),
    ],
    ids=lambda answer: repr(answer)[:40],
)
def test_an_answer_that_is_not_as_documented_leaves_the_prices_of_before(tmp_path: Path, answer: Any) -> None:
    file = tmp_path / "prices.json"
    ask_lambda(file, of_lambda((SXM, 444)))
    before = file.read_bytes()
    said = ask_lambda(file, answer)
    assert said.result == "failed" and KEY not in str(said) and "\x1b" not in str(said)
    assert file.read_bytes() == before


def test_another_currency_is_refused(tmp_path: Path) -> None:
    row = {"instance_type": "1H100.80S.32V", "price_per_hour": "2.5", "spot_price": "1", "currency": "eur"}
    answers = {"/oauth2/token": {"access_token": "t"}, "/instance-types": [row], "/instance-availability": []}
    with serving(answers) as rest:
        keys = {"VERDA_CLIENT_ID": "id", "VERDA_CLIENT_SECRET": KEY, "VERDA_BASE_URL": rest.address}
        assert asked(tmp_path / "prices.json", keys, "verda")["verda"].result == "failed"


def test_the_cheapest_of_a_marketplace_is_the_price_of_its_kind(tmp_path: Path) -> None:
    bundle = {"gpu_name": "RTX 4090", "num_gpus": 2, "gpu_ram": 24564, "geolocation": "Quebec, CA", "min_bid": 0.4}
    found = [{**bundle, "id": 1, "dph_total": 0.9}, {**bundle, "id": 2, "dph_total": 0.71}]
    with serving({"/api/v0/bundles/": {"offers": found}}) as rest:
        said = asked(tmp_path / "prices.json", {"VASTAI_API_URL": rest.address}, "vastai")["vastai"]
    assert said.result == "asked"
    here = offer(tmp_path / "prices.json", "vastai", "2x-RTX_4090-32-65536")
    assert here.on_demand == Price(0.71, "Quebec, CA", TODAY)


def test_each_provider_is_spoken_of_and_none_stops_another(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    with (
        serving({"/api/v1/instance-types": of_lambda((SXM, 444))}) as good,
        serving({"/v2/catalog/gpus": slow(9)}) as late,
    ):
        keys = {**ELSEWHERE, **lambda_at(good.address), "RUNPOD_API_KEY": KEY, "RUNPOD_API_BASE_URL": late.address}
        begin = time.monotonic()
        found = asked(file, keys, seconds=1)
        assert time.monotonic() - begin < 6
    assert found["lambda"].result == "asked" and found["runpod"].says == "it did not answer in time"
    assert str(found["verda"]).endswith("set VERDA_CLIENT_ID and VERDA_CLIENT_SECRET.")
    assert found["azure"].result == "failed" and "cannot be reached" in found["azure"].says
    assert {found[name].result for name in ("aws", "oci", "nebius", "crusoe", "gcp", "local")} == {"nothing"}
    assert KEY not in " ".join(map(str, found.values()))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"prices": [1]}', '{"prices": [["lambda", "x", "spot", {}]]}', "[" * 99999]
)
def test_a_cache_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "prices.json").write_text(text)
    assert with_cached(offers.load(), tmp_path / "prices.json") == offers.load()


def test_older_prices_of_the_cache_do_not_count(tmp_path: Path) -> None:
    price = {"usd_per_hour": 3.0, "region": "all regions", "date": "2020-01-01"}
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"prices": [["lambda", SXM, "on_demand", price]]}))
    assert with_cached(offers.load(), file) == offers.load()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving({"/api/v1/instance-types": of_lambda((SXM, 444))}) as rest:
        for name, value in lambda_at(rest.address).items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, ["offers", "--refresh", "--provider", "lambda"])
        document = CliRunner().invoke(app, ["offers", "--refresh", "--provider", "lambda", "--json"]).stdout
    assert result.exit_code == 0 and result.stdout.startswith("lambda: asked, 1 price, 1 changed.\n")
    assert cache_file().parent == tmp_path / "skyinfra" and str(cache_file()) in result.stdout
    assert json.loads(document)["notes"][0] == "lambda: asked, 1 price, 0 changed."
    listed = CliRunner().invoke(app, ["offers", "H100", "--provider", "lambda"]).stdout
    assert "$4.44 all regions" in listed
    monkeypatch.setenv("SKYINFRA_LAMBDA_URL", NOWHERE)
    failed = CliRunner().invoke(app, ["offers", "--refresh", "--provider", "lambda"])
    assert failed.exit_code == 1 and "No price was renewed." in failed.stdout
    assert CliRunner().invoke(app, ["offers", "H100", "--refresh"]).exit_code == 2


def test_without_credentials_for_anything_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LAMBDALABS_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["offers", "--refresh", "--provider", "lambda"])
    assert result.exit_code == 1 and "set LAMBDALABS_API_KEY" in result.stdout
    assert not list(tmp_path.iterdir())


def test_declarations_do_not_see_the_cache(tmp_path: Path) -> None:
    ask_lambda(tmp_path / "prices.json", of_lambda((SXM, 444)))
    assert refreshed.with_cached(offers.load(), tmp_path / "prices.json") != offers.load()
    assert offers.find("H100", provider="lambda")[0] in offers.load()
