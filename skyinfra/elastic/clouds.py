"""Where nodes come from on a cloud: its machine group, or machines that stand ready there, by way of the head's watch.

The runner of the head leaves in a folder what it asks for, the watch, which alone reaches the credentials of the
machine, carries it out and says what became of it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from skyinfra.errors import InvalidNodeConfig, SkyinfraError
from skyinfra.first_boot import gce
from skyinfra.idle import ending
from skyinfra.idle.meter import since_boot
from skyinfra.node.folder import NodeDirectory, message, replace_file

# The tag of a head on AWS: the name of its group, the least and the most nodes.
TAG = "tags/instance/skyinfra:group"
# The attribute of a head on Google Cloud: JSON with the least and the most nodes, and its machines by their names.
ATTRIBUTE = "attributes/skyinfra-group"
# What the head asks for, and what became of that.
_REQUEST, _STATE = "group.request", "group.state"
# A watch that starts does nothing that was asked for before that: the fleet is another one since then.
_OLD_S = 120.0
_ASK_S = 30.0
_MACHINE = re.compile(r"projects/[a-z0-9.:-]+/zones/[a-z0-9-]+/instances/[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Said:
    """The answer of the watch of a head for its group: the bounds, the last size that was asked for, what failed, the
    name of the group, the names of the machines that stand ready, and the last request that was carried out."""

    least: int
    most: int
    asked: int | None = None
    problem: str | None = None
    group: str | None = None
    names: list[str] = field(default_factory=list)
    done: str | None = None


class _CloudGroup:
    """The exchange of a runner with its watch: what it asks for, what became of that. *directory*: of the head."""

    def __init__(self, directory: NodeDirectory) -> None:
        self._directory = directory
        self._request: str | None = None
        # The request whose problem was returned, and that.
        self._reported: tuple[str | None, str | None] | None = None

    def bounds(self) -> tuple[int, int] | None:
        """Returns those that the head was given; None where nothing was read yet."""
        said = self._said()
        return None if said is None else (said.least, said.most)

    def held(self) -> int | None:
        """Returns None: the place knows which machines there are."""
        return None

    def problem(self) -> str | None:
        """Returns what the cloud answered, once; None where it took what was asked for."""
        said = self._said()
        # Until the watch has carried it out, what it says is of the request before.
        if said is None or self._request not in (None, said.done) or self._reported == (said.done, said.problem):
            return None
        self._reported = said.done, said.problem
        return said.problem

    def broken(self) -> list[str]:
        """Returns nothing: machines that could not be set up tell the head."""
        return []

    def made_of(self) -> str | None:
        """Returns the name of the group, or of its machines: nodes that are made of something else have another one."""
        said = self._said()
        return None if said is None else said.group

    def tend(self) -> None:
        """Does nothing: the place knows its machines."""

    async def close(self) -> None:
        """Leaves the group alone."""

    def _leave(self, text: str) -> None:
        # The time makes it another request where the text is the one of before.
        asked = f"{text} {time.time():.0f}"
        replace_file(self._directory.said_by("runner") / _REQUEST, f"{asked}\n")
        self._request = asked

    def _said(self) -> Said | None:
        try:
            return Said(**json.loads(message(self._directory.said_by("watch") / _STATE)))
        except (OSError, ValueError, TypeError):
            return None


class AwsGroup(_CloudGroup):
    """The Auto Scaling group of the workers, which replaces a machine that is lost."""

    boot_s: ClassVar[float] = 240.0
    patience_s: ClassVar[float] = 900.0

    def where(self) -> str:
        """Returns the command that prints the cloud's reasons: the role of a machine may not ask for them."""
        name = self.made_of()
        command = f"aws autoscaling describe-scaling-activities --auto-scaling-group-name {name}"
        return "" if name is None else f"why, says `{command}`"

    def ask(self, size: int) -> None:
        """Leaves *size* for the watch. Raises `StateDirectoryError`."""
        self._leave(str(size))


class GoogleMachines(_CloudGroup):
    """Machines of Google Cloud that stand ready, stopped but for those that are nodes. *nodes*: the names of these.

    Terraform makes as many as there may be; a node that ends stops its machine, and its disk stays.
    """

    boot_s: ClassVar[float] = 60.0
    patience_s: ClassVar[float] = 300.0

    def __init__(self, directory: NodeDirectory, nodes: Callable[[], Collection[str]]) -> None:
        super().__init__(directory)
        self._nodes = nodes
        self._last: str | None = None
        # When each machine that is to become a node was asked for first.
        self._coming: dict[str, float] = {}

    def problem(self) -> str | None:
        """Returns what the cloud answered, once; what it refused is not waited for."""
        if (found := super().problem()) is not None:
            self._coming.clear()
        return found

    def tend(self) -> None:
        """Waits for no machine that has come."""
        there = self._nodes()
        self._coming = {name: at for name, at in self._coming.items() if name not in there}

    def where(self) -> str:
        """Returns the command that prints the cloud's reasons."""
        return "why, says `gcloud compute operations list --filter='operationType=start AND error:*'`"

    def ask(self, size: int) -> None:
        """Leaves the names of as many machines as are missing for the watch. Raises `StateDirectoryError`."""
        self.tend()
        said, there, now = self._said(), self._nodes(), since_boot()
        names = said.names if said is not None else []
        missing = max(0, size - len(there))
        waited = [name for name, at in self._coming.items() if name in names and now - at < self.patience_s]
        # Not the first ones again: a machine that is about to stop takes no order to start.
        after = names.index(self._last) + 1 if self._last in names else 0
        others = [name for name in (*names[after:], *names[:after]) if name not in there and name not in waited]
        # One that boots is asked for again, as a request may be lost.
        new = others[: max(0, missing - len(waited))]
        self._last = new[-1] if new else self._last
        self._coming = {name: self._coming[name] for name in waited[:missing]} | dict.fromkeys(new, now)
        if wanted := list(self._coming):
            self._leave(",".join(wanted))


