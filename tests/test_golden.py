"""Golden files: the synthesized JSON and the user data, byte for byte. `make update-golden` writes them anew."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import ROOT
from terraform_projects.cdk import carried, read, synth

import skyinfra as sky
from skyinfra.bootstrap import clusters, runner_wheel, user_data
from skyinfra.compiler import compile_pool
from skyinfra.stack import describe, module_inputs
from skyinfra.terraform.expressions import file_of, literal

GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = ROOT / "modules" / "aws" / "examples" / "mig"

STACKS = {
    "quickstart": """
        sky.FleetStack(app, "quickstart", pools=[sky.ComputePool(
            name="mig", nodes=2, provider=sky.Local(simulate=True), accelerator=sky.accelerators.H100(mig="3g.40gb"))])
        app.synth()
        """,
    "mixed": """
        sky.FleetStack(app, "mixed", pools=[
            sky.ComputePool(name="mig", provider=sky.Local(simulate=True), labels={"team": "ml"},
                            accelerator="A100:2/3g.40gb+2g.20gb+1g.10gb*2", image=sky.Image(env={"A": "${x}"})),
            sky.ComputePool(name="cpu", nodes=3, provider=sky.Local(port=8786), worker=sky.Worker(concurrency=2)),
        ])
        app.synth()
        """,
}

AWS = {
    "aws-mig": {
        "accelerator": "H100:8/3g.40gb+2g.20gb+1g.10gb*2",
        "image": sky.Image(python="3.12", pip=["torch"], apt=["git"]),
    },
    "aws-spot": {"accelerator": "L4", "spot": True, "nodes": 4, "provider": sky.AWS(region="us-west-2")},
    "aws-trainium": {"accelerator": "Trainium1:16"},
}

STACKS["aws"] = """
    sky.FleetStack(app, "aws", pools=[
        sky.ComputePool(name="one", provider=sky.AWS(), accelerator="H100/3g.40gb", labels={"team": "ml"}),
        sky.ComputePool(name="mixed", nodes=2, provider=sky.AWS(efa=True),
                        accelerator="A100-40GB:8/3g.20gb+2g.10gb+1g.5gb*2", image=sky.Image(pip=["torch"])),
        sky.ComputePool(name="spot", nodes=3, spot=True, accelerator="L4",
                        provider=sky.AWS(region="us-west-2", profile="research", spot_max_price=0.5)),
        sky.ComputePool(name="chips", accelerator="Trainium1:16", provider=sky.AWS(
            subnet_ids=["subnet-1"], vpc_id="vpc-1", security_group_ids=["sg-1"], allow_cidrs=["10.0.0.0/8"],
            capacity=sky.CapacityReservation(id="cr-1"))),
        sky.ComputePool(name="share", accelerator="L4", provider=sky.AWS(
            instance_types=["g6f.xlarge"], ami="ami-0123456789abcdef0")),
    ])
    app.synth()
    """

STACKS["container"] = """
    sky.FleetStack(app, "container", pools=[
        sky.ComputePool(name="cpu", nodes=2, provider=sky.Container(), worker=sky.Worker(concurrency=2)),
        sky.ComputePool(name="gpu", nodes=2, accelerator="H100", labels={"team": "ml"}, provider=sky.Container(
            engine="docker", host="ssh://me@gpu1", image="registry.example.com/pytorch:2.9", port=9000,
            gpus=["GPU-1", "GPU-2"])),
    ])
    app.synth()
    """

STACKS["gcp"] = """
    sky.FleetStack(app, "gcp", pools=[
        sky.ComputePool(name="mig", nodes=2, accelerator="A100-40GB:2/3g.20gb+2g.10gb+1g.5gb*2", labels={"team": "ml"},
                        provider=sky.GCP(project="my-project", allow_cidrs=["203.0.113.0/24"])),
        sky.ComputePool(name="spot", nodes=3, spot=True, accelerator="L4", provider=sky.GCP(zones=["us-central1-b"])),
        sky.ComputePool(name="flex", accelerator="H100:2", provider=sky.GCP(flex_start_hours=12)),
    ])
    app.synth()
    """

STACKS["gcptpu"] = """
    sky.FleetStack(app, "gcptpu", pools=[
        sky.ComputePool(name="chips", nodes=2, accelerator="TPUv5e:4", provider=sky.GCP(project="my-project")),
        sky.ComputePool(name="hosts", accelerator=sky.accelerators.TPUv4_64(), plugins=[sky.plugins.jax()],
                        provider=sky.GCP(project="my-project", region="us-central2")),
    ])
    app.synth()
    """

STACKS["ssh"] = """
    sky.FleetStack(app, "ssh", pools=[sky.ComputePool(
        name="lab", nodes=2, accelerator="H100:8/3g.40gb", labels={"team": "ml"}, provider=sky.SSH(hosts=[
            "gpu1", sky.Host("10.0.0.7", user="ubuntu", port=2222, via="me@bastion", inside="192.168.0.7")]))])
    app.synth()
    """

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8VhYh0z0o0m7m4b3qvJqk0d1k2m3n4p5q6r7s8t9u0"

STACKS["digitalocean"] = f"""
    access = {{"ssh_public_key": "{KEY}", "allow_cidrs": ["203.0.113.7/32"]}}
    sky.FleetStack(app, "digitalocean", pools=[
        sky.ComputePool(name="one", nodes=2, provider=sky.DigitalOcean(**access), accelerator="H100/3g.40gb",
                        labels={{"team": "ml"}}),
        sky.ComputePool(name="amd", accelerator=sky.accelerators.MI300X(partition="DPX", memory_mode="NPS2"),
                        provider=sky.DigitalOcean(region="atl1", vpc_id="mine", registered_key=True, **access)),
    ])
    app.synth()
    """

STACKS["rdma"] = f"""
    access = {{"ssh_public_key": "{KEY}", "allow_cidrs": ["203.0.113.7/32"]}}
    sky.FleetStack(app, "rdma", pools=[
        sky.ComputePool(name="fabric", nodes=2, accelerator="H200:8", rdma=True, provider=sky.Nebius(
            project_id="project-e00abc", subnet_id="vpcsubnet-e00abc", region="eu-west1", **access)),
        sky.ComputePool(name="partition", nodes=2, accelerator="H100:8", rdma=True, provider=sky.Crusoe(**access),
                        image=sky.Image(env={{"NCCL_DEBUG": "INFO"}})),
        sky.ComputePool(name="cluster", nodes=2, accelerator="A100-40GB:8", rdma=True, provider=sky.OCI(
            compartment_id="ocid1.compartment.oc1..aaaa", availability_domain="Uocm:PHX-AD-1",
            image="ocid1.image.oc1.phx.aaaa", **access)),
    ])
    app.synth()
    """

STACKS["runpod"] = """
    RUNNER = "https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256=" + "a" * 64
    sky.FleetStack(app, "runpod", pools=[
        sky.ComputePool(name="gpu", nodes=2, accelerator=sky.accelerators.RTX_4090(count=2), disk_gb=100,
                        provider=sky.RunPod(data_centers=["EU-RO-1"], min_cuda="12.8"), image=sky.Image(runner=RUNNER)),
        sky.ComputePool(name="cpu", provider=sky.RunPod(), vcpus=8, image=sky.Image(runner=RUNNER)),
    ])
    app.synth()
    """

STACKS["vastai"] = """
    RUNNER = "https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256=" + "a" * 64
    sky.FleetStack(app, "vastai", pools=[
        sky.ComputePool(name="gpu", nodes=2, accelerator="RTX 4090:2", max_hourly_cost=1, vcpus=16, disk_gb=100,
                        provider=sky.VastAI(countries=["SE"], datacenter=True), image=sky.Image(runner=RUNNER)),
        sky.ComputePool(name="bid", accelerator="MI300X", provider=sky.VastAI(bid=1.5), spot=True,
                        image=sky.Image(runner=RUNNER)),
    ])
    app.synth()
    """

STACKS["verda"] = f"""
    sky.FleetStack(app, "verda", pools=[sky.ComputePool(
        name="spot", nodes=2, spot=True, accelerator="H100/3g.40gb", disk_gb=200,
        provider=sky.Verda(ssh_public_key="{KEY}"))])
    app.synth()
    """

STACKS["lambda"] = f"""
    sky.FleetStack(app, "lambda", pools=[sky.ComputePool(
        name="one", accelerator="GH200", provider=sky.Lambda(ssh_public_key="{KEY}", key_file="~/.ssh/fleet"))])
    app.synth()
    """

STACKS["nebius"] = f"""
    sky.FleetStack(app, "nebius", pools=[sky.ComputePool(
        name="mig", nodes=2, accelerator="H100:8/3g.40gb", provider=sky.Nebius(project_id="project-e00abc",
            subnet_id="vpcsubnet-e00abc", ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

STACKS["oci"] = f"""
    sky.FleetStack(app, "oci", pools=[sky.ComputePool(
        name="mig", nodes=2, accelerator="H100:8/3g.40gb", provider=sky.OCI(
            compartment_id="ocid1.compartment.oc1..aaaa", availability_domain="Uocm:PHX-AD-1", ssh_user="opc",
            image="ocid1.image.oc1.phx.aaaa", ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

STACKS["azure"] = f"""
    sky.FleetStack(app, "azure", pools=[sky.ComputePool(
        name="spot", nodes=2, spot=True, accelerator="A100/3g.40gb", labels={{"team": "ml"}},
        provider=sky.Azure(zone="1", ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

STACKS["vultr"] = f"""
    sky.FleetStack(app, "vultr", pools=[sky.ComputePool(name="one", nodes=2, accelerator="L40S",
        provider=sky.Vultr(ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

STACKS["crusoe"] = f"""
    sky.FleetStack(app, "crusoe", pools=[sky.ComputePool(name="mig", accelerator="H100:8/3g.40gb",
        provider=sky.Crusoe(project="mine", ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

STACKS["scaleway"] = f"""
    sky.FleetStack(app, "scaleway", pools=[sky.ComputePool(name="mig", nodes=2, accelerator="H100/3g.40gb",
        provider=sky.Scaleway(ssh_public_key="{KEY}", allow_cidrs=["203.0.113.7/32"]))])
    app.synth()
    """

POOLS = {
    "h100-mig": {"accelerator": "H100:8/3g.40gb+2g.20gb+1g.10gb*2"},
    "trainium": {"accelerator": "Trainium2:16"},
    "image": {"image": sky.Image(pip=["torch==2.9"], env={"K": 'quote " colon: $X é\n'}, run=["echo 'a b'"])},
}


CLUSTERS = {
    "mig": {
        "provider": sky.AWS(),
        "nodes": 2,
        "accelerator": "H100:8/3g.40gb+2g.20gb+1g.10gb+me",
        "vcpus": 96,
        "memory_gb": 512.5,
        "disk_gb": 200,
        "image": sky.Image(python="3.12", pip=["torch"], env={"PRICE": "$5 `a` \\n"}, index="http://index/simple"),
    },
    "cpu": {"provider": sky.Local(), "worker": sky.Worker(concurrency=4)},
    "whole": {"provider": sky.AWS(), "accelerator": "L4", "image": sky.Image(runner="skyinfra==0.1.0")},
}


def compare(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; `make update-golden` writes it anew"


def without_code(text: str) -> str:
    """User data without what is made of the code that compiles: the program of the first boot, and the runner."""
    place = r'("/opt/skyinfra/first_boot/\w+\.py"\n    permissions: "0644"\n    content: ).*'
    text = re.sub(place, r'\1"PROGRAM"', text)
    script = r"(put 0644 /opt/skyinfra/first_boot/\w+\.py ).*?'(?=\n(?:put|command|systemctl) )"
    return re.sub(script, r"\1PROGRAM", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def synthesized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one program that declares all the stacks: a Node and the imports take longer than a stack."""
    folder = tmp_path_factory.mktemp("golden")
    declared = (textwrap.dedent(each).replace("app.synth()\n", "") for each in STACKS.values())
    synth(folder, "".join([*declared, "app.synth()\n"]))
    return folder


@pytest.mark.xdist_group("golden")
@pytest.mark.parametrize("name", STACKS)
def test_synthesized_stacks(name: str, synthesized: Path) -> None:
    document = read(synthesized, name)
    for module in document["module"].values():
        # Before the name of the module stands a hash of the files.
        module["source"] = re.sub(r"(?<=^\./assets/modules/)\w+(?=/\w+$)", "HASH", module["source"])
        if "runner_file" in module:
            found = re.fullmatch(r"(\./assets/runner(-packed)?)/\w+/(.+)", module["runner_file"])
            assert found and found[3] == runner_wheel.wheel().name + (".bz2" if found[2] else "")
            module["runner_file"] = f"{found[1]}/HASH/WHEEL"
        if "versions" in module:  # what is installed here
            module["versions"] = "VERSIONS"
        for key in ("user_data_head", "user_data_worker"):
            if file_of(module[key]):
                module[key] = without_code(literal(carried(synthesized, name, module[key])))
        # The revision is kept as it is: where it changes, the fleets of the version before are replaced.
    compare(GOLDEN / f"{name}.tf.json", json.dumps(document, indent=2) + "\n")


@pytest.mark.parametrize("name", POOLS)
def test_user_data(name: str) -> None:
    pool = sky.ComputePool(provider=sky.Local(simulate=True), nodes=2, **POOLS[name])  # type: ignore[arg-type]
    data = user_data(compile_pool(pool, "golden"))
    compare(GOLDEN / f"{name}.user-data.txt", f"{data.head}\n{data.worker}\n")


@pytest.mark.parametrize("name", AWS)
def test_user_data_of_aws(name: str) -> None:
    fields = {"provider": sky.AWS(), "name": "pool", "nodes": 2, "image": sky.Image(python="3.12"), **AWS[name]}
    data = user_data(compile_pool(sky.ComputePool(**fields), "golden"))  # type: ignore[arg-type]
    for role, text in (("head", data.head), ("worker", data.worker)):
        compare(GOLDEN / f"{name}.{role}.yaml", without_code(text))


@pytest.mark.parametrize("cluster", clusters.CLUSTERS)
@pytest.mark.parametrize("name", CLUSTERS)
def test_pools_on_clusters(name: str, cluster: clusters.Cluster) -> None:
    deployment = compile_pool(sky.ComputePool(name=name, **CLUSTERS[name]), "golden")  # type: ignore[arg-type]
    pool = clusters.declared("golden", module_inputs(deployment, "."), describe(deployment), python="3.11")
    wheel = None if pool.runner else "skyinfra-0.1.0+0123456789ab-py3-none-any.whl"
    file, text = clusters.render(pool, cluster, wheel=wheel)
    compare(GOLDEN / file, text)


def test_the_rendered_example(tmp_path: Path) -> None:
    """What `skyinfra render` writes for people without Python is what the example carries."""
    shutil.copytree(EXAMPLE / "declaration", tmp_path / "declaration", ignore=shutil.ignore_patterns("cdktf.out"))
    command = [sys.executable, "-m", "skyinfra.cli", "render", "declaration", "--out", "rendered"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    rendered, kept = tmp_path / "rendered", EXAMPLE / "rendered"
    if os.environ.get("UPDATE_GOLDEN"):
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(rendered, kept)
    names = sorted(path.name for path in rendered.iterdir())
    assert names == [f"examples-mig.{part}" for part in ("head.yaml", "tfvars.json", "worker.yaml")]
    assert names == sorted(path.name for path in kept.iterdir())
    for name in names:
        texts = [_any_code((folder / name).read_text(encoding="utf-8")) for folder in (rendered, kept)]
        assert texts[0] == texts[1], f"{name} differs; `make update-golden` writes it anew"
    inputs = json.loads((kept / "examples-mig.tfvars.json").read_text(encoding="utf-8"))
    for role in ("head", "worker"):
        assert inputs[f"user_data_{role}"] == (kept / f"examples-mig.{role}.yaml").read_text(encoding="utf-8")


def _any_code(text: str) -> str:
    """Without the program of the first boot and what is installed here."""
    if text.startswith("{"):
        document = json.loads(text)
        document |= {key: _any_code(value) for key, value in document.items() if key.startswith("user_data_")}
        return json.dumps({**document, "versions": "VERSIONS"}, indent=2)
    return without_code(text)
