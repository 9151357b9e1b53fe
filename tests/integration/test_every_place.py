"""One stack with a pool at each place that this version deploys to, driven by the commands that people use."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from cloud_modules.cases import CASES, CLOUDS, access, of_project
from far_end.stand_in import far_end
from mock_provider.bed import Bed, served
from terraform_projects.commands import skyinfra

from skyinfra import providers

RUNNER = f'image=sky.Image(runner="https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={"a" * 64}")'


def _call(fields: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _over_ssh(kind: str) -> str:
    name = providers.deployable()[kind].__name__
    return f"{_call(CLOUDS[kind]['pool'])}, provider=sky.{name}({_call(access(kind))})"


# What a pool declares there. Whatever is deployable has to be here.
POOLS = {
    "aws": 'accelerator="H100:8/3g.40gb", provider=sky.AWS()',
    "gcp": 'accelerator="A100-40GB:2/3g.20gb", provider=sky.GCP(project="my-project")',
    "gcptpu": 'accelerator=sky.accelerators.TPUv5e_16(), provider=sky.GCP(project="my-project")',
    "runpod": f"accelerator=sky.accelerators.RTX_4090(count=2), provider=sky.RunPod(), {RUNNER}",
    "vastai": f"accelerator=sky.accelerators.RTX_4090(count=2), max_hourly_cost=2, provider=sky.VastAI(), {RUNNER}",
    **{kind: _over_ssh(kind) for kind in CLOUDS},
}
# No two machines have one address: where the types of machines have theirs.
ADDRESSES = {
    "azurerm_public_ip": "ip_address",
    "digitalocean_droplet": "ipv4_address",
    "lambdalabs_instance": "ip",
    "oci_core_instance": "public_ip",
    "verda_instance": "ip",
}
# Those have tests of their own, for real.
HERE = {"container", "local", "ssh"}
MOCKED = [case for case in CASES if case.mock]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    names = tuple(dict.fromkeys([*(name for case in MOCKED for name in case.mock), "google-beta"]))
    with ExitStack() as stack:
        bed = stack.enter_context(served(tmp_path, *names))
        bed.environment |= far_end(tmp_path / "far-end", bed.environment["PATH"])
        for case in MOCKED:
            case.answers(bed.world)
            if case.api is not None:
                bed.environment |= stack.enter_context(case.api(bed.world))[1]
        of_project(bed.world, "my-project")
        for number, (kind, address) in enumerate(ADDRESSES.items()):
            bed.world.answer(kind, {address: f"198.51.100.{number}{{n}}"})
        yield bed


def test_each_place_has_a_pool() -> None:
    assert set(POOLS) == set(providers.deployable()) - HERE


@pytest.mark.slow
def test_a_stack_with_a_pool_at_each_place(bed: Bed) -> None:
    pools = [f'sky.ComputePool(name="{kind}", {declared}),' for kind, declared in POOLS.items()]
    program = "import skyinfra as sky\nfrom cdktf import App\n\napp = App()\n"
    program += 'sky.FleetStack(app, "everywhere", pools=[\n' + textwrap.indent("\n".join(pools), "    ") + "\n])\n"
    (bed.folder / "main.py").write_text(program + "app.synth()\n")
    (bed.folder / "cdktf.json").write_text('{"language": "python", "app": "python main.py", "projectId": "x"}\n')

    project = bed.folder

    def run(*arguments: str) -> str:
        return skyinfra(project, *arguments, **bed.environment).stdout

    planned = run("plan")
    assert all(re.search(rf"^\S*{kind}\s.*\$\d", planned, re.MULTILINE) for kind in POOLS), planned
    run("deploy", "--auto-approve", "--no-wait")
    [stack] = json.loads((bed.folder / "cdktf.out" / "manifest.json").read_text())["stacks"].values()
    bed.folder = bed.folder / "cdktf.out" / stack["workingDirectory"]
    fleets = {kind: bed.output(f"fleet_{kind}") for kind in POOLS}
    assert {kind: fleet["provider"] for kind, fleet in fleets.items()} == {kind: kind for kind in POOLS}
    assert len({fleet["secret"] for fleet in fleets.values()}) == len(POOLS)
    assert json.loads(run("plan", "--json"))["changes"] == []
    run("destroy", "--auto-approve")
    assert bed.world.existing() == {}
