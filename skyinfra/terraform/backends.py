"""Backends: the places for the Terraform state of a stack."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from skyinfra.declared import Declaration
from skyinfra.errors import InvalidField

_HERE = ("localhost", "127.0.0.1", "::1")


class LocalState(Declaration):
    """The state in a file. path: counted from the project folder; None is ``terraform.STACK.tfstate``."""

    path: str | None = None


class S3(Declaration):
    """The state in an S3 bucket, or in a compatible store. The fields are those of the Terraform backend.

    bucket, key: where. region: of the bucket; stores that have none take any, such as ``us-east-1``. profile: of the
    credentials, which come from there or from the environment, never from the declaration. role_arn: a role to take on
    first. encrypt: by the store, with *kms_key_id* if given. use_lockfile: one run at a time, by a file beside the
    state, with Terraform 1.10 or later; dynamodb_table: by a table. endpoint: the address of a store that is not AWS's,
    such as ``https://minio.example.com``: buckets stand in the path of its addresses, nothing is asked that AWS alone
    answers. insecure: that the endpoint may be one of http: everybody on the way can read the state, and the fleet's
    secret.
    """

    bucket: str
    key: str
    region: str
    profile: str | None = None
    role_arn: str | None = None
    encrypt: bool = True
    kms_key_id: str | None = None
    use_lockfile: bool = True
    dynamodb_table: str | None = None
    endpoint: str | None = None
    insecure: bool = False

    @model_validator(mode="after")
    def _encrypted(self) -> S3:
        parts = urlsplit(self.endpoint or "")
        if parts.scheme == "http" and parts.hostname not in _HERE and not self.insecure:
            raise InvalidField(
                "would carry the state, with the fleet's secret, for everybody on the way to read",
                field="S3.endpoint",
                given=self.endpoint,
                hint="Use https, or say insecure=True where the way is yours alone.",
            )
        return self

    @field_validator("endpoint")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "")
        if value is not None and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username):
            # The given value is not repeated: it may hold credentials.
            raise InvalidField(
                "expected an address without credentials, such as https://minio.example.com", field="S3.endpoint"
            )
        return value

    def settings(self) -> dict[str, object]:
        """Returns the arguments of Terraform's backend."""
        plain = self.model_dump(exclude={"endpoint", "insecure", "role_arn"}, exclude_none=True)
        role = {"assume_role": {"role_arn": self.role_arn}} if self.role_arn else {}
        if self.endpoint is None:
            return {**plain, **role}
        # Each of them is asked of, or meant for, AWS alone.
        skipped = ("credentials_validation", "metadata_api_check", "region_validation", "requesting_account_id")
        return {
            **plain,
            **role,
            "endpoints": {"s3": self.endpoint},
            "use_path_style": True,
            "skip_s3_checksum": True,
            **{f"skip_{name}": True for name in skipped},
        }


class HCPTerraform(Declaration):
    """The state in HCP Terraform, with remote runs where the workspace has them.

    The token comes from Terraform's own CLI configuration (``terraform login``).
    """

    organization: str
    workspace: str
    hostname: str | None = None
    project: str | None = None


Backend = LocalState | S3 | HCPTerraform
