"""Values of secrets: where a client finds them, and that no declaration, pickle or message has one."""

from __future__ import annotations

import os
import pickle
import sys
import types
from pathlib import Path

import cloudpickle
import pytest

import skyinfra as sky
from skyinfra.cli.options import named_secret
from skyinfra.cli.run import ScriptOptions
from skyinfra.compiler import compile_pool, revision
from skyinfra.tasks import Task
from skyinfra.tasks.pickling import Shipment
from skyinfra.tasks.secrets import Secrets, look_up

VALUE = "v4lue-of-the-t0ken"


def raises(kind: type[Exception], call, *args, **kwargs) -> str:
    with pytest.raises(kind) as raised:
        call(*args, **kwargs)
    assert VALUE not in f"{raised.value!r} {raised.value}"
    return str(raised.value)


@pytest.fixture(autouse=True)
def _no_keyring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    monkeypatch.delenv("A_TOKEN", raising=False)


def test_a_secret_of_the_environment_is_looked_up_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = sky.Secret("A_TOKEN")
    assert "keyring is not installed" in raises(sky.SecretNotFound, look_up, secret)
    monkeypatch.setenv("A_TOKEN", VALUE)
    assert look_up(secret) == VALUE == secret.value
    assert VALUE not in repr(secret) + str(secret)
    assert VALUE.encode() not in pickle.dumps(secret) + cloudpickle.dumps(secret)
    assert pickle.loads(pickle.dumps(secret)) == secret


def test_a_file_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_TOKEN", "another-value")
    file = tmp_path / "token"
    file.write_text(f"{VALUE}\n")
    secret = sky.Secret("A_TOKEN", file=str(file))
    assert look_up(secret) == VALUE == secret.value
    file.write_bytes(VALUE.encode() + b"\xff\xfe")
    assert "UTF-8" in raises(sky.SecretNotFound, look_up, secret)
    file.unlink()
    assert "No such file" in raises(sky.SecretNotFound, look_up, secret)


def test_a_keyring_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = types.ModuleType("keyring")
    kept = {("skyinfra", "A_TOKEN"): VALUE}
    keyring.get_password = lambda service, name: kept.get((service, name))
    monkeypatch.setitem(sys.modules, "keyring", keyring)
    assert look_up(sky.Secret("A_TOKEN")) == VALUE
    assert "keyring set skyinfra B_TOKEN" in raises(sky.SecretNotFound, look_up, sky.Secret("B_TOKEN"))

    def locked(service: str, name: str) -> str:
        raise RuntimeError(f"the keyring is locked: {VALUE}")

    keyring.get_password = locked
    assert "does not answer: RuntimeError" in raises(sky.SecretNotFound, look_up, sky.Secret("B_TOKEN"))


@pytest.mark.parametrize(("value", "why"), [("abc", "at least 4"), ("x" * 70_000, "64 KiB"), ("ab\0cd", "NUL")])
def test_a_value_that_cannot_be_masked_or_held_is_refused(tmp_path: Path, value: str, why: str) -> None:
    file = tmp_path / "value"
    file.write_text(value)
    message = raises(sky.InvalidField, look_up, sky.Secret("A_TOKEN", file=str(file)))
    assert why in message and value not in message


def test_a_value_that_is_no_text_in_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value = os.fsdecode(b"t0p-caf\xe9")
    monkeypatch.setenv("A_TOKEN", value)
    message = raises(sky.InvalidField, look_up, sky.Secret("A_TOKEN"))
    assert "UTF-8" in message and value[:3] not in message


@pytest.mark.parametrize("name", ["", "A-B", "1A", f"hf-{VALUE}", "SKYINFRA_SECRETS", "A B"])
def test_a_name_is_that_of_a_variable(name: str) -> None:
    assert "HF_TOKEN" in raises(sky.InvalidField, sky.Secret, name)
    assert "HF_TOKEN" in raises(sky.InvalidField, sky.compute, secrets=[name])


def test_a_list_of_names_is_no_text() -> None:
    assert '["HF_TOKEN"]' in raises(sky.InvalidField, sky.compute, secrets="A_TOKEN")


