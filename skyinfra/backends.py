"""Where Terraform keeps the state of a stack."""

from __future__ import annotations

from skyinfra._declared import Declared


class LocalState(Declared):
    """The state in a file. path: counted from the project folder; None is ``terraform.STACK.tfstate``."""

    path: str | None = None


class S3(Declared):
    """The state in an S3 bucket. bucket, key, region, ...: as the Terraform backend takes them.

    Credentials come from the environment or a *profile*, never from the declaration.
    """

    bucket: str
    key: str
    region: str
    profile: str | None = None
    encrypt: bool = True
    use_lockfile: bool = True
    dynamodb_table: str | None = None


class HCPTerraform(Declared):
    """The state, and the runs where the workspace says so, in HCP Terraform.

    The token comes from Terraform's own CLI configuration (``terraform login``).
    """

    organization: str
    workspace: str
    hostname: str | None = None
    project: str | None = None


Backend = LocalState | S3 | HCPTerraform
