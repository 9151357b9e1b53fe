"""Declaring that nodes end themselves: lengths of time, places that cannot, and what a node gets of it."""

from __future__ import annotations

import pytest

import skyinfra as sky
from skyinfra.compiler import Deployment, compile_pool, revision
from skyinfra.declared import seconds_of
from skyinfra.errors import InvalidField, NotSupported
from skyinfra.providers import kinds
from skyinfra.providers.data import read
from skyinfra.stack import describe, module_inputs

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ test"


def compiled(provider: sky.Provider | None = None, **fields: object) -> Deployment:
    if isinstance(provider, sky.Lambda):
        fields["accelerator"] = "A10"
    pool = sky.ComputePool(provider=provider or sky.Local(), **fields)  # type: ignore[arg-type]
    return compile_pool(pool, "demo")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2d", 172_800)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds
    assert compiled(max_lifetime=text).worker.lifetime_seconds == seconds


@pytest.mark.parametrize("text", ["30", "m", "0m", "-5m", "1h30m", "5 m", "30M", "1e9h", "٣m", "", "inf"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(InvalidField) as error:
        sky.ComputePool(provider=sky.Local(), stop_after_idle=text)
    assert "stop_after_idle" in str(error.value)
    assert "90s, 30m, 12h, 2d" in str(error.value)


def test_a_node_gets_both_and_nothing_where_nothing_is_declared() -> None:
    made = compiled(stop_after_idle="30m", max_lifetime="12h")
    assert (made.head.idle_seconds, made.worker.lifetime_seconds) == (1800.0, 43_200.0)
    assert made.worker.ends_itself
    for plain in (compiled(), compiled(stop_after_idle="never", max_lifetime="never")):
        assert not plain.worker.ends_itself
        # A runner of the version before reads it.
        assert "idle_seconds" not in plain.worker.dumps()
        assert "lifetime_seconds" not in plain.worker.dumps()


def test_it_replaces_no_node() -> None:
    aws = sky.AWS(region="us-east-1")
    assert revision(compiled(aws)) == revision(compiled(aws, stop_after_idle="30m", max_lifetime="12h"))


def test_an_idle_time_shorter_than_a_boot_is_refused() -> None:
    with pytest.raises(InvalidField) as error:
        compiled(sky.AWS(region="us-east-1"), stop_after_idle="2m")
    assert "shorter than a node of AWS takes to boot" in str(error.value)
    assert "At least 5m." in str(error.value)
    assert compiled(sky.AWS(region="us-east-1"), stop_after_idle="5m").worker.idle_seconds == 300


def test_what_ends_an_instance_is_an_input_of_its_module() -> None:
    aws = sky.AWS(region="us-east-1")
    assert module_inputs(compiled(aws, max_lifetime="12h"), ".")["shutdown_terminates"] is True
    assert "shutdown_terminates" not in module_inputs(compiled(aws), ".")
    assert module_inputs(compiled(sky.Container(), stop_after_idle="30m"), ".")["restart"] == "on-failure"
    gcp = sky.GCP(project="p", region="us-central1")
    assert module_inputs(compiled(gcp, max_lifetime="12h"), ".")["starts_stopped"] is True
    assert "starts_stopped" not in module_inputs(compiled(gcp), ".")
    image = sky.Image(runner=f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}")
    cards = {"accelerator": "RTX 4090", "image": image}
    for market in (sky.RunPod(), sky.VastAI()):
        assert module_inputs(compiled(market, stop_after_idle="30m", **cards), ".")["deletes_itself"] is True
        assert "deletes_itself" not in module_inputs(compiled(market, **cards), ".")
    assert describe(compiled(aws, max_lifetime="12h"))["max_lifetime"] == "12h"
    assert describe(compiled(aws))["max_lifetime"] is None


@pytest.mark.parametrize(
    ("provider", "why"),
    [
        (sky.GCP(project="p", region="us-central1", group=True), "a machine group starts another node"),
        (
            sky.Azure(region="eastus", ssh_public_key=KEY, allow_cidrs=["10.0.0.0/8"]),
            "costs on until somebody deallocates it",
        ),
        (sky.SSH(hosts=["10.0.0.1"]), "is not this pool's to end"),
        (sky.Lambda(region="us-east-1", ssh_public_key=KEY), "no way is known here"),
    ],
)
@pytest.mark.parametrize("field", ["stop_after_idle", "max_lifetime"])
def test_a_place_that_cannot_says_why(provider: sky.Provider, why: str, field: str) -> None:
    with pytest.raises(NotSupported) as error:
        compiled(provider, **{field: "12h"})
    assert why in str(error.value)
    assert "skyinfra destroy" in str(error.value)
    assert error.value.field == field


def test_a_place_says_how_its_nodes_end_or_why_they_cannot() -> None:
    found = {kind: read(kind).idle for kind in kinds()}
    ends = {kind for kind, idle in found.items() if idle is not None and idle.how}
    assert ends == {"aws", "container", "gcp", "local", "runpod", "vastai"}
    assert {kind for kind in ends if (idle := found[kind]) and not idle.keeps_jobs} == {"runpod", "vastai"}
    for idle in filter(None, found.values()):
        assert bool(idle.how) != bool(idle.why)
        assert idle.source
        assert seconds_of(idle.at_least)
