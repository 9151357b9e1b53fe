"""`doctor` for the machine itself: disks, shared memory, clock, and NCCL's settings."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyinfra.errors import SkyinfraError, counted
from skyinfra.gpu.hardware import Hardware
from skyinfra.node import shares
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig

_GB = 10**9
_FREE_GB = 5.0
_SHM_GB = 1.0
# adjtimex(2): no time service keeps the clock.
_STA_UNSYNC = 0x0040
_CLOCK_FAR_US = 1_000_000


def checks(node: NodeConfig | None, directory: NodeDirectory | None, root: Path) -> Iterator[Finding]:
    """Yields the findings about the machine."""
    yield _disk("disk", directory.path if directory is not None else root)
    scratch = root / "mnt/scratch"
    if scratch.is_dir():
        yield _disk("disk: scratch", scratch)
    yield from _shared_memory(root)
    # A fleet on one machine alone has one clock, whoever keeps it.
    if node is None or node.provider not in ("local", "container"):
        yield _clock()
    yield from _threads(directory, root)
    yield from _nccl({**os.environ, **(node.env if node is not None else {})}, root)


def judged(what: str, fine: bool, found: str, wanted: str, to_do: str) -> Finding:
    """Returns a finding that is ok where it is *fine*, else wrong with *to_do*."""
    return Finding(what, "ok" if fine else "wrong", found, wanted, "" if fine else to_do)


def failed(what: str, error: SkyinfraError, wanted: str) -> Finding:
    """Returns the finding that looking at *what* raised *error*."""
    return Finding(what, "wrong", error.message, wanted, error.hint or "")


def layout(what: str, hardware: Hardware, wanted: str, todo: str, *, counted: bool = False) -> Finding:
    """Returns whether *hardware* has its desired layout; *counted*: with the number of steps to it."""
    try:
        steps = hardware.plan()
    except SkyinfraError as error:
        return failed(what, error, wanted)
    gpus = ", ".join(map(str, sorted({step.gpu for step in steps})))
    found = f"differs on GPU {gpus}" + (f": {len(steps)} steps to it" if counted else "")
    return judged(what, not steps, found if steps else "as wanted", wanted, todo)


def text_of(file: Path) -> str:
    """Returns the content of *file*; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _disk(what: str, path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    inodes = os.statvfs(path)
    found = f"{usage.free / _GB:.1f} of {usage.total / _GB:.0f} GB free at {path}"
    wanted = f"at least {_FREE_GB:g} GB, and 2 % of the files"
    if inodes.f_files and inodes.f_favail < 0.02 * inodes.f_files:
        return Finding(what, "wrong", f"{found}, but no more files", wanted, "Remove files that nobody needs.")
    todo = "Free some space, or give the node a larger disk (disk_gb)."
    return judged(what, usage.free >= _FREE_GB * _GB, found, wanted, todo)


def _threads(directory: NodeDirectory | None, root: Path) -> Iterator[Finding]:
    """Checks whether each slot has a share of the node's threads."""
    holder = directory.holder() if directory is not None else None
    if holder is None:
        return
    try:
        most = shares.divided(holder, root)
        found = f"{counted(len(most), 'slot')}, at most {min(most.values(), default=0)} each"
    except OSError as error:
        found = f"not divided among the slots: {error.strerror}"
    yield Finding("threads", "ok", found, "a share for each slot, where systemd allows it")


def _shared_memory(root: Path) -> Iterator[Finding]:
    """NCCL, and data loaders with processes, pass data through it; containers have 64 MB by default."""
    folder = root / "dev/shm"
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GB:.2f} of {usage.total / _GB:.2f} GB free"
    todo = "Remove what ended processes left there, or give the container more (`docker run --shm-size=16g`)."
    yield judged("shared memory", usage.free >= _SHM_GB * _GB, found, f"at least {_SHM_GB:g} GB", todo)


class _Timex(ctypes.Structure):
    """The first fields of struct timex of adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _clock() -> Finding:
    """TLS and the deadlines of clouds need the time; checkpoints of several nodes are ordered by it."""
    state = _Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = "kept by a time service"
    if libc.adjtimex(ctypes.byref(state)) < 0:
        return Finding("clock", "unknown", f"the kernel does not say: {os.strerror(ctypes.get_errno())}", wanted)
    if state.status & _STA_UNSYNC:
        todo = "`timedatectl set-ntp true`, or start chrony."
        return Finding("clock", "wrong", "nobody keeps it", wanted, todo)
    error = f"kept, within {state.maxerror / 1e6:.3f} s"
    near = state.maxerror <= _CLOCK_FAR_US
    todo = "`chronyc sources` shows whether servers answer."
    return judged("clock", near, error, wanted if near else f"{wanted}, within 1 s", todo)


def _nccl(environment: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """NCCL's settings that make it slow, or fail, on this machine."""
    settings = {**_of_file(root / "etc/nccl.conf"), **{k: v for k, v in environment.items() if k.startswith("NCCL_")}}
    fabric = sorted(entry.name for entry in (root / "sys/class/infiniband").glob("*"))
    shown = " ".join(f"{name}={value}" for name, value in sorted(settings.items()))
    what, wanted = "NCCL settings", "settings that this machine allows"
    todo = "Correct it in sky.Image(env={...}) or /etc/nccl.conf; NCCL_DEBUG=INFO shows what NCCL chooses."
    problems = list(_problems(settings, fabric))
    if (topology := settings.get("NCCL_TOPO_FILE")) and not (root / topology.lstrip("/")).is_file():
        problems.append("NCCL_TOPO_FILE names no file")
    yield from (Finding(what, "wrong", f"{text} ({shown})", wanted, todo) for text in problems)
    if settings and not problems:
        yield Finding(what, "ok", shown, wanted)
    if fabric:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        free = limit == resource.RLIM_INFINITY
        found = "no limit" if free else f"at most {limit / _GB:.3f} GB"
        todo = "Run it in the runner's unit, which has LimitMEMLOCK=infinity, or raise `ulimit -l`."
        yield judged("locked memory", free, found, "no limit, for RDMA", todo)


def _problems(settings: Mapping[str, str], fabric: list[str]) -> Iterator[str]:
    value = settings.get("NCCL_SOCKET_IFNAME", "")
    # Names are prefixes of interfaces; with = in front they are the whole names, with ^ those that are not used.
    names = value.removeprefix("=").split(",")
    there = [name for _, name in socket.if_nameindex()]
    matches = str.__eq__ if value.startswith("=") else str.startswith
    if value and value[0] != "^" and not any(matches(found, name) for name in names for found in there):
        yield f"NCCL_SOCKET_IFNAME names no interface of {', '.join(there)}"
    # Here too, with the port of a device behind a colon.
    asked = settings.get("NCCL_IB_HCA", "")
    devices = [name.partition(":")[0] for name in asked.removeprefix("=").split(",")]
    matches = str.__eq__ if asked.startswith("=") else str.startswith
    if asked and asked[0] != "^" and not any(matches(found, name) for name in devices for found in fabric):
        yield f"NCCL_IB_HCA={asked} names no device for RDMA: the machine has {', '.join(fabric) or 'none'}"
    if settings.get("NCCL_IB_DISABLE") == "1" and fabric:
        yield f"NCCL_IB_DISABLE=1, and there is {', '.join(fabric)}"
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if settings.get(name) == "1":
            yield f"{name}=1 takes the slow way between GPUs"


def _of_file(file: Path) -> dict[str, str]:
    pairs = (line.split("#")[0].partition("=") for line in text_of(file).splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip().startswith("NCCL_")}
