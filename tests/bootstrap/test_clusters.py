"""Pools as jobs of Slurm and as pods of Kubernetes: what their shells write, and what they cannot carry.

The golden files are compared in test_golden.py, and the schemas in test_kubernetes_schemas.py; Slurm runs the job in
tests/integration/test_slurm.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters.pools import POOLS, SECRET, WHEEL, certificate, declared, documents, stateful_set
from first_boots.runners import wheel

import skyinfra as sky
from skyinfra import NotSupported
from skyinfra.bootstrap import clusters
from skyinfra.protocol.manifest import Manifest
from skyinfra.protocol.nodeconfig import NodeConfig


def test_the_requests_are_what_the_slots_stand_on() -> None:
    def resources(name: str) -> Any:
        return stateful_set(declared(**POOLS[name]))["spec"]["template"]["spec"]["containers"][0].get("resources")

    assert resources("mixed") == {
        "requests": {"cpu": "4", "memory": "33Gi", "ephemeral-storage": "100Gi"},
        "limits": {"nvidia.com/mig-3g.40gb": 8, "nvidia.com/mig-2g.20gb": 8, "nvidia.com/mig-1g.10gb.me": 8},
    }
    assert resources("whole") == {"limits": {"nvidia.com/gpu": 1}}
    assert resources("cpu") == {"requests": {"cpu": "2"}}
    assert resources("simulated") is None


def options(**fields: Any) -> list[str]:
    text = clusters.render(declared(**fields), "sbatch", wheel=WHEEL)[1]
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_the_options_of_the_job_are_what_is_declared() -> None:
    common = ["output=skyinfra-%j.log", "open-mode=append", "signal=B:TERM@60"]
    of_job = ["job-name=lab-mig", "nodes=2", "ntasks-per-node=1"]
    gres = "gres=gpu:2g.20gb:8,gpu:1g.10gb+me:8,gpu:3g.40gb:8"
    mixed = ["cpus-per-task=4", "mem=33G", "tmp=100G", gres]
    assert options(**POOLS["mixed"]) == [*of_job, *mixed, *common]
    assert options(**POOLS["whole"])[3:-3] == ["gpus-per-node=1"]
    assert options(**POOLS["cpu"]) == [*of_job, "cpus-per-task=2", *common]
    assert options(**POOLS["simulated"]) == [*of_job, *common]


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes replaces variables in `env` and `args`: $(NAME) of a variable that there is, and $$ is a dollar."""
    return re.sub(r"\$\$|\$\(([^()]*)\)", lambda m: "$" if m[1] is None else variables.get(m[1], m[0]), text)


def test_pods_of_gpus_go_where_clouds_keep_others_off() -> None:
    def tolerations(name: str) -> Any:
        return stateful_set(declared(**POOLS[name]))["spec"]["template"]["spec"].get("tolerations")

    assert tolerations("mixed") == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert tolerations("cpu") is None


def test_a_file_says_what_several_kinds_of_devices_need() -> None:
    texts = {name: clusters.render(declared(**POOLS[name]), "kubernetes", wheel=WHEEL)[1] for name in POOLS}
    assert [name for name, text in texts.items() if "deviceListStrategy=cdi-cri" in text] == ["mixed"]


