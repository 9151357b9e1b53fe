"""FleetStack in cdktf and in cdktn: one class, the same JSON."""

from __future__ import annotations

from pathlib import Path

import pytest
from terraform_projects.cdk import carried, read, synth

import skyinfra as sky
from skyinfra.bootstrap import user_data
from skyinfra.compiler import compile_pool
from skyinfra.terraform.synthesized import read_stack

LIBRARIES = ("cdktf", "cdktn")
# What shares a stack runs in one process.
SHARED = pytest.mark.xdist_group("one_pool")


ONE_POOL = """
sky.FleetStack(app, "inference", pools=[
    sky.ComputePool(name="mig", nodes=2, provider=sky.Local(simulate=True), accelerator="H100/3g.40gb"),
    sky.ComputePool(name="cpu", provider=sky.Local(), labels={"team": "ml"}),
])
app.synth()
"""


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `ONE_POOL` was synthesized with cdktf."""
    folder = tmp_path_factory.mktemp("one-pool")
    synth(folder, ONE_POOL)
    return folder


@SHARED
def test_both_libraries_give_the_same_stack(one_pool: Path, tmp_path: Path) -> None:
    synth(tmp_path, ONE_POOL, "cdktn")
    documents = [read(folder, "inference") for folder in (one_pool, tmp_path)]
    for document in documents:
        document["//"]["metadata"].pop("version")
    assert documents[0] == documents[1]


@SHARED
def test_a_stack_is_the_same_wherever_its_checkout_lies(one_pool: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "some" / "where" / "else"
    synth(elsewhere, ONE_POOL)
    texts = [(f / "cdktf.out" / "stacks" / "inference" / "cdk.tf.json").read_bytes() for f in (one_pool, elsewhere)]
    assert texts[0] == texts[1]
    for folder in (one_pool, tmp_path):
        assert str(folder).encode() not in texts[0]


@SHARED
def test_the_module_travels_with_the_stack(one_pool: Path) -> None:
    module = read(one_pool, "inference")["module"]["mig"]
    assert module["source"].startswith("./assets/")
    asset = one_pool / "cdktf.out" / "stacks" / "inference" / module["source"]
    for name in ("main.tf", "variables.tf", "outputs.tf", "versions.tf", "node.sh"):
        assert (asset / name).is_file()
    assert read(one_pool, "inference")["module"]["cpu"]["source"] == module["source"]


@SHARED
def test_terraform_accepts_it(one_pool: Path, terraform_program: str) -> None:
    from skyinfra.terraform.program import Terraform

    terraform = Terraform(one_pool / "cdktf.out" / "stacks" / "inference")
    terraform.prepare()
    with terraform.planned(lambda event: None) as plan:
        assert ("create", 'module.mig.terraform_data.worker["mig-1"]') in plan.changes


def test_template_markers_in_a_declaration_stay_as_they_are(tmp_path: Path) -> None:
    program = """
    sky.FleetStack(app, "s", pools=[
        sky.ComputePool(provider=sky.Local(), image=sky.Image(env={"A": "${HOME} %{if} $$"}), labels={"l": "${x}"})])
    app.synth()
    """
    synth(tmp_path, program)
    module = read(tmp_path, "s")["module"]["pool"]
    assert "$${HOME} %%{if} $$" in module["user_data_head"]
    assert module["labels"] == {"l": "$${x}"}


def test_user_data_of_machines_are_files_of_the_stack(tmp_path: Path) -> None:
    """One file for each machine's, the same wherever the checkout lies, with every marker as it is declared."""
    program = """
    image = sky.Image(env={"A": "${HOME} %{if} $$ é"})
    sky.FleetStack(app, "s", pools=[
        sky.ComputePool(name=name, nodes=2, provider=sky.AWS(), accelerator="L4", image=image) for name in ("a", "b")])
    app.synth()
    """
    folders = (tmp_path / "here", tmp_path / "some" / "where" / "else")
    for folder in folders:
        synth(folder, program)
    modules = read(folders[0], "s")["module"]
    assert modules == read(folders[1], "s")["module"]
    image = sky.Image(env={"A": "${HOME} %{if} $$ é"})
    for name, module in modules.items():
        pool = sky.ComputePool(name=name, nodes=2, provider=sky.AWS(), accelerator="L4", image=image)
        data = user_data(compile_pool(pool, "s"))
        for folder in folders:
            assert carried(folder, "s", module["user_data_head"]) == data.head
            assert carried(folder, "s", module["user_data_worker"]) == data.worker
    assert len({modules[name][f"user_data_{role}"] for name in modules for role in ("head", "worker")}) == 4


def test_a_fleet_stack_can_be_subclassed_and_hold_other_constructs(tmp_path: Path) -> None:
    program = """
    from cdktf import TerraformOutput, TerraformStack

    class Mine(sky.FleetStack):
        def __init__(self, scope, id, nodes):
            super().__init__(scope, id, pools=[sky.ComputePool(provider=sky.Local(), nodes=nodes)])
            TerraformOutput(self, "extra", value="hello")

    made = Mine(app, "mine", nodes=3)
    assert isinstance(made, Mine) and isinstance(made, sky.FleetStack) and isinstance(made, TerraformStack)
    assert made.deployments[0].fleet == "mine/pool"
    app.synth()
    """
    synth(tmp_path, program)
    document = read(tmp_path, "mine")
    assert document["module"]["pool"]["node_count"] == 3
    assert document["output"]["extra"]["value"] == "hello"


