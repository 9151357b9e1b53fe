"""A node: its configuration and the fleet secret."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from skyinfra.errors import InvalidNodeConfig
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.manifest import MIN_SECRET_LENGTH
from skyinfra.protocol.nodeconfig import NodeConfig


@dataclass(frozen=True)
class Node:
    """The configuration from the file *path*. ``sha256``: of the bytes of the file, in hex."""

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
        """Reads the file *path* and its secret file. Raises `InvalidNodeConfig`."""
        # The digest comes first: where the file changes in between, the process that changed it waits for a reload.
        digest = file_sha256(path)
        config = NodeConfig.load(path)
        return cls(config=config, path=path, sha256=digest, secret=_secret(path, config))


def directory_of(path: Path) -> NodeDirectory:
    """Returns the directory of the node with the configuration file *path*: the ``folder`` that it names, else its own.

    That of a configuration that cannot be read is its own too: what loads the node says why.
    """
    own = path.absolute().parent
    try:
        folder = json.loads(path.read_text(encoding="utf-8")).get("folder")
    except (OSError, ValueError, AttributeError):
        folder = None
    return NodeDirectory(Path(folder), own) if isinstance(folder, str) else NodeDirectory(own)


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of the file *path* in hex. Raises `InvalidNodeConfig`."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidNodeConfig(f"cannot be read: {error.strerror}", field=str(path)) from None


def _secret(path: Path, config: NodeConfig) -> str:
    # systemd passes the secret where only root may read the file.
    handed = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nonexistent"), "secret")
    file = handed if handed.exists() else path.parent / config.secret_file
    field, hint = f"{path}.secret_file", "Terraform writes it there with the node configuration; apply the stack again."
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        text = f"the fleet secret cannot be read: {error.strerror}"
        raise InvalidNodeConfig(text, field=field, given=str(file), hint=hint) from None
    if len(secret) < MIN_SECRET_LENGTH:
        text = f"a fleet secret has at least {MIN_SECRET_LENGTH} characters; the file holds {len(secret)}"
        raise InvalidNodeConfig(text, field=field, hint=hint)
    return secret
