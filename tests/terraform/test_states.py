"""States as Terraform gives them, whatever keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.terraform import blocks
from skyinfra.terraform.state import refuse_shared
from skyinfra.terraform.synthesized import SynthesizedStack

HTTP = {"version": 4, "serial": 1, "lineage": "a", "outputs": {}}


def test_the_resources_of_a_state_that_is_no_file_of_the_stack(tmp_path: Path, terraform_program: str) -> None:
    """Asked of Terraform, as for S3 and HCP Terraform: here it keeps a file, and the stack does not say so."""
    made = {"module": "module.train", "mode": "managed", "type": "terraform_data", "name": "secret"}
    provider = 'provider["terraform.io/builtin/terraform"]'
    instances = [{"schema_version": 0, "attributes": {"id": "a"}, "sensitive_attributes": []}]
    folder = tmp_path / "cdktf.out" / "stacks" / "fleet"
    folder.mkdir(parents=True)
    (folder / "terraform.tfstate").write_text(
        json.dumps({**HTTP, "resources": [{**made, "provider": provider, "instances": instances}]})
    )
    (folder / "main.tf.json").write_text("{}")
    stack = SynthesizedStack("fleet", folder, (), {}, backend={"cloud": {}})
    assert [each.address for each in stack.resources()] == ["module.train.terraform_data.secret"]


def test_a_folder_whose_mode_cannot_be_changed(tmp_path: Path) -> None:
    """As on a disk of Windows in WSL, where every folder has the mode 0777, those of blocks too."""
    home = r"as on a disk of Windows in WSL \(/mnt/c\), put the project below your home folder\."
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(sky.ProjectError, match=rf"chmod go-w {shared}\nWhere that changes nothing, {home}"):
        refuse_shared(shared)
    block = shared / ".skyinfra" / "session"
    with pytest.raises(sky.ProjectError, match=home):
        blocks.hold(block)
