"""One node as its configuration file describes it, with the fleet secret."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from skyinfra.errors import InvalidNodeConfig
from skyinfra.protocol.manifest import MIN_SECRET_LENGTH
from skyinfra.protocol.nodeconfig import NodeConfig


@dataclass(frozen=True)
class Node:
    """A node configuration that was read from *path*. ``sha256`` is that of the bytes of the file, in hex."""

    config: NodeConfig
    path: Path
    sha256: str
    secret: str = field(repr=False)

    @property
    def name(self) -> str:
        """The node's name, unique in the fleet."""
        return self.config.node

    @classmethod
    def load(cls, path: Path) -> Node:
        """The node that the file *path* and its secret file describe. Raises `InvalidNodeConfig`."""
        # The digest comes first: should the file change in between, the digest is the old one and the caller who
        # changed it waits for the reload that it has asked for.
        digest = file_sha256(path)
        config = NodeConfig.load(path)
        return cls(config=config, path=path, sha256=digest, secret=_secret(path, config))


def file_sha256(path: Path) -> str:
    """SHA-256 of the file *path* in hex. Raises `InvalidNodeConfig`."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidNodeConfig(f"cannot be read: {error.strerror}", field=str(path)) from None


def _secret(path: Path, config: NodeConfig) -> str:
    # As a systemd unit hands it over where the file itself is root's.
    handed = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), "secret")
    file = handed if handed.exists() else path.parent / config.secret_file
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidNodeConfig(
            f"the fleet secret cannot be read: {error.strerror}",
            field=f"{path}.secret_file",
            given=str(file),
            hint="Terraform writes it there with the node configuration; apply the stack again.",
        ) from None
    if len(secret) < MIN_SECRET_LENGTH:
        raise InvalidNodeConfig(
            f"a fleet secret has at least {MIN_SECRET_LENGTH} characters; the file holds {len(secret)}",
            field=f"{path}.secret_file",
            hint="Terraform writes it there with the node configuration; apply the stack again.",
        )
    return secret
