"""Credentials and permissions: the caller, the instance profile of the nodes, and the buckets that they mount."""

from __future__ import annotations

from skyinfra.preflight.api import ATTEMPTS, Api, CallFailed
from skyinfra.preflight.facts import Context
from skyinfra.preflight.pool_inputs import PoolInputs
from skyinfra.preflight.report import Finding, failed, passed, warned


def check_credentials(api: Api) -> Finding:
    """Checks the credentials. Every account may make this call, so a refusal concerns the credentials."""
    try:
        identity = api.ask("sts", "get_caller_identity")
    except CallFailed as error:
        return not_checked(error, api.region, api.profile, needed=True)
    arn = identity["Arn"]
    if arn.endswith(":root"):
        return warned(
            f"{arn}: the root user of the account", "Deploy as a role or a user that may do no more than it needs."
        )
    return passed(arn)


def check_account(api: Api, inputs: PoolInputs) -> Finding | None:
    """Returns the finding for credentials of an account that the provider block of the pool does not allow."""
    if not inputs.accounts:
        return None
    try:
        account = api.ask("sts", "get_caller_identity")["Account"]
    except CallFailed:
        return None  # `check_credentials` says it
    if account in inputs.accounts:
        return None
    return failed(
        f"the credentials are of the account {account}, and the pool is declared in {' or '.join(inputs.accounts)}",
        "Set AWS_PROFILE to credentials of that account, or declare their profile: sky.AWS(profile=...).",
    )


def not_checked(error: CallFailed, region: str, profile: str | None, *, needed: bool = False) -> Finding:
    """Returns the finding for a call that AWS did not answer; a failure where the others need its answer."""
    if error.kind == "credentials":
        return failed(*_login(error, profile, region))
    if error.kind == "denied":
        return warned(
            f"not checked: the credentials may not call {error.action}",
            f"Allow the IAM action {error.action}, which only reads.",
        )
    if error.kind == "throttled":
        return warned(f"not checked: AWS throttled {error.action}, {ATTEMPTS} times", "Run it again in a minute.")
    if error.kind == "unreachable":
        return (failed if needed else warned)(
            f"no answer to {error.action}: {error.words}",
            f"See whether AWS is reached from here, and {region} is right.",
        )
    return warned(f"not checked: {error.action}: {error.code}: {error.words}", "The other checks stand.")


def _login(error: CallFailed, profile: str | None, region: str) -> tuple[str, str]:
    """Returns what is wrong with the credentials, and how to renew them."""
    option = f" --profile {profile}" if profile else ""
    if error.code == "ProfileNotFound":
        return f"there is no profile {profile} in the AWS configuration", f"Make it with: aws configure sso{option}"
    if error.says:
        hint = error.hint.replace("aws sso login", f"aws sso login{option}").replace("REGION", region)
        return f"{error.says}: {error.words}", hint
    to_do = f"Log in with: aws sso login{option}, or set AWS_PROFILE, or make credentials with: aws configure{option}."
    return f"no valid credentials: {error.words}", to_do


def check_instance_profile(context: Context) -> list[Finding]:
    """Returns the declared instance profile, and whether it has a role."""
    name = context.inputs.iam_instance_profile
    if name is None:
        return []
    try:
        profile = context.api.ask("iam", "get_instance_profile", InstanceProfileName=name)["InstanceProfile"]
    except CallFailed as error:
        if error.code != "NoSuchEntity":
            raise
        return [failed(f"there is no instance profile {name}", "Declare one that exists, or none: the pool makes one.")]
    roles = [role["RoleName"] for role in profile["Roles"]]
    if not roles:
        to_do = f"aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE"
        return [failed(f"the instance profile {name} has no role", to_do)]
    if context.inputs.elastic:
        # Its policies may stand anywhere, and IAM simulates none for a group that is not there yet.
        needed = "autoscaling:SetDesiredCapacity and autoscaling:TerminateInstanceInAutoScalingGroup"
        groups = f"the Auto Scaling groups skyinfra-{context.inputs.pool}-*"
        found = f"{name}, with the role {roles[0]}; not checked: whether that may change the number of nodes"
        return [warned(found, f"See that it allows {needed} on {groups}.")]
    return [passed(f"{name}, with the role {roles[0]}")]


def check_buckets(context: Context) -> list[Finding]:
    """Returns whether each folder of a bucket that nodes mount is there, in their region, and has files to read."""
    inputs, found = context.inputs, []
    for bucket, prefix, write in dict.fromkeys(inputs.buckets):
        try:
            found.append(_bucket(context, bucket, f"{prefix}/" if prefix else "", write))
        except CallFailed as error:
            found.append(not_checked(error, inputs.region, inputs.profile))
    return found


def _bucket(context: Context, bucket: str, folder: str, write: bool) -> Finding:
    api, region, name = context.api, context.inputs.region, f"s3://{bucket}/{folder}"
    one = {"MaxItems": 1, "PageSize": 1}
    try:
        answer = api.ask("s3", "list_objects_v2", Bucket=bucket, Prefix=folder, PaginationConfig=one)
    except CallFailed as error:
        if error.code != "NoSuchBucket":
            raise
        return failed(f"there is no bucket {bucket}", "Make it, or name another one in mounts.")
    if not write and not answer.get("Contents"):
        hint = "Is the prefix written so? Nodes that mount it to read it do not start: upload what it is to have."
        return failed(f"{name} has no files", hint)
    there = api.ask("s3", "head_bucket", Bucket=bucket).get("BucketRegion", region)
    if there != region:
        hint = f"Declare the pool in {there}, or a copy of the bucket in {region}."
        return warned(f"{name} is in {there} and the nodes in {region}: AWS charges each GB between them", hint)
    return passed(f"{name} is there")
