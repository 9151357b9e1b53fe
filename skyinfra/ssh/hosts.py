"""The nodes of fleets as hosts of ``ssh``, in a file of their own beside its configuration.

What stands in them comes from a manifest: ssh runs programs that its configuration names.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from skyinfra.errors import InvalidField, InvalidManifest, NotSupported
from skyinfra.protocol.manifest import Manifest
from skyinfra.ssh.ways import Way

_FILE = "skyinfra.config"
_HEAD = "# Written by `skyinfra ssh STACK/POOL --config`; what is changed here does not stay.\n"
_MARK = "#skyinfra "
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WORD = re.compile(r"[A-Za-z0-9_.:\[][A-Za-z0-9_.:@,\[\]+=-]*")
_PATH = re.compile(r'[^"\\\x00-\x1f\x7f]+')
_PROXY = re.compile(r"([A-Za-z0-9_.:/=-]|%p)+")


@dataclass(frozen=True)
class _Section:
    """The hosts of one fleet. origin: its project's folder, or its manifest."""

    fleet: str
    origin: str
    text: str

    @property
    def names(self) -> set[str]:
        return {line.split()[1] for line in self.text.splitlines() if line.startswith("Host ")}

    def __str__(self) -> str:
        return f"{_MARK}{json.dumps({'fleet': self.fleet, 'origin': self.origin})}\n{self.text}"


def file() -> Path:
    """Returns the file of the hosts, which the configuration of ssh includes."""
    return Path.home() / ".ssh" / _FILE


def write_hosts(origin: str, manifest: Manifest, ways: Mapping[str, Way | None], *, replace: bool) -> list[str]:
    """Writes the nodes of *manifest*, reached by *ways*, as hosts of ``ssh`` in place of those that the fleet had.

    Returns their names. origin: the project's folder, or the manifest. replace: takes names that another project has.
    Raises `InvalidField` where one has them, `InvalidManifest` for what cannot stand there, `NotSupported` where no
    node is reached.
    """
    reached = {name: way for name, way in ways.items() if way is not None}
    if not reached:
        raise NotSupported(
            "nothing answers at port 22 of its nodes",
            field=manifest.fleet,
            hint="Open it to your address (ssh_public_key and allow_cidrs), or use `skyinfra exec` and `skyinfra "
            "port-forward`, which need none.",
        )
    hosts = {f"{manifest.stack}-{manifest.pool}-{name}": _host(manifest, name, way) for name, way in reached.items()}
    new = _Section(manifest.fleet, origin, "".join(hosts.values()))
    at = file()
    with _changing(at.parent):
        kept = []
        for each in _sections(at):
            if (each.fleet, each.origin) == (new.fleet, new.origin):
                continue
            taken = sorted(each.names & new.names)
            if not taken:
                kept.append(each)
            elif Path(each.origin).exists() and not replace:
                raise InvalidField(
                    f"{each.fleet} of {each.origin} has hosts of these names",
                    field="--config",
                    given=taken[0],
                    hint=f"--replace takes them from it; another name of the stack, or of the pool, keeps both. {at} "
                    "has them.",
                )
        _replace(at, (_HEAD + "".join(map(str, [*kept, new]))).encode(), 0o600)
        _include(at.with_name("config"), at)
    return list(hosts)


def forget_hosts(folder: Path, stack: str) -> None:
    """Removes the hosts of *stack* of the project in *folder*. Raises `NotSupported` where that fails."""
    at = file()
    if not at.is_file():
        return
    with _changing(at.parent):
        found = _sections(at)
        kept = [each for each in found if each.origin != str(folder) or each.fleet.partition("/")[0] != stack]
        if kept != found:
            _replace(at, (_HEAD + "".join(map(str, kept))).encode(), 0o600)


def _host(manifest: Manifest, node: str, way: Way) -> str:
    """Returns the lines of one host. Raises `InvalidManifest`."""
    login = way.login
    given: list[tuple[str, object, re.Pattern[str]]] = [
        ("HostName", way.address, _WORD),
        ("User", login.user, _WORD),
        ("Port", login.port, _WORD),
        ("IdentityFile", login.key_file, _PATH),
        ("ProxyJump", login.via, _WORD),
    ]
    lines = [f"Host {_checked(_NAME, f'{manifest.stack}-{manifest.pool}-{node}', node)}"]
    for option, value, pattern in given:
        if value:
            text = _checked(pattern, str(value), node)
            lines.append(f'    {option} "{text}"' if pattern is _PATH else f"    {option} {text}")
    if way.proxy:
        lines.append(f"    ProxyCommand {shlex.join(_checked(_PROXY, word, node) for word in way.proxy)}")
    return "\n".join([*lines, "", ""])


def _checked(pattern: re.Pattern[str], text: str, node: str) -> str:
    if not pattern.fullmatch(text):
        raise InvalidManifest(
            "cannot stand in the configuration of ssh",
            field=f"manifest.nodes.{node}",
            given=text,
            hint="Names, addresses and users are letters, digits and `.:@_-` there.",
        )
    return text


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Holds *folder*, which is made where it is not there, for one process that writes into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise NotSupported(
            f"cannot be written: {error.strerror or error}", field=str(error.filename or folder)
        ) from None
    finally:
        os.close(handle)


def _sections(file: Path) -> list[_Section]:
    if not file.exists():
        return []
    found = []
    for part in f"\n{file.read_text(encoding='utf-8')}".split(f"\n{_MARK}")[1:]:
        mark, _, text = part.partition("\n")
        # One that somebody has changed is not kept.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            about = json.loads(mark)
            found.append(_Section(str(about["fleet"]), str(about["origin"]), text.rstrip("\n") + "\n\n"))
    return found


def _include(config: Path, file: Path) -> None:
    """Includes *file* at the top of *config*: below a host it would be that host's."""
    line = f'Include "{file}"'.encode()
    before = config.read_bytes() if config.exists() else b""
    if line not in before.splitlines():
        mode = config.stat().st_mode & 0o777 if config.exists() else 0o600
        _replace(config, line + b"\n" + before, mode)


def _replace(file: Path, data: bytes, mode: int) -> None:
    # Where it is a link, such as into a folder of dotfiles, the link stays.
    file = Path(os.path.realpath(file))
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
