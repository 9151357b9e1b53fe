"""What clouds refuse: the words of Terraform's AWS provider become one clear error with the next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terraform_projects.driven import FAILED, NO_CAPACITY
from terraform_projects.synthesized import document_of, synthesized, write

import skyinfra as sky
from skyinfra.deploy.apply import carry_out, planned
from skyinfra.deploy.next_steps import next_steps
from skyinfra.providers import read
from skyinfra.terraform.cloud_errors import explain, refusals
from skyinfra.terraform.program import Terraform
from skyinfra.terraform.project import Project

WORKER = 'module.mig.aws_instance.worker["mig-1"]'
RUN = f"{FAILED}https response error StatusCode: 400, RequestID: r-1, api error "
NOT_IN_ZONE = (
    "Your requested instance type (t3.micro) is not supported in your requested Availability Zone (us-east-1e). Please "
    "retry your request by not specifying an Availability Zone or choosing us-east-1a, us-east-1b."
)
DENIED = (
    f"{RUN}UnauthorizedOperation: You are not authorized to perform this operation. User: "
    "arn:aws:iam::123456789012:user/x is not authorized to perform: ec2:RunInstances on resource: "
    "arn:aws:ec2:us-east-1:123456789012:instance/* because no identity-based policy allows the ec2:RunInstances "
    "action. Encoded authorization failure message: AbCdEf-123_xyz"
)
BY_POLICY = "with an explicit deny in a service control policy"
PROVIDER = 'provider["registry.terraform.io/hashicorp/aws"].us-east-1_research'
EXPIRED = (
    "Retrieving AWS account details: validating provider credentials: retrieving caller identity from STS: operation "
    "error STS: GetCallerIdentity, https response error StatusCode: 403, RequestID: r-1, api error ExpiredToken: The "
    "security token included in the request is expired"
)
NONE_FOUND = (
    "No valid credential sources found\nPlease see https://registry.terraform.io/providers/hashicorp/aws\nfor more "
    "information about providing credentials.\n\nError: failed to refresh cached credentials, no EC2 IMDS role found"
)
GROUP = (
    "waiting for Auto Scaling Group (x) capacity satisfied: scaling activity (y): Failed: Could not launch Spot "
    "Instances. MaxSpotInstanceCountExceeded - Max spot instance count exceeded. Launching EC2 instance failed."
)


@pytest.mark.parametrize(
    ("address", "text", "error", "words"),
    [
        (WORKER, NO_CAPACITY, sky.CapacityUnavailable, ["no capacity for it now", "us-east-1b"]),
        (WORKER, f"{RUN}VcpuLimitExceeded: You have requested more", sky.QuotaExceeded, ["quota of vCPUs", "You have"]),
        (
            WORKER,
            GROUP,
            sky.QuotaExceeded,
            ["(MaxSpotInstanceCountExceeded). It says: Max spot instance count exceeded."],
        ),
        (WORKER, f"{RUN}VpcLimitExceeded: The maximum", sky.QuotaExceeded, ["L-F678F1CE"]),
        (WORKER, f"{RUN}AddressLimitExceeded: The maximum", sky.QuotaExceeded, ["L-0263D0A3"]),
        (WORKER, f"{RUN}SpotMaxPriceTooLow: Your Spot request", sky.SpotPriceTooLow, ["above spot_max_price"]),
        (WORKER, f"{RUN}PendingVerification: Your request", sky.CloudRefused, ["validates the account", "4 hours"]),
        (WORKER, f"{RUN}Unsupported: {NOT_IN_ZONE}", sky.CapacityUnavailable, ["us-east-1e", "us-east-1b"]),
        (WORKER, f"{RUN}Unsupported: The requested configuration", sky.CloudRefused, ["instance-type-offerings"]),
        (WORKER, f"{RUN}DependencyViolation: resource sg-1 has", sky.CloudRefused, ["still uses it", "resource sg-1"]),
        (WORKER, f"{RUN}RequestLimitExceeded: Request limit exceeded.", sky.CloudThrottled, ["throttles", "Wait"]),
        (WORKER, f"{RUN}Throttling: Rate exceeded", sky.CloudThrottled, ["(Throttling)"]),
        (WORKER, DENIED, sky.CloudPermissionDenied, ["may not do it: ec2:RunInstances (UnauthorizedOperation)"]),
        (
            WORKER,
            DENIED.replace("because no identity-based policy allows the ec2:RunInstances action.", f"{BY_POLICY}."),
            sky.CloudPermissionDenied,
            ["a policy of the organization denies it: ec2:RunInstances", f"instance/* {BY_POLICY}", "another region"],
        ),
        (
            WORKER,
            f"{RUN}AuthFailure.ServiceLinkedRoleCreationNotPermitted: The provided credentials do not have permission "
            "to create the service-linked role for EC2 Spot Instances.",
            sky.CloudRefused,
            ["has had no spot instance yet", "create-service-linked-role", "It says: The provided credentials do not"],
        ),
        (
            WORKER,
            f"{RUN}OptInRequired: In order to use this AWS Marketplace product you need to accept terms and "
            "subscribe. To do so please visit https://aws.amazon.com/marketplace/pp?sku=x",
            sky.CloudRefused,
            ["a product of AWS Marketplace", "It says: In order to use this", "marketplace/pp?sku=x"],
        ),
        (WORKER, f"{RUN}OptInRequired: You are not", sky.CloudCredentialsRefused, ["has not enabled the region"]),
        (PROVIDER, f"{RUN}AuthFailure: AWS was not", sky.CloudCredentialsRefused, ["does not accept the credentials"]),
        (PROVIDER, EXPIRED, sky.CloudCredentialsRefused, ["have expired (ExpiredToken)", "aws sso login"]),
        (WORKER, f"{RUN}RequestExpired: Request has expired.", sky.CloudCredentialsRefused, ["have expired"]),
        (PROVIDER, NONE_FOUND, sky.CloudCredentialsRefused, ["no AWS credentials were found", "aws configure"]),
        (PROVIDER, f"{RUN}InvalidClientTokenId: x", sky.CloudCredentialsRefused, ["get-caller-identity"]),
        # The sentence begins where the text does: no letter of it is cut off.
        ("", "No valid credential sources found", sky.CloudCredentialsRefused, ["It says: No valid credential"]),
        (
            "",
            "error configuring S3 Backend: failed to refresh cached credentials, the SSO session has expired or is "
            "invalid: open x: no such file",
            sky.CloudCredentialsRefused,
            ["have expired"],
        ),
    ],
)
def test_known_refusals(address: str, text: str, error: type[sky.CloudRefused], words: list[str]) -> None:
    found = explain("apply", [(address, text)])
    assert type(found) is error and isinstance(found, sky.TerraformFailed)
    for word in words:
        assert word in str(found)
    assert "RequestID" not in str(found) and "Encoded" not in str(found)
    if address == WORKER:
        assert 'pool mig (aws_instance.worker["mig-1"])' in str(found)
    assert found.diagnostics == ((address, text),)


def test_a_beta_provider_says_what_its_cloud_says() -> None:
    address = 'provider["registry.terraform.io/hashicorp/google-beta"].us-east5'
    found = explain("apply", [(address, "googleapi: Error 403: The caller does not have permission, forbidden")])
    assert isinstance(found, sky.CloudPermissionDenied)


@pytest.mark.parametrize(
    "text",
    [
        "Reference to undeclared resource",
        "creating EC2 Instance: api error InvalidAMIID.NotFound: The image id does not exist",
        "creating EC2 Instance: api error AuthFailure.SomethingElse: words",
        # What a program on a node printed is not what a cloud said.
        "local-exec provisioner error\nError running command 'x': exit status 1. Output: AccessDenied: rate exceeded",
        "the variable Throttling is not declared",
    ],
)
def test_what_is_not_known_stays_as_it_is(text: str) -> None:
    assert explain("apply", [("module.mig.x.y", text)]) is None


@pytest.mark.parametrize(
    "text",
    [
        'Failed to read organization "x" at host app.terraform.io\n\nEncountered an unexpected error while reading the '
        "organization settings: unauthorized",
        "Failed to query available provider packages\nCould not retrieve the list of available versions for provider "
        "hashicorp/aws: could not query provider registry for registry.terraform.io/hashicorp/aws: the request failed "
        "after 2 attempts, please try again later: 429 Too Many Requests returned from registry.terraform.io",
        "Failed to download module\nbad response code: 403 Forbidden",
        "could not query provider registry: 401 Unauthorized returned from registry.terraform.io",
        "Failed to install provider: GET https://registry.example.com: 402 Payment Required",
        "Error while installing digitalocean/digitalocean v2.1.0: https://github.com: 429 ",
    ],
)
def test_what_is_of_no_resource_is_not_the_word_of_a_cloud(text: str) -> None:
    """Of HCP Terraform, of a registry, of a proxy: no token of a cloud mends it."""
    assert explain("init", [("", text)]) is None


def test_several_refusals_in_one_message() -> None:
    others = [(f'module.mig.aws_instance.worker["mig-{index}"]', NO_CAPACITY) for index in (1, 2, 3)]
    unknown = ("module.cpu.aws_instance.head", "creating EC2 Instance: api error InvalidAMIID.NotFound: no such image")
    quota = ("module.cpu.aws_instance.head", f"{RUN}VcpuLimitExceeded: You have requested more vCPU capacity")
    found = explain("apply", [*others, quota, unknown])
    assert isinstance(found, sky.CapacityUnavailable)
    lines = str(found).splitlines()
    assert lines[0] == "terraform apply failed"
    assert lines[1].startswith('pool mig (aws_instance.worker["mig-1"]) and 2 more: AWS has no capacity')
    assert lines[2].startswith("pool cpu (aws_instance.head): the account's quota")
    assert (
        lines[3]
        == "module.cpu.aws_instance.head: creating EC2 Instance: api error InvalidAMIID.NotFound: no such image"
    )
    assert len(lines) == 6  # and a hint for each cause


def pool(name: str = "mig", *, spot: bool = False, profile: str | None = None, nodes: int = 2) -> sky.ComputePool:
    aws = sky.AWS(profile=profile)
    return sky.ComputePool(name=name, nodes=nodes, provider=aws, accelerator="H100:8/3g.40gb", spot=spot)


def steps(tmp_path: Path, *pools: sky.ComputePool, of: tuple[str, str]) -> str:
    error = explain("apply", [of])
    assert error is not None
    return "\n".join(next_steps(synthesized(tmp_path, *pools), error))


def test_capacity_elsewhere(tmp_path: Path) -> None:
    text = steps(tmp_path, pool(), of=(WORKER, NO_CAPACITY))
    assert "zones that have it now: us-east-1b, us-east-1d" in text
    assert "p5.48xlarge is also offered in" in text and "us-west-2" in text
    text = steps(tmp_path, pool(), of=(WORKER, f"{RUN}Unsupported: {NOT_IN_ZONE}"))
    assert "zones that have it now: us-east-1a, us-east-1b" in text
    text = steps(tmp_path, pool(), of=(WORKER, NO_CAPACITY.replace("us-east-1b", "eusc-de-east-1b")))
    assert "zones that have it now: eusc-de-east-1b" in text
    small = sky.ComputePool(name="mig", provider=sky.AWS(), accelerator="L4")
    text = steps(tmp_path, small, of=("module.mig.aws_instance.head", f"{RUN}InsufficientInstanceCapacity: none"))
    assert "Other machines with L4 in us-east-1: g6.2xlarge (L4:1, $0.9776/h)" in text


def test_the_quota_with_the_command_that_asks_for_more(tmp_path: Path) -> None:
    text = f"{RUN}VcpuLimitExceeded: You have requested more"
    found = steps(tmp_path, pool(profile="research"), of=(WORKER, text))
    assert "pool mig alone needs 384 vCPUs of Running On-Demand P instances" in found
    assert "skyinfra preflight s" in found
    assert found.endswith(
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code L-417A185B "
        "--desired-value 384 --region us-east-1 --profile research"
    )
    assert "L-C4BD4855" in steps(tmp_path, pool(spot=True), of=("module.mig.aws_autoscaling_group.workers[0]", GROUP))


def test_the_profile_to_log_in_with(tmp_path: Path) -> None:
    assert "aws sso login --profile research" in steps(tmp_path, pool(profile="research"), of=(PROVIDER, EXPIRED))
    assert "--profile" not in steps(tmp_path, pool(), of=(PROVIDER, EXPIRED))


def refusing(folder: Path, text: str, *, when: str) -> Project:
    """A project whose apply or plan ends with *text* as an error of a resource of the pool mig."""
    synthesized(folder, pool())
    document = document_of("s", [pool()])
    condition = {
        "condition": '${terraform_data.first.id == ""}' if when == "apply" else "${false}",
        "error_message": text,
    }
    module = {"resource": {"terraform_data": {"head": {"lifecycle": [{"precondition": [condition]}]}}}}
    if when == "apply":
        module["resource"]["terraform_data"]["first"] = {}  # type: ignore[dict-item]
    write(
        folder,
        "s",
        {
            "//": document["//"],
            "module": {"mig": {"source": "./aws"}},
            "terraform": {"backend": {"local": {"path": str(folder / "state")}}},
        },
    )
    inside = folder / "cdktf.out" / "stacks" / "s" / "aws"
    inside.mkdir()
    (inside / "main.tf.json").write_text(json.dumps(module))
    return Project.find(folder)


def test_a_deploy_that_is_refused_says_that_the_state_is_intact(tmp_path: Path, terraform_program: str) -> None:
    stack = refusing(tmp_path, NO_CAPACITY, when="apply").stack("s")
    with pytest.raises(sky.CapacityUnavailable) as caught:
        carry_out(stack)
    message = str(caught.value)
    assert "AWS has no capacity for it now (InsufficientInstanceCapacity). It says: We currently" in message
    assert "Capacity comes and goes" in message and "The state is intact" in message
    assert message.endswith("run `skyinfra deploy s` again, or `skyinfra destroy s`.")
    # It says the truth: what was made before the refusal is there.
    state = json.loads((tmp_path / "state").read_text())
    assert ("module.mig", "first") in [(each["module"], each["name"]) for each in state["resources"]]


def test_a_plan_that_is_refused_changed_nothing(tmp_path: Path, terraform_program: str) -> None:
    stack = refusing(tmp_path, EXPIRED, when="plan").stack("s")
    with pytest.raises(sky.CloudCredentialsRefused, match=r"have expired(.|\n)*Nothing was changed\."), planned(stack):
        pass


def test_commands_that_speak_no_json(tmp_path: Path) -> None:
    program = tmp_path / "terraform"
    said = f"╷\n│ Error: {NONE_FOUND.splitlines()[0]}\n│ \n│ Please see the documentation\n╵"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'X'\n{said}\nX\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(sky.CloudCredentialsRefused, match="no AWS credentials were found"):
        Terraform(tmp_path, (str(program),)).outputs()


def test_every_cause_is_an_exception_and_has_a_next_step() -> None:
    for row in read("aws").errors:
        assert issubclass(getattr(sky, row["cause"]), sky.CloudRefused)
        assert row["hint"].endswith((".", "N"))
        for code in row["codes"]:
            (found,) = refusals([("", f"api error {code}: words")])
            assert (found.cause, found.code, found.words) == (row["cause"], code, "words")