@pytest.mark.parametrize("library", LIBRARIES)
def test_backends(tmp_path: Path, library: str) -> None:
    program = """
    sky.FleetStack(app, "local", backend=sky.LocalState(path="state/x.tfstate"))
    sky.FleetStack(app, "s3", backend=sky.S3(bucket="b", key="k", region="eu-west-1"))
    sky.FleetStack(app, "role", backend=sky.S3(
        bucket="b", key="k", region="eu-west-1", profile="p", role_arn="arn:aws:iam::1:role/x", kms_key_id="kms",
        use_lockfile=False, dynamodb_table="locks"))
    sky.FleetStack(app, "store", backend=sky.S3(
        bucket="b", key="k", region="eu-west-1", endpoint="https://minio.example.com:9000"))
    sky.FleetStack(app, "hcp", backend=sky.HCPTerraform(organization="acme", workspace="gpu"))
    app.synth()
    """
    synth(tmp_path, program, library)
    assert read(tmp_path, "local")["terraform"]["backend"]["local"]["path"] == "../../../state/x.tfstate"
    assert read(tmp_path, "local")["terraform"]["backend"]["local"]["workspace_dir"] == "../../../state/x.tfstate.d"
    assert read(tmp_path, "s3")["terraform"]["backend"]["s3"] == {
        "bucket": "b",
        "encrypt": True,
        "key": "k",
        "region": "eu-west-1",
        "use_lockfile": True,
    }
    assert read(tmp_path, "role")["terraform"]["backend"]["s3"] == {
        "assume_role": {"role_arn": "arn:aws:iam::1:role/x"},
        "bucket": "b",
        "dynamodb_table": "locks",
        "encrypt": True,
        "key": "k",
        "kms_key_id": "kms",
        "profile": "p",
        "region": "eu-west-1",
        "use_lockfile": False,
    }
    store = read(tmp_path, "store")["terraform"]["backend"]["s3"]
    assert (store["endpoints"], store["use_path_style"]) == ({"s3": "https://minio.example.com:9000"}, True)
    assert store["skip_credentials_validation"] and store["skip_requesting_account_id"]
    cloud = read(tmp_path, "hcp")["terraform"]["cloud"]
    assert cloud == {"organization": "acme", "workspaces": {"name": "gpu"}}
    found = {
        name: read_stack(name, tmp_path, tmp_path / "cdktf.out" / "stacks" / name / "cdk.tf.json")
        for name in ("store", "hcp")
    }
    assert [name for name, stack in found.items() if stack.runs_elsewhere] == ["hcp"]


def test_what_is_wrong_leaves_nothing_behind(tmp_path: Path) -> None:
    program = """
    pool = sky.ComputePool(provider=sky.Local())
    sky.FleetStack(app, "s", pools=[pool, pool])
    app.synth()
    """
    result = synth(tmp_path, program, check=False)
    assert result.returncode != 0
    assert "skyinfra.DuplicatePool: pools[1].name: " in result.stderr
    assert not list((tmp_path / "cdktf.out").rglob("*.json"))


def test_a_scope_of_neither_library() -> None:
    with pytest.raises(sky.InvalidField, match="App of cdktf or cdktn"):
        sky.FleetStack(object(), "s", pools=[])


def test_a_stack_name_that_cannot_be(tmp_path: Path) -> None:
    names = ["", "a b", "a/b", "-a", "x" * 65]
    program = f"""
    for name in {names!r}:
        try:
            sky.FleetStack(app, name)
        except sky.InvalidField as error:
            print(error.field, repr(error.given))
    """
    assert synth(tmp_path, program).stdout.splitlines() == [f"FleetStack.id {name!r}" for name in names]


@pytest.mark.parametrize("endpoint", ["minio.example.com", "https://", "ftp://a", "https://me:hush@minio.example.com"])
def test_an_endpoint_is_an_address_without_credentials(endpoint: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"S3\.endpoint: expected an address without credentials") as caught:
        sky.S3(bucket="b", key="k", region="r", endpoint=endpoint)
    assert "hush" not in str(caught.value)


def test_a_state_that_everybody_could_read_on_its_way_needs_a_word() -> None:
    given = {"bucket": "b", "key": "k", "region": "r"}
    with pytest.raises(sky.InvalidField, match=r"S3\.endpoint: would carry the state(.|\n)*insecure=True"):
        sky.S3(**given, endpoint="http://minio.example.com")
    for fine in (
        sky.S3(**given, endpoint="http://minio.example.com", insecure=True),
        sky.S3(**given, endpoint="http://127.0.0.1:9000"),
    ):
        assert "insecure" not in fine.settings()