@pytest.mark.parametrize("name", POOLS)
def test_pods_write_what_was_declared(name: str, tmp_path: Path) -> None:
    """The shell of the pods runs here, with folders of the test."""
    pool = declared(**POOLS[name])
    script = stateful_set(pool)["spec"]["template"]["spec"]["initContainers"][0]["args"][0]
    (tmp_path / "secret").write_text(SECRET)
    for number in (0, 1):
        folder = tmp_path / str(number)
        runner = folder / "venv/bin/skyinfra-runner"
        runner.parent.mkdir(parents=True)
        runner.touch(mode=0o700)
        environment = {"POD": f"lab-mig-{number}", "NAMESPACE": "ml", "PATH": "/usr/bin:/bin"}
        own = (
            expanded(script, {**environment, "HOME": "/"})
            .replace("/var/lib/skyinfra", str(folder))
            .replace("/etc/skyinfra", str(tmp_path))
        )
        subprocess.run(["sh", "-euc", own], env=environment, check=True)
        config = NodeConfig.load(folder / "node.json")
        assert (config.node, config.head, config.given, config.grace_seconds) == (f"mig-{number}", not number, True, 45)
        assert config.scheduler == ("lab-mig-0.lab-mig-nodes:8786" if number else "0.0.0.0:8786")
        assert (config.env, config.accelerator) == (pool.node.env, pool.node.accelerator)
        assert sorted(path.name for path in folder.iterdir()) == (
            ["node.json", "venv"] if number else ["forwarded.json", "manifest.json", "node.json", "venv"]
        )
    inside, outside = (Manifest.load(tmp_path / "0" / file) for file in ("manifest.json", "forwarded.json"))
    assert (inside.head.address, outside.head.address, inside.head.port) == ("lab-mig.ml.svc", "127.0.0.1", 8786)
    assert (inside.secret, inside.slots, inside.fleet) == (SECRET, pool.slots, "lab/mig")
    assert [(node.name, node.id, node.head) for node in inside.nodes] == [
        ("mig-0", "lab-mig-0", True),
        ("mig-1", "lab-mig-1", False),
    ]
    assert (tmp_path / "0" / "manifest.json").stat().st_mode & 0o077 == 0


RUNNER = "skyinfra-0.1-py3-none-any.whl"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", clusters.CLUSTERS)
def test_a_package_that_a_runner_needs_is_held_to_its_hash(cluster: clusters.Cluster, tmp_path: Path) -> None:
    """The shell that installs runs here, with an index of its own: a folder with one package."""
    index = tmp_path / "index"
    needed = wheel(index, "greeted")
    sha256 = hashlib.sha256(needed.read_bytes()).hexdigest()
    text = clusters.render(declared(**POOLS["cpu"]), cluster, wheel=RUNNER)[1]
    if cluster == "sbatch":
        begins = text.index("venv=${SKYINFRA_VENV")
        script = text[text.index("fail() {") : text.index("folder=$SLURM")] + text[begins : text.index("# Slurm kills")]
        shell = ["bash", "-euo", "pipefail", "-c"]
    else:
        pods = next(each for each in yaml.safe_load_all(text) if each["kind"] == "StatefulSet")
        script = expanded(pods["spec"]["template"]["spec"]["initContainers"][0]["args"][0], {})
        script = script[: script.index("secret=$")]
        shell = ["sh", "-euc"]
    for kind, brought in {
        "right": f"greeted==0.1 --hash=sha256:{sha256}\n",
        "wrong": f"greeted==0.1 --hash=sha256:{'0' * 64}\n",
        # Of the wheels of before.
        "none": None,
    }.items():
        folder = tmp_path / kind
        assert wheel(folder, "skyinfra", brought, needs="greeted==0.1").name == RUNNER
        own = script.replace("/var/lib/skyinfra", str(folder)).replace("/opt/skyinfra", str(folder))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "SKYINFRA_PYTHON": sys.executable,
            "SLURM_SUBMIT_DIR": str(folder),
            "folder": str(folder),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(index),
        }
        done = subprocess.run([*shell, own], env=environment, capture_output=True, text=True, check=False)
        program = folder / "venv/bin/skyinfra-runner"
        if kind == "wrong":
            assert done.returncode and "DO NOT MATCH THE HASHES" in done.stderr, done.stderr
            assert not program.exists()
        else:
            assert done.returncode == 0, done.stderr
            assert subprocess.check_output([program], text=True) == "hello\n"
            assert list((folder / "venv").glob("lib/*/site-packages/greeting_of_greeted.py"))


def test_the_user_of_a_pod_has_a_name() -> None:
    """It has no account in the image: `getpass.getuser` and what asks it, as torch.compile does, would fail."""
    [container] = stateful_set(declared(**POOLS["cpu"]))["spec"]["template"]["spec"]["containers"]
    assert {"name": "USER", "value": "skyinfra"} in container["env"]


