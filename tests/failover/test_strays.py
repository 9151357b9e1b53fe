"""When a deploy looks for machines that no state has, and what it says of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.rest import Rest, serving
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.deploy.last_run import recorded
from skyinfra.failover.deploying import Failover
from skyinfra.failover.strays import refuse_strays, stray_lines
from skyinfra.places.choices import Choices
from skyinfra.terraform.synthesized import SynthesizedStack

LOGIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEq0"
SECRET = "0f3a9c1e-5b77-4b1f-9d6a-2b1f0c9e8d7a"
OWN = "skyinfra-s-t-0f3a9c1e"


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rest]:
    row = {"id": "stray", "name": "t-0", "ssh_key_names": [OWN], "region": {"name": "us-east-1"}}
    with serving({"/api/v1/instances": {"data": [row]}}) as rest:
        monkeypatch.setenv("LAMBDALABS_API_KEY", "k3y")
        monkeypatch.setenv("SKYINFRA_LAMBDA_URL", rest.address)
        yield rest


def stack(folder: Path, provider: Any = None, backend: bool = True, **more: Any) -> SynthesizedStack:
    pool = sky.ComputePool(
        name="t", accelerator="H100:8", provider=provider or sky.Lambda(ssh_public_key=LOGIN), **more
    )
    kept = {"local": {"path": str(folder / "s.tfstate")}} if backend else None
    return synthesized(folder, pool, backend=kept)


def state(folder: Path, *resources: tuple[str, str, str, str]) -> None:
    """Writes a state with these resources, each a module, a type, a name and an id."""
    found = [
        {
            "mode": "managed",
            "module": f"module.{module}",
            "type": type,
            "name": name,
            "provider": "",
            "instances": [{"index_key": f"t-{n}", "attributes": {"id": id}}],
        }
        for n, (module, type, name, id) in enumerate(resources)
    ]
    (folder / "s.tfstate").write_text(json.dumps({"version": 4, "resources": found}))


def said(found: SynthesizedStack) -> list[str]:
    lines: list[str] = []
    refuse_strays(found, lines.append)
    return lines


BEGUN = ("t", "terraform_data", "secret", SECRET)
NODE = ("t", "lambdalabs_instance", "node", "mine")


def test_a_machine_that_no_state_has_is_refused_with_its_end(tmp_path: Path, cloud: Rest) -> None:
    found = stack(tmp_path)
    state(tmp_path, BEGUN)
    with pytest.raises(sky.StrayMachine) as caught:
        said(found)
    line = "s/t: the machine stray in us-east-1 is there, and in no state"
    assert line in caught.value.message and "End it in the console of Lambda." in caught.value.hint
    # Another machine may be deploying it now, which only the lock of the state would show.
    hint = caught.value.hint
    assert "or a deploy that runs elsewhere now" in caught.value.message
    assert hint.index("no other deploy of s runs") < hint.index("End it in the console")
    assert stray_lines(found) == [f"{line}. End it in the console of Lambda."]


def test_what_a_place_has_left_is_looked_for_too(tmp_path: Path, cloud: Rest) -> None:
    found = stack(tmp_path, [sky.GCP(project="p"), sky.Lambda(ssh_public_key=LOGIN)])
    state(tmp_path, ("t__lambda-us-east-1", "terraform_data", "secret", SECRET))
    assert found.module_of("t") == "t"
    with pytest.raises(sky.StrayMachine, match="the machine stray"):
        said(found)


@pytest.mark.parametrize("resources", [(), (NODE,), (BEGUN, NODE)], ids=["nothing", "no secret", "all machines"])
def test_nobody_is_asked_where_nothing_can_be_missing(tmp_path: Path, cloud: Rest, resources: Any) -> None:
    found = stack(tmp_path)
    assert said(found) == []  # where there is no state at all
    state(tmp_path, *resources)
    assert said(found) == [] and stray_lines(found) == [] and not cloud.asked


def test_a_machine_of_two_that_is_missing_is_looked_for(tmp_path: Path, cloud: Rest) -> None:
    found = stack(tmp_path, nodes=2)
    state(tmp_path, BEGUN, NODE)
    with pytest.raises(sky.StrayMachine):
        said(found)
    cloud.answers["/api/v1/instances"] = {"data": [{"id": "mine", "ssh_key_names": [OWN]}]}
    assert said(found) == []


@pytest.mark.parametrize("places", [False, True], ids=["one place", "places"])
def test_a_block_that_logs_in_by_itself_is_not_asked_as_somebody_else(
    tmp_path: Path, cloud: Rest, places: bool
) -> None:
    provider = sky.Lambda(ssh_public_key=LOGIN, provider="lambdalabs.mine")
    found = stack(tmp_path, [provider, sky.GCP(project="p")] if places else provider)
    state(tmp_path, BEGUN)
    block = {"alias": "mine", "api_key": "${var.key}"}
    found = dataclasses.replace(found, providers={**found.providers, "lambdalabs": [block]})
    [line] = said(found)
    why = "the provider block logs in otherwise, by api_key"
    assert line == f"s/t: whether an earlier deploy has left a machine is not known: {why}"
    assert not cloud.asked


def test_of_a_cloud_that_nobody_asks_nothing_is_said(tmp_path: Path) -> None:
    found = stack(tmp_path, sky.GCP(provider="google.mine"))
    state(tmp_path, BEGUN)
    block = {"alias": "mine", "credentials": "${var.key}"}
    assert said(dataclasses.replace(found, providers={**found.providers, "google": [block]})) == []


@pytest.mark.parametrize("answer", [401, 500, b"<html>"])
def test_a_cloud_that_does_not_say_stops_no_deploy(tmp_path: Path, cloud: Rest, answer: Any) -> None:
    found = stack(tmp_path)
    state(tmp_path, BEGUN)
    cloud.answers["/api/v1/instances"] = answer
    [line] = said(found)
    assert line.startswith("s/t: whether an earlier deploy has left a machine is not known: ") and "k3y" not in line
    assert stray_lines(found) == []


def test_beside_a_deploy_that_runs_its_machine_is_no_stray(tmp_path: Path, cloud: Rest) -> None:
    found = stack(tmp_path)
    state(tmp_path, BEGUN)
    with recorded(found, "deploy"):
        assert said(found) == [] and not cloud.asked
    with pytest.raises(sky.StrayMachine):
        said(found)


@pytest.mark.parametrize("kind", [sky.StateLocked, sky.StateNotSaved, sky.TerraformFailed])
def test_only_a_deploy_that_had_the_lock_and_saved_its_state_has_left_a_machine(
    tmp_path: Path, cloud: Rest, kind: type[sky.TerraformFailed]
) -> None:
    found = stack(tmp_path)

    def attempt(_: SynthesizedStack) -> None:
        state(tmp_path, BEGUN)  # the other deploy, or this one, has begun meanwhile
        error = kind("it failed", hint="as it says")
        error.diagnostics = (("module.t.lambdalabs_instance.node", "i/o timeout"),)
        raise error

    deploys = Failover(found, Choices(tmp_path), lambda: found, attempt, lambda _: True, lambda _: None)
    with pytest.raises(kind) as caught:
        deploys.deploy()
    assert ("End it in the console" in (caught.value.hint or "")) == (kind is sky.TerraformFailed)


def test_a_run_of_hcp_terraform_has_its_credentials_elsewhere(tmp_path: Path, cloud: Rest) -> None:
    assert said(stack(tmp_path, backend=False)) == [] and not cloud.asked


def test_a_state_that_cannot_be_read_is_said_by_the_plan(tmp_path: Path, cloud: Rest) -> None:
    found = stack(tmp_path)
    (tmp_path / "s.tfstate").write_text("no state")
    assert said(found) == [] and not cloud.asked
