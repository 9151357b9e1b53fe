"""The table of modules/aws/README.md: each input, and what a change of it does to a fleet that runs.

`UPDATE_GOLDEN=1 pytest tests/integration/aws/test_aws_effects.py` writes it anew.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from moto_aws.cloud import Cloud
from moto_aws.effects import POOLS, README, ZONE, Case, cases, effects, in_readme, table, variables, write_readme
from moto_aws.roots import Root


def test_every_input_is_in_the_tables_of_the_readme() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", in_readme(), re.MULTILINE)) == set(variables())
    inputs = README.read_text().split("## Inputs")[1].split("## Outputs")[0]
    named = re.findall(
        r"`(\w+)`", "".join(line.split("|")[1] for line in inputs.splitlines() if line.startswith("| `"))
    )
    assert sorted(named) == sorted(variables())


# What test_aws_on_the_bed shows with the mock in a quarter of the time.
@pytest.mark.slow
@pytest.mark.long
def test_the_table_of_the_readme_is_what_plans_do(cloud: Cloud, tmp_path: Path) -> None:
    mine = _mine(cloud, tmp_path)
    given = {"subnet_ids": mine["subnet_ids"][:1], "runner_file": os.fspath(_file(tmp_path, "first"))}
    networks: dict[str, dict[str, Any]] = {"own": {}, "given": given}
    every = cases(mine)

    def look(network: str) -> dict[int, dict[str, str]]:
        root = Root(tmp_path / network, cloud)
        base = {pool: {**inputs, **networks[network]} for pool, inputs in POOLS.items()}
        root.write(base)
        root.init()
        root.apply()
        assert effects(root) == {"pair": "nothing", "group": "nothing"}
        return {number: _effects(root, base, case) for number, case in enumerate(every) if case.network == network}

    with ThreadPoolExecutor() as executor:
        found = {number: each for made in executor.map(look, networks) for number, each in made.items()}
    made = table((case, found[number]) for number, case in enumerate(every))
    if os.environ.get("UPDATE_GOLDEN"):
        write_readme(made)
    assert in_readme() == made


def _effects(root: Root, base: dict[str, dict[str, Any]], case: Case) -> dict[str, str]:
    root.write({pool: {**inputs, **(case.inputs(pool) or {})} for pool, inputs in base.items()})
    return effects(root)


def _file(folder: Path, name: str) -> Path:
    file = folder / f"{name}.whl"
    file.write_text(name)
    return file


def _mine(cloud: Cloud, folder: Path) -> dict[str, Any]:
    """What the caller has."""
    ec2, iam = cloud.client("ec2"), cloud.client("iam")
    subnets = {each["AvailabilityZone"]: each for each in ec2.describe_subnets()["Subnets"]}
    iam.create_instance_profile(InstanceProfileName="mine")
    iam.create_role(RoleName="mine", AssumeRolePolicyDocument="{}")
    iam.add_role_to_instance_profile(InstanceProfileName="mine", RoleName="mine")
    return {
        "subnet_ids": [subnets[ZONE]["SubnetId"], subnets["us-east-1c"]["SubnetId"]],
        "vpc_id": subnets[ZONE]["VpcId"],
        "security_group": ec2.create_security_group(GroupName="mine", Description="mine")["GroupId"],
        "profile": "mine",
        "file": os.fspath(_file(folder, "second")),
    }
