"""The life of a pool with the Terraform provider itself, where this machine has its program, and an API in memory.

The program is found in a mirror of providers (`SKYINFRA_PROVIDER_MIRROR`, made by `terraform providers mirror`).
Without one these tests are skipped, and nothing depends on them: what they found is data of the mock provider.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cloud_modules.cases import CLOUDS, access
from far_end.stand_in import far_end
from mock_provider.bed import PLATFORM, Bed, install, served
from provider_apis import azure, digitalocean, lambdalabs, oci, vultr
from provider_apis.server import Api
from terraform_projects.commands import skyinfra
from terraform_projects.mirrors import mirror_configuration, provider_mirror

from skyinfra import providers

# The longest that a declaration takes, and ends that a cut may leave.
STACK = "Longest_stack-of_all-" + "x" * 43
POOL = "a-pool-with-a-name-of-forty-letters-yes-"


@dataclass(frozen=True)
class Real:
    """A cloud: its API, and what a pool declares, with a layout and with another one, of machines of its own kind."""

    kind: str
    api: Callable[[], AbstractContextManager[Api]]
    machines: str
    layouts: tuple[str, str]
    spot: bool = False
    forgets: bool = True
    # What is left in the account, as its README says.
    stays: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return providers.read(self.kind).terraform["source"].removeprefix("registry.terraform.io/")


REAL = [
    Real("azure", azure.served, "virtualMachines", ("H100-NVL/3g.47gb", "H100-NVL/1g.12gb"), spot=True),
    Real("digitalocean", digitalocean.served, "droplets", ("H100/3g.40gb", "H100/1g.10gb"), stays=("tags",)),
    # Its provider takes a machine that is gone for a fault of the API: a plan fails.
    Real("lambda", lambdalabs.served, "instances", ("H100/3g.40gb", "H100/1g.10gb"), forgets=False),
    Real("oci", oci.served, "instances", ("A10", "A10"), spot=True),
    Real("vultr", vultr.served, "instances", ("L40S", "L40S")),
]


@pytest.fixture(params=REAL, ids=lambda each: each.kind)
def real(request: pytest.FixtureRequest) -> Real:
    found: Real = request.param
    return found


@pytest.fixture
def project(real: Real, tmp_path: Path) -> Iterator[tuple[Bed, Api]]:
    """A project whose provider is the real one; those beside it are of the mock bed."""
    mirror = provider_mirror(real.source)
    if mirror is None:
        pytest.skip(f"no mirror of providers here has {real.source}")
    with ExitStack() as stack:
        bed = stack.enter_context(served(tmp_path, "tls"))
        api = stack.enter_context(real.api())
        folder = tmp_path / "providers"
        install(folder, ("tls",))
        # Terraform follows links to the folder of a platform alone.
        for program in (mirror / "registry.terraform.io" / real.source).glob(f"*/{PLATFORM}"):
            link = folder / program.relative_to(mirror)
            link.parent.mkdir(parents=True)
            link.symlink_to(program)
        addresses = [f"registry.terraform.io/{each}" for each in (real.source, "hashicorp/tls")]
        bed.environment["TF_CLI_CONFIG_FILE"] = str(mirror_configuration(folder, folder, addresses))
        bed.environment |= far_end(tmp_path / "far-end", bed.environment["PATH"]) | api.environment
        yield bed, api


def declare(bed: Bed, real: Real, accelerator: str, nodes: int, **of_the_provider: str) -> None:
    given = {"accelerator": accelerator, "nodes": nodes, "spot": real.spot}
    given |= {"labels": {"team": "ml"}} if providers.read(real.kind).takes("labels") else {}
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
    access_fields = ", ".join(f"{name}={value!r}" for name, value in (access(real.kind) | of_the_provider).items())
    provider = f"sky.{providers.deployable()[real.kind].__name__}({access_fields})"
    program = "import skyinfra as sky\nfrom cdktf import App\n\napp = App()\n"
    program += (
        f"sky.FleetStack(app, {STACK!r}, pools=[sky.ComputePool(name={POOL!r}, {fields}, provider={provider})])\n"
    )
    (bed.folder / "main.py").write_text(program + "app.synth()\n")
    (bed.folder / "cdktf.json").write_text('{"language": "python", "app": "python main.py", "projectId": "x"}\n')


@pytest.mark.slow
def test_the_life_of_a_pool_with_the_provider_itself(real: Real, project: tuple[Bed, Api]) -> None:
    bed, api = project

    def run(*arguments: str) -> str:
        return skyinfra(bed.folder, *arguments, **bed.environment).stdout

    def changes() -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(run("plan", "--json"))["changes"]
        return found

    declare(bed, real, real.layouts[0], 3)
    run("deploy", "--auto-approve", "--no-wait")
    machines = set(api.kind(real.machines))
    assert len(machines) == 3
    # What the cloud answers is what was declared: a second plan is empty.
    assert changes() == []

    declare(bed, real, real.layouts[1], 3)
    assert not [
        each for each in changes() if re.search(r"\.node\[", each["address"]) and "hosts" not in each["address"]
    ]
    run("deploy", "--auto-approve", "--no-wait")
    assert set(api.kind(real.machines)) == machines and changes() == []

    # A worker less, and one that the cloud has lost.
    declare(bed, real, real.layouts[1], 2)
    run("deploy", "--auto-approve", "--no-wait")
    kept = set(api.kind(real.machines))
    assert len(kept) == 2 and kept < machines
    if real.forgets:
        api.lose(real.machines, max(kept))
        run("deploy", "--auto-approve", "--no-wait")
    assert len(api.kind(real.machines)) == 2 and changes() == []

    run("destroy", "--auto-approve")
    assert set(api.existing()) <= set(real.stays), api.existing()
    assert api.unanswered == []


@pytest.mark.slow
@pytest.mark.parametrize("real", [each for each in REAL if each.kind == "azure"], indirect=True, ids=["azure"])
def test_a_machine_that_failed_while_it_was_made_is_ended_by_the_next_deploy(
    real: Real, project: tuple[Bed, Api]
) -> None:
    """Azure takes a request for a machine, says later that there is no room for it, and keeps what failed."""
    bed, api = project
    message = "Allocation failed. We do not have sufficient capacity for the requested VM size in this region."
    api.failing[real.machines] = ("AllocationFailed", message)
    declare(bed, real, real.layouts[0], 1)
    refused = skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", check=False, **bed.environment)
    assert refused.returncode == 1 and "Azure has no such machine there now" in refused.stderr, refused.stderr
    failed = set(api.kind(real.machines))
    assert len(failed) == 1

    api.failing.clear()
    skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", **bed.environment)
    made = set(api.kind(real.machines))
    assert len(made) == 1 and made.isdisjoint(failed)
    skyinfra(bed.folder, "destroy", "--auto-approve", **bed.environment)
    assert api.existing() == {}


@pytest.mark.slow
@pytest.mark.parametrize("real", [each for each in REAL if each.kind == "azure"], indirect=True, ids=["azure"])
def test_machines_move_to_another_zone(real: Real, project: tuple[Bed, Api]) -> None:
    """Azure deletes no address that an interface has, and refuses it when the machines are gone."""
    bed, api = project
    for zone in ("1", "2"):
        declare(bed, real, real.layouts[0], 2, zone=zone)
        skyinfra(bed.folder, "deploy", "--auto-approve", "--no-wait", **bed.environment)
    assert {each["zones"][0] for each in api.kind(real.machines).values()} == {"2"}
    assert json.loads(skyinfra(bed.folder, "plan", "--json", **bed.environment).stdout)["changes"] == []
    skyinfra(bed.folder, "destroy", "--auto-approve", **bed.environment)
    assert api.existing() == {} and api.unanswered == []


def test_each_of_them_is_a_cloud_of_this_version() -> None:
    assert {each.kind for each in REAL} <= set(CLOUDS)
