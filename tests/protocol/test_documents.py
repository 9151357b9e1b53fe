"""Manifest, node configuration and instance: strict documents that come back as they were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skyinfra import InvalidManifest, InvalidNodeConfig, NotInTask
from skyinfra.mig import Placement
from skyinfra.protocol.fleet import STATE_VERSION, FleetLayout, FleetState
from skyinfra.protocol.instance import VARIABLE, InstanceInfo, current_accelerator, instance_info
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig

MANIFEST = Manifest(
    version=1,
    stack="inference",
    pool="mig",
    provider="aws",
    head=Endpoint("10.0.0.1", 8786),
    nodes=(ManifestNode("n1", "i-1", "10.0.0.1", head=True), ManifestNode("n2", "i-2", "10.0.0.2", zone="a")),
    slots=(ManifestSlot(0, "partition", "H100", "3g.40gb", 0),),
    secret="s" * 64,
    group_nodes=3,
)
CONFIG = NodeConfig(
    version=1,
    stack="inference",
    pool="mig",
    node="n1",
    provider="aws",
    head=True,
    scheduler="0.0.0.0:8786",
    accelerator=NodeAccelerator("H100", "nvidia", 1, 80.0, "h100_80gb", ((Placement("3g.40gb", 0, 4),),)),
    env={"A": "b"},
    pip=("torch",),
)
SLOT = InstanceInfo("n1", 0, "n1/0", "partition", "inference/mig", "3g.40gb", "H100", 0, "MIG-1", ("A", "MIG-1"), 40.0)


def test_they_come_back_as_they_were_written() -> None:
    assert Manifest.read(json.loads(json.dumps(MANIFEST.to_json()))) == MANIFEST
    assert NodeConfig.read(json.loads(CONFIG.dumps())) == CONFIG
    assert InstanceInfo.read(json.loads(json.dumps(SLOT.to_json()))) == SLOT
    layout = FleetLayout(1, "h100_80gb", ((Placement("3g.40gb", 0, 4),), ()))
    assert FleetLayout.read(json.loads(json.dumps(layout.to_json())), source="head") == layout
    assert layout.digest == FleetLayout.read(layout.to_json(), source="head").digest
    assert layout.digest != FleetLayout(1, "h100_80gb").digest
    state = FleetState(STATE_VERSION, {"n1": ("n1/0", "n1/1")}, {"n1/0": ("train",)})
    assert FleetState.read(json.loads(json.dumps(state.to_json()))) == state


def test_the_same_configuration_is_the_same_bytes_in_one_line() -> None:
    assert "\n" not in CONFIG.dumps()
    assert CONFIG.dumps() == NodeConfig.read(json.loads(CONFIG.dumps())).dumps()


def test_the_secret_of_a_manifest_is_not_shown() -> None:
    assert MANIFEST.secret not in repr(MANIFEST)


@pytest.mark.parametrize(
    ("endpoint", "text"), [(Endpoint("10.0.0.1", 1), "tls://10.0.0.1:1"), (Endpoint("::1", 1), "tls://[::1]:1")]
)
def test_endpoints(endpoint: Endpoint, text: str) -> None:
    assert str(endpoint) == text


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(document))
    *parents, last = path.split(".")
    at: Any = copy
    for key in parents:
        at = at[int(key) if key.isdigit() else key]
    at[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "version",
            2,
            r"manifest\.version: another version than can be read here \(given: 2\)\nThis skyinfra reads version 1",
        ),
        ("head.port", "8786", r"manifest\.head\.port: expected int, found str"),
        ("head.port", True, r"manifest\.head\.port: expected int, found bool"),
        ("nodes.1.zone", 3, r"manifest\.nodes\[1\]\.zone: expected str"),
        ("slots.0.kind", "gpus", r"manifest\.slots\[0\]\.kind: not one of the allowed values"),
        ("secrt", "x", r"manifest\.secrt: unknown field\nDid you mean secret"),
        ("nodes", {}, r"manifest\.nodes: expected list, found dict"),
    ],
)
def test_a_manifest_names_the_field(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidManifest, match=message):
        Manifest.read(changed(MANIFEST.to_json(), path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 9, r"node\.json\.version: another version than can be read here"),
        ("scheduler", "10.0.0.1", r"node\.json\.scheduler: expected HOST:PORT"),
        ("scheduler", ":8786", r"node\.json\.scheduler: expected HOST:PORT"),
        ("accelerator.count", 0, r"node\.json\.accelerator\.count: must be at least 1"),
        ("accelerator.count", 2, r"node\.json\.accelerator\.layouts: one layout per accelerator is needed"),
        ("accelerator.vendor", "acme", r"node\.json\.accelerator\.vendor: not one of the allowed values"),
        ("accelerator", None, r"node\.json\.cpu_slots: a node without accelerators needs at least one CPU slot"),
        ("env.A", 1, r"node\.json\.env\.A: expected str"),
    ],
)
def test_a_node_configuration_names_the_field(path: str, value: object, message: str) -> None:
    with pytest.raises(InvalidNodeConfig, match=message):
        NodeConfig.read(changed(json.loads(CONFIG.dumps()), path, value))


@pytest.mark.parametrize("document", [[MANIFEST.to_json()], changed(MANIFEST.to_json(), "secret", 12345678)])
def test_what_is_refused_is_not_shown_where_a_secret_may_be_in_it(document: object) -> None:
    with pytest.raises(InvalidManifest, match="expected") as caught:
        Manifest.read(document)
    assert MANIFEST.secret not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    document = MANIFEST.to_json()
    del document["provider"]
    with pytest.raises(InvalidManifest, match=r"manifest\.provider: missing field"):
        Manifest.read(document)


@pytest.mark.parametrize(("load", "error"), [(Manifest.load, InvalidManifest), (NodeConfig.load, InvalidNodeConfig)])
def test_files(tmp_path: Path, load: Any, error: type[Exception]) -> None:
    file = tmp_path / "document.json"
    with pytest.raises(error, match=r"document\.json: cannot be read: No such file"):
        load(file)
    for content in (b"{", b"\xff"):
        file.write_bytes(content)
        with pytest.raises(error, match=r"document\.json: is not JSON"):
            load(file)
    file.write_text("[]")
    with pytest.raises(error, match="expected dict, found list"):
        load(file)
    file.write_text(json.dumps(MANIFEST.to_json()) if load == Manifest.load else CONFIG.dumps())
    assert load(file) in (MANIFEST, CONFIG)


def test_a_task_asks_for_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(NotInTask, match="this is not a task"):
        instance_info()
    monkeypatch.setenv(VARIABLE, json.dumps(SLOT.to_json()))
    assert instance_info() == SLOT
    assert current_accelerator() == "H100"
    assert SLOT.accelerators == ("H100",)
