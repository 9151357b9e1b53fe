"""What differs between providers is data: it is whole, and says what the code needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import skyinfra as sky
from skyinfra import providers
from skyinfra.bootstrap import user_data
from skyinfra.compiler import compile_pool
from skyinfra.preflight.rest import Api
from skyinfra.providers import CloudProvider, data
from skyinfra.stack import modules_folder
from skyinfra.terraform.cloud_errors import refusals
from tools import providers_page

UNITS = ROOT / "skyinfra" / "node" / "units"
# Where a quotation stands, so that anybody finds it: a page, an issue, or a file of a repository.
REPOSITORY = r"\b[\w.-]+/[\w.-]+"
FILE = r"[\w./-]+\.(?:go|py|toml|json|proto|md|yaml|dart)\b"
ADDRESS = re.compile(rf"https://\S+|{REPOSITORY}#\d+|{REPOSITORY} (?:[0-9a-f]{{7,}} )?{FILE}")
UNPROVEN = re.compile("documents only|public logs|answer is known")


@pytest.mark.parametrize("kind", providers.kinds())
def test_it_is_whole(kind: str) -> None:
    found = providers.read(kind)
    for table in (found.boot, found.traits):
        assert table.source
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", table.date)
    assert (found.boot.form == "node.json") == (found.boot.limit is None)
    declared = next(
        cls for cls in vars(providers).values() if isinstance(cls, type) and getattr(cls, "kind", None) == kind
    )
    assert declared.__name__ in sky.__all__
    assert (modules_folder(frozenset({kind})) / kind / "main.tf").is_file()
    for row in found.errors:
        assert getattr(sky, row["cause"]) and row["says"] and row["hint"]
        assert all(re.compile(text) for text in row["texts"])
        if "already" in row["says"] and re.search(r"\bdelete", row["hint"]):
            assert "colleague" in row["hint"], f"two people may have one name: {row['hint']}"
    held = ROOT / "tests" / "preflight" / "tables" / f"{kind}.toml"
    assert found.preflight is not None, f"it has no [preflight]: move {held.name} of tests/preflight/tables to its end"
    assert not held.exists(), f"it has its [preflight]: remove {held.name} from tests/preflight/tables"
    if issubclass(declared, CloudProvider):
        assert {"name", "source", "version", "config"} <= set(found.terraform)
        if found.traits.groups:
            assert found.machines["head"] in found.prices["usd_per_hour"]
        sizes = [(vcpus, memory) for _, vcpus, memory, *_ in found.machines["general"]]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("kind", providers.kinds())
def test_what_is_known_of_its_refusals_is_proven(kind: str) -> None:
    """Each text is found in a quotation, codes have the list that they are in, and the row is what answers."""
    found = providers.read(kind)
    for row in found.errors:
        assert row["codes"] or row["texts"], row
        assert bool(row["codes"]) == bool(row.get("source")), f"{row['codes']}: where are they listed?"
        assert not row["codes"] or ADDRESS.search(row["source"]), row["source"]
        for text in row["texts"]:
            assert any(re.search(text, words) for words, _ in row["quotes"]), f"nothing quoted has {text}"
        for words, source in row.get("quotes", ()):
            assert ADDRESS.search(source) and not UNPROVEN.search(source), f"{words}: where does it stand? ({source})"
            [answer] = refusals([(f"module.p.{found.terraform['name']}_x.node[0]", words)])
            assert answer.hint == row["hint"], f"another row answers to {words}"


def test_what_is_unknown_in_a_data_file_is_refused() -> None:
    whole: dict[str, Any] = {"form": "script", "delivery": "ssh", "source": "x", "date": "2026-11-23"}
    data.Boot(**whole)
    for wrong in ({"forms": "script"}, {"form": "scripts"}, {"limit": "16384"}):
        with pytest.raises(sky.InvalidField):
            data.Boot(**{**whole, **wrong})


def test_tasks_reach_no_metadata_service_of_a_provider() -> None:
    for unit in ("skyinfra-runner.service", "skyinfra-metrics.service"):
        denied = re.findall(r"(?m)^IPAddressDeny=(.*)$", (UNITS / unit).read_text())
        closed = {address for line in denied for address in line.split()}
        for kind in providers.kinds():
            assert closed >= set(providers.read(kind).traits.metadata_hosts), (unit, kind)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``changed(table, **values)``: AWS with other data."""

    def change(table: str, **values: Any) -> None:
        old = data.read("aws")
        new = old.model_copy(update={table: getattr(old, table).model_copy(update=values)})
        real = data.read
        monkeypatch.setattr(providers.base, "read", lambda kind: new if kind == "aws" else real(kind))

    return change


def compiled(**fields: Any) -> Any:
    return compile_pool(sky.ComputePool(name="p", provider=sky.AWS(), **fields), "s")


def test_spot_is_refused_where_there_is_none(changed: Any) -> None:
    changed("traits", spot="no")
    with pytest.raises(sky.NotSupported, match=r"AWS has no spot machines(.|\n)*Providers that do: aws") as caught:
        compiled(accelerator="L4", spot=True)
    assert caught.value.field == "spot"


