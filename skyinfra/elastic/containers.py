"""Where nodes come from that are containers: as many stand ready as there may be, until the head wants them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from skyinfra.node.folder import message, replace_file

# In every container of the pool, on its host: `modules/container`.
FOLDER = Path("/opt/skyinfra/group")


class ContainerGroup:
    """The containers of *pool*, which share the *folder*.

    For each that is set up ``NODE`` there is the number of its starts that have ended, and in ``wanted/NODE`` the head
    leaves the number of those that it wants: the node runs, or starts, where that is more. A container that is killed
    goes on with the start that has not ended. ``bounds`` are the least and the most nodes.
    """

    boot_s: ClassVar[float] = 4.0
    patience_s: ClassVar[float] = 120.0

    def __init__(self, pool: str, folder: Path = FOLDER) -> None:
        self._prefix, self._folder = f"{pool}-", folder

    def bounds(self) -> tuple[int, int] | None:
        """Returns those of the last apply; None where none has left any."""
        try:
            least, most = map(int, message(self._folder / "bounds").split())
        except (OSError, ValueError):
            return None
        return least, most

    def held(self) -> int:
        """Returns how many nodes run or start."""
        return sum(wanted > ended for wanted, ended in self._starts().values())

    def ask(self, size: int) -> None:
        """Has as many nodes start as are missing. Raises `StateDirectoryError`."""
        starts = self._starts()
        idle = [name for name, (wanted, ended) in starts.items() if wanted <= ended]
        for name in idle[: max(0, size - len(starts) + len(idle))]:
            replace_file(self._folder / "wanted" / name, f"{starts[name][1] + 1}\n")

    def problem(self) -> str | None:
        """Returns None: containers that are there start."""
        return None

    def broken(self) -> list[str]:
        """Returns nothing: the output of a container says why its node does not start."""
        return []

    def made_of(self) -> str | None:
        """Returns None: a change makes head and containers anew."""
        return None

    def where(self) -> str:
        """Returns where one reads why nodes do not come."""
        return "why, say the logs of their containers"

    def tend(self) -> None:
        """Does nothing: a node that has ended waits in its container."""

    async def close(self) -> None:
        """Leaves the nodes alone."""

    def _starts(self) -> dict[str, tuple[int, int]]:
        """Returns how many starts of each node are wanted, and how many have ended, in the order of their numbers."""
        bounds = self.bounds()
        found = {}
        for path in self._folder.glob(f"{self._prefix}*"):
            number = path.name.removeprefix(self._prefix)
            # What a container leaves that was removed, as fewer are declared, is none.
            if number.isdigit() and (bounds is None or int(number) <= bounds[1]):
                found[int(number)] = path
        return {
            path.name: (_number(self._folder / "wanted" / path.name), _number(path))
            for _, path in sorted(found.items())
        }


def _number(file: Path) -> int:
    """Returns the number in *file*, 0 where it has none."""
    try:
        return max(0, int(message(file)))
    except (OSError, ValueError):
        return 0
