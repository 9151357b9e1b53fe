"""The end of a machine: the runner asks for it, and root, who may, does it.

``skyinfra-end.path``, and in a rented container its entry, starts root's part when the request is written. The tasks of
a node run as the user who writes it, so root looks at nothing of it, and ends the machine only where root's own copy of
the node configuration declares an end. A rented container, which its marketplace starts again when its programs end,
is deleted with the key that it has for itself alone.
"""

from __future__ import annotations

import datetime
import http
import json
import os
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Literal

from skyinfra.drain.notices import ec2_metadata
from skyinfra.errors import InvalidField, NodeFailed, StateDirectoryError
from skyinfra.first_boot import fetch
from skyinfra.node.folder import NodeDirectory, writing
from skyinfra.protocol.nodeconfig import NodeConfig

Form = Literal["machine", "container", "process"]

REQUEST = "end.request"
# A machine that is asked to end is gone within that long; then it is asked again.
PATIENCE_S = 60.0
_POWEROFF_S = 30.0
_AWS_S = 30.0
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_TerminateInstanceInAutoScalingGroup.html (2026-11-26)
_LEAVE = "TerminateInstanceInAutoScalingGroup"
_SYSTEMD = Path("/run/systemd/system")
# The address that takes DELETE of a rented container, and the key for it: `modules/market`. Root alone reads it.
_RENTED = Path("/opt/skyinfra/rented")
_DELETE_S = 30.0


def form(config: NodeConfig) -> Form:
    """Returns the form of the node: a machine, which root ends, or what ends with its runner."""
    if config.folder is None:
        return "process"
    return "machine" if _SYSTEMD.is_dir() or _RENTED.exists() else "container"


def ask(directory: NodeDirectory, why: str) -> None:
    """Asks root to end the machine. Raises `StateDirectoryError`."""
    file = directory.path / REQUEST
    try:
        directory.write(file, why + "\n")
        return
    except StateDirectoryError:
        if directory.lost:
            raise
    # A full disk takes an empty file all the same, and root reads nothing of it. One that is read-only takes none: root
    # looks at the runner's own folder as well, which is in memory.
    try:
        _make(file)
    except OSError:
        file = directory.said_by("runner") / REQUEST
        with writing(file):
            _make(file)


def _make(file: Path) -> None:
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o644))


def end(path: Path) -> None:
    """Shuts this machine down, or has it deleted. *path*: of root's copy of the node configuration.

    Raises `InvalidField` where that declares no end, `NodeFailed` where the system does not shut down, or the
    marketplace refuses.
    """
    config = NodeConfig.load(path)
    if not config.ends_itself:
        raise InvalidField("the node configuration declares no end of this machine", field=str(path))
    if _RENTED.exists():
        _delete(*_RENTED.read_text(encoding="utf-8").split(" ", 1))
        return
    if config.provider == "aws" and _leaves_group():
        return
    # Not `halt`, which leaves an instance running that costs as much as before.
    command = ["systemctl", "--no-block", "poweroff"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_POWEROFF_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeFailed(f"the machine cannot be shut down: {error}") from None
    if done.returncode:
        raise NodeFailed(f"the machine cannot be shut down: {done.stderr.strip() or done.returncode}")


def _delete(url: str, key: str) -> None:
    """Has the marketplace delete this container. Raises `NodeFailed`."""
    # Named: servers refuse the programs of whoever does not say what they are.
    headers = {"Authorization": f"Bearer {key}", "User-Agent": "skyinfra"}
    try:
        request = urllib.request.Request(url, method="DELETE", headers=headers)  # noqa: S310 - root's own file has it
        with urllib.request.urlopen(request, timeout=_DELETE_S):  # noqa: S310
            return
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.NOT_FOUND:  # it is asked again until it is gone
            return
        why = str(error)
    except OSError as error:
        why = str(error)
    except ValueError:  # its text may have the key
        why = "what this container was given is no address, or no key"
    raise NodeFailed(
        f"{urllib.parse.urlsplit(url).hostname} does not delete this container: {why}",
        hint="End it by hand, in the console of the marketplace or with `skyinfra destroy`: it costs on.",
    )


def _leaves_group() -> bool:
    """Has the Auto Scaling group of this instance terminate it, and start no other; returns False where it is of none.

    The module tags all instances with their roles, and those that it makes itself with the names of their nodes. Raises
    `NodeFailed`.
    """
    role, node = (ec2_metadata(f"tags/instance/skyinfra:{tag}", "whether it is of a group") for tag in ("role", "node"))
    if role is None or node is not None:
        return False
    try:
        _terminate(fetch.metadata("instance-id").strip())
    except (OSError, ValueError, LookupError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise NodeFailed(
            f"its group does not terminate this instance: {error}",
            hint="Its role needs autoscaling:TerminateInstanceInAutoScalingGroup on that group.",
        ) from None
    return True


def _terminate(instance: str) -> None:
    """Has the group end *instance*. A group that has its least number of nodes shrinks no more, and starts no other in
    place of one that it has besides."""
    try:
        ask_group(_LEAVE, InstanceId=instance, ShouldDecrementDesiredCapacity="true")
    except urllib.error.HTTPError as error:
        if error.code != http.HTTPStatus.BAD_REQUEST or b"min" not in error.read().lower():
            raise
        ask_group(_LEAVE, InstanceId=instance, ShouldDecrementDesiredCapacity="false")


def ask_group(action: str, **given: str) -> None:
    """Makes a request of Amazon EC2 Auto Scaling with the role of this instance. Raises OSError, ValueError,
    LookupError."""
    roles = "iam/security-credentials/"
    credentials = json.loads(fetch.metadata(roles + fetch.metadata(roles).split()[0]))
    region, domain = fetch.metadata("placement/region").strip(), fetch.metadata("services/domain").strip()
    asked = {"Action": action, "Version": "2011-01-01", **given}
    place = os.environ.get("AWS_ENDPOINT_URL_AUTO_SCALING", f"https://autoscaling.{region}.{domain}")
    url = f"{place.rstrip('/')}/?{urllib.parse.urlencode(sorted(asked.items()))}"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = fetch.signed(url, region=region, service="autoscaling", credentials=credentials, now=now)
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_AWS_S):  # noqa: S310
        pass