def test_a_layout_is_refused_where_nobody_may_partition(changed: Any) -> None:
    changed("traits", partitioned_by="nobody")
    with pytest.raises(sky.NotSupported, match=r"nobody may partition a GPU on AWS(.|\n)*aws") as caught:
        compiled(accelerator="H100:8/3g.40gb")
    assert caught.value.field == "accelerator"
    assert compiled(accelerator="H100:8").selection.machine_types == ("p5.48xlarge",)


def test_without_groups_a_spot_pool_has_one_machine_type_and_its_own_head(changed: Any) -> None:
    changed("traits", groups=False)
    selected = compiled(accelerator="L4", spot=True, nodes=3).selection
    assert (selected.machine_types, selected.separate_head) == (("g6.xlarge",), False)


def test_the_limit_of_user_data_is_that_of_the_provider(changed: Any) -> None:
    changed("boot", gzip=False)
    with pytest.raises(sky.NotSupported, match=r"bytes, of 16384 that are taken"):
        user_data(compiled())
    changed("boot", limit=None)
    assert user_data(compiled()).head


def test_units_and_steps_follow_the_traits(changed: Any) -> None:
    def started() -> set[str]:
        (units,) = re.findall(r'\\"units\\":\[(.*?)\]', user_data(compiled()).head)
        return set(re.findall(r"skyinfra-\w+\.service", units))

    assert {"skyinfra-watch.service", "skyinfra-interrupt.service"} <= started()
    changed("traits", layout_channel="client", preemption_notice=None, scratch=None, head_volume=())
    assert not {"skyinfra-watch.service", "skyinfra-interrupt.service"} & started()
    assert not {"scratch", "volume"} & set(re.findall(r'\\"operation\\":\\"(\w+)', user_data(compiled()).head))


def test_a_terraform_provider_takes_json_values() -> None:
    made = data.TerraformProvider("azurerm", "s", "v", (), (("features", {}),))
    assert json.loads(json.dumps(made.configuration())) == {"alias": "this", "features": {}}


def test_the_error_of_another_cloud_is_not_taken_for_one_of_aws() -> None:
    text = "Error: creating it: api error AccessDenied: no"
    assert refusals([("module.p.aws_instance.head", text)])[0].says == "the credentials may not do it"
    assert refusals([("module.p.google_compute_instance.head", text)]) == ()
    # Where the resource does not say whose it is.
    assert refusals([("", text)])


def test_the_path_of_the_data_is_in_the_package() -> None:
    assert {Path(file).suffix for file in (ROOT / "skyinfra" / "providers").iterdir()} >= {".toml", ".py"}


def test_the_page_of_the_providers_is_what_the_data_says() -> None:
    page = providers_page.PAGE.read_text()
    assert providers_page.written(page) == page, "run python -m tools.providers_page"
    for kind in providers.kinds():
        assert f"| `{kind}` |" in page


@pytest.mark.parametrize("kind", providers.kinds())
def test_each_place_says_what_proves_it(kind: str) -> None:
    facts = providers.read(kind).verified
    assert facts.images and facts.names
    # A version that applied the module is said with what stood for the cloud, and when; the README says so too.
    assert bool(facts.applied) == bool(facts.against) == bool(re.fullmatch(r"2\d{3}-\d\d-\d\d", facts.date))
    readme = (ROOT / "modules" / kind / "README.md").read_text()
    if "Terraform's core" not in facts.applied:
        assert "## What was run" in readme and (facts.date or "was not run") in readme.partition("## What was run")[2]
    page = providers_page.PAGE.read_text()
    assert f"| `{kind}` | {facts.images} | {facts.names} |" in page


@pytest.mark.parametrize("kind", providers.kinds())
def test_preflight_accepts_what_the_compiled_block_reads(kind: str) -> None:
    found = providers.read(kind)
    assert found.preflight is not None
    accepted = {name for names in found.preflight.credentials for name in names}
    block = json.dumps(found.terraform.get("settings", {}))
    # A block that names variables shadows every other way in.
    named = set(re.findall(r'_env": "(\w+)"', block))
    assert not named or (accepted == named and len(found.preflight.credentials) == 1 and not found.preflight.elsewhere)
    assert named or accepted == {name for names in found.terraform.get("credentials", ()) for name in names}
    # Nobody is sent to a variable that is not read.
    hints = [found.preflight.login, *(row["hint"] for row in found.errors if row["cause"] == "CloudCredentialsRefused")]
    for text in hints if accepted else []:
        for name in re.findall(r"\bset ([A-Z][A-Z0-9_]{5,})", text):
            assert name in accepted or name.startswith(("AWS_", "GOOGLE_")), (name, text)


def test_the_token_of_nebius_is_not_accepted_beside_its_service_account() -> None:
    asked = providers.read("nebius").preflight
    assert asked is not None
    token = Api("Nebius", asked, deadline=0, environment={"NEBIUS_IAM_TOKEN": "t"})
    account = dict.fromkeys(("NB_SA_ID", "NB_AUTHKEY_PUBLIC_ID", "NB_AUTHKEY_PRIVATE_PATH"), "x")
    assert token.variables == ()
    assert set(Api("Nebius", asked, deadline=0, environment=account).variables) == set(account)