# Carries out what a runner asks for, within the bounds: returns for how many nodes that was, and what failed; None for
# what is no request.
Carry = Callable[[Said, Mapping[str, str], str], tuple[int, str | None] | None]


class GroupWatch:
    """Asks the cloud of a head for what the runner of the head wants. *directory*: of the node."""

    def __init__(self, provider: str, directory: NodeDirectory) -> None:
        self._read, self._carry_out = _CLOUDS[provider]
        self._directory = directory
        self._done: str | None = None
        self._written: Said | None = None
        self._problem: str | None = None
        self._asked: int | None = None

    def check(self, text: str | None) -> None:
        """Does what is asked, once. *text*: of the tag or attribute of the head, None for one without a group.

        Raises `InvalidNodeConfig`, `StateDirectoryError`.
        """
        if text is None:
            return
        found, machines = self._read(text)
        try:
            request = message(self._directory.said_by("runner") / _REQUEST).strip()
        except (OSError, ValueError):
            request = ""
        wanted, _, at = request.partition(" ")
        if self._done is None:
            self._done = request if at.isdigit() and abs(time.time() - int(at[:12])) > _OLD_S else ""
        if request != self._done and (did := self._carry_out(found, machines, wanted)) is not None:
            self._asked, self._problem = did
            self._done = request
        said = Said(found.least, found.most, self._asked, self._problem, found.group, found.names, self._done)
        if said != self._written:
            self._directory.write(self._directory.said_by("watch") / _STATE, json.dumps(vars(said)) + "\n")
            self._written = said


def _read_tag(text: str) -> tuple[Said, dict[str, str]]:
    """Raises `InvalidNodeConfig`."""
    try:
        name, least, most = text.strip().rsplit(" ", 2)
        return Said(int(least), int(most), group=name), {}
    except ValueError:
        raise InvalidNodeConfig("expected a group, and its least and most nodes", field=TAG, given=text) from None


def _set_size(group: Said, _: Mapping[str, str], size: str) -> tuple[int, str | None] | None:
    """Asks the group for *size* nodes."""
    if not size.isdigit():
        return None
    # The least is the head's: while machines become no nodes, none is to be started in their place.
    number = min(int(size[:6]), group.most)
    try:
        ending.ask_group("SetDesiredCapacity", AutoScalingGroupName=str(group.group), DesiredCapacity=str(number))
    except urllib.error.HTTPError as error:
        error.close()
        may = " The role of the head needs autoscaling:SetDesiredCapacity on that group." if error.code == 403 else ""
        return number, f"the group {group.group} does not take the size {number}: {error}.{may}"
    except (OSError, ValueError, LookupError, SkyinfraError) as error:
        return number, f"the group {group.group} cannot be asked for {number} nodes: {error}"
    return number, None


def _read_attribute(text: str) -> tuple[Said, dict[str, str]]:
    """Raises `InvalidNodeConfig`."""
    try:
        found = json.loads(text)
        machines = {str(name): str(path) for name, path in found["machines"].items()}
        if not all(map(_MACHINE.fullmatch, machines.values())):
            raise ValueError
        group = ",".join(path.rpartition("/")[2] for path in machines.values())
        return Said(int(found["least"]), int(found["most"]), group=group, names=list(machines)), machines
    except (ValueError, LookupError, TypeError, AttributeError):
        why = "expected JSON with least, most and machines"
        raise InvalidNodeConfig(why, field=ATTRIBUTE, given=text[:200]) from None


def _start(group: Said, machines: Mapping[str, str], names: str) -> tuple[int, str | None] | None:
    """Has the machines of these *names* start; one that runs is left alone."""
    wanted = [name for name in names.split(",") if name in machines][: group.most]
    if not wanted:
        return None
    try:
        token = json.loads(gce.metadata("service-accounts/default/token"))["access_token"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return len(wanted), f"the head has no token to start {', '.join(wanted)} with: {error}"
    problems = [_refused(name, machines[name], token) for name in wanted]
    return len(wanted), next(filter(None, problems), None)


def _refused(name: str, path: str, token: str) -> str | None:
    """Has one machine start; returns why it does not."""
    try:
        _ask_google(f"{path}/start", token)
    except urllib.error.HTTPError as error:
        error.close()
        may = " The service account of the head needs compute.instances.start on it." if error.code == 403 else ""
        return f"Google Cloud does not start {name}: {error}.{may}"
    except (OSError, http.client.HTTPException) as error:
        return f"Google Cloud cannot be asked to start {name}: {error}"
    return None


def _ask_google(path: str, token: str) -> None:
    """Sends a request without content to Compute Engine. Raises OSError, `http.client.HTTPException`."""
    # The variable that Google's own tools have for another address.
    place = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE", "https://compute.googleapis.com/compute/v1/")
    headers = {"Authorization": f"Bearer {token}", "Content-Length": "0"}
    request = urllib.request.Request(place + path, method="POST", headers=headers)  # noqa: S310 - https, or by the variable
    with urllib.request.urlopen(request, timeout=_ASK_S):  # noqa: S310
        pass


_CLOUDS: dict[str, tuple[Callable[[str], tuple[Said, dict[str, str]]], Carry]] = {
    "aws": (_read_tag, _set_size),
    "gcp": (_read_attribute, _start),
}
