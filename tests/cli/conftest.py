from __future__ import annotations

import json
from pathlib import Path

import pytest
from terraform_projects import synthesized

import skyinfra as sky
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode, ManifestSlot


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose fleet is deployed, as far as cdktf.out and the state's file say."""
    pool = sky.ComputePool(
        name="mig", nodes=2, provider=sky.Local(simulate=True), accelerator="H100:1/3g.40gb+2g.20gb+1g.10gb*2"
    )
    backend = {"local": {"path": "../../../terraform.lab.tfstate"}}
    stack = synthesized.synthesized(tmp_path, pool, name="lab", backend=backend)
    manifest = Manifest(
        version=1,
        stack="lab",
        pool="mig",
        provider="local",
        head=Endpoint("127.0.0.1", 1),
        nodes=(ManifestNode("mig-0", "mig-0", "127.0.0.1", head=True), ManifestNode("mig-1", "mig-1", "127.0.0.1")),
        slots=(ManifestSlot(0, "partition", "H100", "3g.40gb", 0), ManifestSlot(1, "partition", "H100", "1g.10gb", 0)),
        secret="0123456789abcdef" * 4,
        simulated=True,
    )
    assert stack.state_file is not None
    resource = {"mode": "managed", "module": "module.mig", "type": "terraform_data", "name": "node", "instances": [{}]}
    state = {"version": 4, "outputs": {"fleet_mig": {"value": manifest.to_json()}}, "resources": [resource]}
    stack.state_file.write_text(json.dumps(state))
    return tmp_path
