"""The mock bed held against the real hashicorp/aws provider and moto: both do the same to modules/aws; its order."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from cloud_modules.cases import AWS, AWS_SUBNETS, aws_answers, root
from mock_provider.bed import Bed, served
from moto_aws.cloud import Cloud
from moto_aws.effects import POOLS, cases, effects, in_readme, table
from moto_aws.roots import Root

MINE: dict[str, Any] = {
    "subnet_ids": list(AWS_SUBNETS),
    "vpc_id": "vpc-mine",
    "security_group": "sg-mine",
    "profile": "mine",
}


class _Cloud:
    """The bed, for a root that asks for an environment."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed

    def environment(self) -> dict[str, str]:
        return self.bed.environment


@pytest.mark.slow
def test_the_bed_does_to_the_module_what_the_real_provider_does(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.whl" for name in ("first", "second")]
    for file in files:
        file.write_text(file.name)
    every = cases({**MINE, "file": os.fspath(files[1])})
    given = {"subnet_ids": MINE["subnet_ids"][:1], "runner_file": os.fspath(files[0])}
    networks: dict[str, dict[str, Any]] = {"own": {}, "given": given}

    def look(network: str) -> dict[int, dict[str, str]]:
        with served(tmp_path / network, "aws") as bed:
            aws_answers(bed.world)
            root = Root(bed.folder, cast(Cloud, _Cloud(bed)))
            base = {pool: {**each, **networks[network]} for pool, each in POOLS.items()}
            root.write(base)
            root.init()
            root.apply()
            assert effects(root) == {"pair": "nothing", "group": "nothing"}
            found = {}
            for number, case in enumerate(every):
                if case.network == network:
                    root.write({pool: {**each, **(case.inputs(pool) or {})} for pool, each in base.items()})
                    found[number] = effects(root)
            root.write(base)
            root.destroy()
            assert bed.world.existing() == {}
        return found

    with ThreadPoolExecutor() as executor:
        found = {number: each for made in executor.map(look, networks) for number, each in made.items()}
    made = table((case, found[number]) for number, case in enumerate(every))
    assert set(made.splitlines()) - set(in_readme().splitlines()) == set()


@pytest.mark.parametrize("spot", [False, True])
def test_nodes_may_write_to_their_buckets_until_they_have_ended(tmp_path: Path, spot: bool) -> None:
    with served(tmp_path, "aws") as bed:
        aws_answers(bed.world)
        bed.write(root(AWS, node_count=2, spot=spot, buckets=[{"bucket": "mine", "write": True}]), "main.tf.json")
        bed.run("init")
        bed.apply()
        for kind in ("aws_instance", "aws_autoscaling_group") if spot else ("aws_instance",):
            assert "module.train.aws_iam_role_policy.buckets" in bed.outliving(kind)


def test_a_head_in_a_local_zone_is_reached_in_its_region(tmp_path: Path) -> None:
    """The name of such a zone is more than its region and a letter: us-east-1-bos-1a."""
    zone = {"availability_zone": "us-east-1-bos-1a"}
    with served(tmp_path, "aws") as bed:
        aws_answers(bed.world)
        bed.world.answer("data.aws_subnet", {"vpc_id": "vpc-mine", **zone}, where={"id": "subnet-bos"})
        bed.world.answer("data.aws_ec2_instance_type_offerings", {"locations": list(zone.values())})
        bed.world.answer("aws_instance", zone)
        bed.write(root(AWS, subnet_ids=["subnet-bos"]), "main.tf.json")
        bed.run("init")
        bed.apply()
        assert bed.output("fleet")["via"]["region"] == "us-east-1"
