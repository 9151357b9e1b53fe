"""modules/aws as published HCL: its examples, and the rules of a good module."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from moto_aws.cloud import Cloud
from moto_aws.roots import MODULE, SOURCE, Root, plan_changes

from skyinfra.protocol.nodeconfig import HEAD_PLACEHOLDER, NODE_PLACEHOLDER, NodeConfig

EXAMPLES = sorted(path for path in (MODULE / "examples").iterdir() if path.is_dir())
FILES = sorted(MODULE.glob("*.tf"))


def blocks(kind: str, text: str) -> dict[str, str]:
    """The blocks of one kind, by their (last) label."""
    found = re.findall(rf'^{kind} (?:"\w+" )?"(\w+)" \{{\n(.*?)^\}}', text, re.MULTILINE | re.DOTALL)
    return dict(found)


def test_the_hcl_keeps_the_rules() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    variables = blocks("variable", text)
    used = re.sub(r"^variable .*?^\}", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(variables) > 25
    for name in variables:
        assert re.search(rf"\bvar\.{name}\b", used), f"{name} is not used"
    for name, body in blocks("output", text).items():
        assert "description" in body, f"output {name} has no description"
    for name in (*variables, *blocks("output", text), *blocks("resource", text), *blocks("data", text)):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    # The provider, with its region and credentials, is the caller's.
    assert not re.search(r"^provider ", text, re.MULTILINE)
    assert not re.search(r"type\s+= (list|map|set|any)$", text, re.MULTILINE)
    versions = (MODULE / "versions.tf").read_text()
    assert 'source  = "registry.terraform.io/hashicorp/aws"' in versions and "required_version" in versions
    # Every variable with a value that can be wrong says what would be right.
    for name, body in variables.items():
        if "validation {" in body:
            assert body.count("error_message") == body.count("condition "), name


def test_everything_that_takes_tags_has_them() -> None:
    text = "\n".join(path.read_text() for path in FILES)
    without = {
        "aws_iam_role_policy",
        "aws_route",
        "aws_route_table_association",
        "aws_autoscaling_group",  # has them as blocks
        "aws_s3_bucket_policy",
        "aws_s3_bucket_public_access_block",
        "aws_s3_bucket_server_side_encryption_configuration",
        "aws_s3_object",  # takes ten at most
        "aws_volume_attachment",
        "terraform_data",
    }
    for kind, name, body in re.findall(r'^resource "(\w+)" "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL):
        assert kind in without or re.search(r"^  tags += (merge\()?\s*local\.(iam_)?tags", body, re.MULTILINE), (
            f"{kind}.{name}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_is_valid(example: Path, cloud: Cloud, tmp_path: Path) -> None:
    copy = tmp_path / "modules" / "aws"
    shutil.copytree(MODULE.parent, copy.parent, ignore=shutil.ignore_patterns(".terraform*", "*.tfstate*"))
    root = Root(copy / "examples" / example.name, cloud)
    if example.name == "mig":  # the others are planned below
        root.init()
        root.run("validate")
    text = (example / "main.tf").read_text()
    for name, body in {**blocks("variable", text), **blocks("output", text)}.items():
        assert "description" in body, name
    assert re.search(r'output "fleet" \{[^}]*sensitive\s+= true', text)


@pytest.mark.slow
def test_the_example_of_the_readme_is_valid(root: Root) -> None:
    example = re.search(r"```hcl\n(.*?)```", (MODULE / "README.md").read_text(), re.DOTALL)
    assert example
    root.folder.mkdir()
    for name in ("head.yaml", "worker.yaml"):
        (root.folder / name).write_text("#cloud-config\n")
    (root.folder / "main.tf").write_text(example.group(1).replace("./modules/aws", SOURCE))
    root.init()
    root.run("validate")


def test_the_small_user_data_of_an_example_are_what_a_runner_reads() -> None:
    document = yaml.safe_load((MODULE / "examples" / "single" / "head.yaml").read_text())
    files = {each["path"]: each for each in document["write_files"]}
    text = files["/etc/skyinfra/node.json"]["content"]
    assert NODE_PLACEHOLDER in text and HEAD_PLACEHOLDER not in text
    config = NodeConfig.read(json.loads(text))
    assert config.head and config.provider == "aws" and config.fleet == "examples/single"
    secret = files[f"/etc/skyinfra/{config.secret_file}"]
    assert secret["content"] == "@SKYINFRA_SECRET@" and secret["permissions"] == "0600"


@pytest.mark.slow
@pytest.mark.parametrize(("example", "nodes"), [("single", 1), ("mig", 2)])
def test_an_example_plans_as_it_stands(root: Root, cloud: Cloud, example: str, nodes: int) -> None:
    """With its own user data, or those that are rendered, it needs no more than it has."""
    copy = root.folder.parent / "modules" / "aws"
    shutil.copytree(MODULE.parent, copy.parent)
    root.folder = copy / "examples" / example
    root.init()
    planned = root.plan()
    created = plan_changes(planned)
    assert set(created.values()) == {"create"}
    assert sum(".aws_instance." in address for address in created) == nodes