CLOUD = sky.AWS(zones=["us-east-1a"])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"accelerator": "H100:8", "layout": sky.mig.Follow(["7g.80gb"])}, "the node partitions none"),
    "packages of the system": (
        {"image": sky.Image(apt=["git", "curl"])},
        r"image\.apt: .*root.*\(given: 'git, curl'\)",
    ),
    "disks": (
        {
            "provider": CLOUD,
            "nodes": 1,
            "volumes": {"/data": sky.Volume(name="data", provider=CLOUD, id="vol-0123456789abcdef0")},
        },
        "volumes: disks are mounted by root",
    ),
    "buckets": ({"mounts": [sky.Mount("s3://my-bucket/data", "/data")]}, "mounts: buckets are mounted by root"),
    "another vendor": ({"accelerator": "Trainium1:16"}, r"accelerator: NVIDIA's GPUs alone.*\(given: 'Trainium1'\)"),
    "a certificate": (
        {"image": sky.Image(ca_certificate=certificate())},
        r"image\.ca_certificate: certificates are not carried",
    ),
}


def test_a_job_takes_a_runner_with_its_hash_as_it_is_declared() -> None:
    runner = f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}"
    pool = declared(image=sky.Image(runner=runner))
    assert pool.runner == runner and runner in clusters.render(pool, "sbatch", wheel=None)[1]


@pytest.mark.parametrize("provider", [sky.AWS(), sky.Container(), sky.SSH(hosts=["gpu1"])], ids=lambda p: p.kind)
def test_a_pool_of_any_form_of_user_data_is_carried(provider: Any) -> None:
    image = sky.Image(env={"QUOTE": "it's \"$X\" \n'y'"}, python="3.12", pip=["six"])
    pool = declared(provider=provider, image=image, accelerator="H100", nodes=1)
    assert (pool.node.env, pool.node.pip, pool.python) == (image.env, ("six",), "3.12")
    assert [slot.accelerator for slot in pool.slots] == ["H100"]


def test_the_command_of_python_has_no_patch_version() -> None:
    pool = declared(image=sky.Image(python="3.12.4"))
    assert "${SKYINFRA_PYTHON:-python3.12}" in clusters.render(pool, "sbatch", wheel=WHEEL)[1]
    assert {each["image"] for each in stateful_set(pool)["spec"]["template"]["spec"]["containers"]} == {
        "python:3.12.4-slim"
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cluster_cannot_carry_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(NotSupported, match=message):
        declared(**fields)


def test_names_of_pods_are_short() -> None:
    pool = declared(stack="A_" + "x" * 50, **POOLS["cpu"])
    with pytest.raises(NotSupported, match="50 characters at most"):
        documents(pool)
    assert documents(declared(stack="Lab_1", **POOLS["cpu"]))[0]["metadata"]["name"] == "lab-1-mig"
    # A service begins with a letter (RFC 1035), and no dash is last.
    assert documents(declared(stack="2026", **POOLS["cpu"]))[0]["metadata"]["name"] == "s2026-mig"
    odd = documents(declared(**{**POOLS["cpu"], "stack": "0_", "name": "a-"}))
    assert {each["metadata"]["name"] for each in odd if each["kind"] == "Service"} == {"s0--a", "s0--a-nodes"}


def test_the_script_of_the_job_is_one_for_bash(tmp_path: Path) -> None:
    for name, fields in POOLS.items():
        text = clusters.render(declared(**fields), "sbatch", wheel=WHEEL)[1]
        file = tmp_path / name
        file.write_text(text)
        subprocess.run(["bash", "-n", str(file)], check=True)
        # The program of the nodes stands in it as text.
        (tmp_path / "node").write_text(text.partition("<<'NODE'\n")[2].partition("\nNODE\n")[0])
        subprocess.run(["bash", "-n", str(tmp_path / "node")], check=True)


def test_what_a_person_has_set_on_the_login_node_hinders_no_job(tmp_path: Path) -> None:
    text = clusters.render(declared(**POOLS["cpu"]), "sbatch", wheel=WHEEL)[1]
    # pip refuses PIP_USER in an environment.
    assert text.index("\n  export PIP_USER=0\n") < text.index("-m pip install")
    # A TMPDIR that this node has not.
    [[begin, made]] = re.findall(r"^(.*unset TMPDIR)\n(node=\$\(mktemp .*)$", text, flags=re.MULTILINE)
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    for given in (str(tmp_path), str(tmp_path / "none"), ""):
        shell = ["bash", "-euc", f'{begin}\n{made}\necho "$node"; rmdir "$node"']
        done = subprocess.run(shell, env={**environment, "TMPDIR": given}, capture_output=True, text=True, check=True)
        assert Path(done.stdout.strip()).parent == (tmp_path if given == str(tmp_path) else Path("/tmp"))