def test_an_image_names_secrets_and_the_same_declaration_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(**env: object):
        image = sky.Image(env={"A": "1", **env})
        return compile_pool(sky.ComputePool(provider=sky.Local(simulate=True), image=image), "s")

    without = compiled(TOKEN=sky.Secret("A_TOKEN"))
    monkeypatch.setenv("A_TOKEN", VALUE)
    made = compiled(TOKEN=sky.Secret("A_TOKEN"))
    assert made == without and revision(made) == revision(without) != revision(compiled())
    assert made.head.env == {"A": "1"} and made.head.secrets == {"TOKEN": "A_TOKEN"} == made.worker.secrets
    assert VALUE not in made.head.dumps() + made.worker.dumps() + repr(made)
    assert "secrets" not in compiled().head.dumps()
    file = sky.Secret("A_TOKEN", file="/home/me/token")
    assert "sky.connect(..., secrets=[sky.Secret('A_TOKEN', file=" in raises(sky.InvalidField, compiled, TOKEN=file)


def test_an_image_goes_before_a_plugin() -> None:
    pool = sky.ComputePool(
        provider=sky.Local(simulate=True),
        accelerator="H100",
        plugins=[sky.plugins.torch()],
        image=sky.Image(env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": sky.Secret("A_TOKEN")}),
    )
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in pool.variables
    assert pool.secrets == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "A_TOKEN"}


TOKEN = sky.Secret("A_TOKEN")


@sky.compute
def uses_a_global() -> str:
    return TOKEN.value


@sky.compute(secrets=["A_TOKEN"])
def named_by_its_options() -> None: ...


@sky.compute
def takes(*given: object) -> None: ...


@sky.cls
class Holder:
    def __init__(self, token: sky.Secret) -> None:
        self.token = token

    def length(self) -> int:
        return len(self.token.value)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "task",
    [
        uses_a_global(),
        named_by_its_options(),
        takes({"deep": [sky.Secret("A_TOKEN")]}),
        takes().options(secrets=["A_TOKEN"]),
        Holder(sky.Secret("A_TOKEN")).length(),
    ],
    ids=["global", "options of the function", "argument", "options of the task", "object"],
)
def test_a_task_is_given_what_it_names_and_carries_no_value(monkeypatch, task, again: bool) -> None:
    monkeypatch.setenv("A_TOKEN", VALUE)
    shipment = Shipment(task, topic="skyinfra-t", secrets=Secrets("skyinfra-t"))
    if again:  # an object's recipe is pickled once
        shipment = Shipment(task, topic="skyinfra-t", secrets=Secrets("skyinfra-t"))
    (use,) = shipment.uses
    assert (use.variable, use.name, use.ref) == ("A_TOKEN", "A_TOKEN", "skyinfra-t.0")
    assert VALUE.encode() not in shipment.call + shipment.attempt(0)[1]
    assert not shipment.brought
    assert VALUE not in repr(shipment.secrets) + repr(shipment.uses)


def test_a_task_without_a_secret_has_the_header_that_earlier_nodes_read() -> None:
    shipment = Shipment(Task(len, ("1",)), topic="skyinfra-t", secrets=Secrets("skyinfra-t"))
    again = Shipment(
        Task(len, ("1",)), topic="skyinfra-t", secrets=Secrets("skyinfra-t"), at_head=[shipment.tree or ""]
    )
    assert shipment.uses == () and again.brought
    assert b"secrets" not in shipment.attempt(0)[1]


def test_a_changed_value_is_another_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Secrets("skyinfra-t", ["A_TOKEN"], lambda: {"HUB": "A_TOKEN"})
    monkeypatch.setenv("A_TOKEN", VALUE)
    assert [(use.variable, use.ref) for use in mine.uses(())] == [("A_TOKEN", "skyinfra-t.0"), ("HUB", "skyinfra-t.0")]
    monkeypatch.setenv("A_TOKEN", "rotated-value")
    uses = mine.uses(())
    assert {use.ref for use in uses} == {"skyinfra-t.1"} and mine.values(uses) == {"A_TOKEN": "rotated-value"}


def test_the_file_that_a_connection_names_is_that_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(VALUE)
    given = Secrets("skyinfra-t", [sky.Secret("A_TOKEN", str(tmp_path / "token"))], lambda: {"HUB": "A_TOKEN"})
    assert given.values(given.uses([sky.Secret("A_TOKEN")])) == {"A_TOKEN": VALUE}


def test_the_command_line_takes_names_and_files_and_no_values(tmp_path: Path) -> None:
    assert named_secret("A_TOKEN") == sky.Secret("A_TOKEN")
    assert ScriptOptions(secret=("A_TOKEN=@~/t",)).named_secrets() == [sky.Secret("A_TOKEN", "~/t")]
    assert "process list" in raises(sky.InvalidField, named_secret, f"A_TOKEN={VALUE}")
