"""`doctor` for the accelerators of AMD, AWS, Google and Intel: device files, driver, rights of the user, and tools."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from skyinfra.doctor import packages
from skyinfra.doctor.system import judged, layout, text_of
from skyinfra.gpu import inventory
from skyinfra.gpu.hardware import Hardware
from skyinfra.gpu.inventory import find_tool
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig, Vendor

_TOOL_S = 20.0


class _Kind(NamedTuple):
    """The way to examine the accelerators of one vendor.

    tool: a command that fails where something is wrong. version: a command that prints that of a tool. figures: the
    program from which `top` has what the slots use. besides: the files that tasks open besides those of the devices.
    """

    vendor: Vendor
    name: str
    module: str
    package: str
    tool: tuple[str, ...] = ()
    version: tuple[str, ...] = ()
    figures: str = ""
    besides: tuple[str, ...] = ()


_KINDS = (
    _Kind("amd", "AMD GPUs", "amdgpu", "torch", ("rocminfo",), ("amd-smi", "version"), besides=("dev/kfd",)),
    _Kind("aws", "Neuron devices", "neuron", "libneuronxla", ("neuron-ls", "--json-output"), figures="neuron-monitor"),
    _Kind("google", "TPU chips", "vfio_pci", "libtpu", besides=("dev/vfio/vfio",)),
    _Kind(
        "intel",
        "Gaudi cards",
        "habanalabs",
        "habana-torch-plugin",
        ("hl-smi", "-L"),
        ("hl-smi", "-v"),
        "hl-smi",
        ("dev/accel/accel_controlD[0-9]*", "dev/hl_controlD[0-9]*"),
    ),
)


def checks(node: NodeConfig | None, directory: NodeDirectory | None, path: list[str], root: Path) -> Iterator[Finding]:
    """Yields the findings; none of a vendor whose accelerators are neither declared nor present."""
    for kind in _KINDS:
        files, driver = inventory.device_files(kind.vendor, root)
        accelerator = node.accelerator if node is not None and not node.scheduler_only else None
        declared = accelerator is not None and accelerator.vendor == kind.vendor
        # A group of vfio may be of any device; without a declaration only libtpu says that it is a TPU.
        guess = kind.vendor != "google" or packages.installed("libtpu", path) is not None
        if not declared and (node is not None or not files or not guess):
            continue
        if node is not None and node.simulate:
            yield Finding("accelerators", "ok", f"simulated {kind.name}", "simulated, as declared")
            continue
        wanted = f"{accelerator.count} x {accelerator.name}" if accelerator is not None else "at least one"
        enough = len(files) == accelerator.count if accelerator is not None else bool(files)
        found = f"{len(files)} {kind.name}" if files else f"no {kind.name}"
        todo = f"Their files come with {driver}; is it installed, and the machine type as declared?"
        yield judged("accelerators", enough, found, wanted, todo)
        if files:
            yield from _details(kind, files, directory, path, root)
        if accelerator is not None and files and node is not None and directory is not None and kind.vendor == "amd":
            wanted = next((p.profile for each in accelerator.layouts for p in each), "as they are")
            todo = "`skyinfra-runner partition --config FILE` sets it, as root."
            yield layout("partition mode", Hardware(node, directory), wanted, todo)


def _details(
    kind: _Kind, files: list[Path], directory: NodeDirectory | None, path: list[str], root: Path
) -> Iterator[Finding]:
    opened = [*files, *(file for pattern in kind.besides for file in sorted(root.glob(pattern)))]
    user, closed = _closed(opened, directory)
    rights = f"may not be opened by {user}: {', '.join(map(str, closed))}" if closed else f"may be opened by {user}"
    todo = "Add the user of the runner to the groups of the files (`ls -l`), such as render or neuron."
    yield judged(f"{kind.name}: files", not closed, rights, "to be opened", todo)
    version = text_of(root / f"sys/module/{kind.module}/version")
    if kind.module != "vfio_pci":
        loaded = (root / f"sys/module/{kind.module}").is_dir()
        found = f"{kind.module} {version}".strip() if loaded else f"{kind.module} is not loaded"
        todo = f"`modprobe {kind.module}` loads it; `dmesg` says why it does not."
        yield judged(f"{kind.name}: driver", loaded, found, f"{kind.module} is loaded", todo)
    yield from _tools(kind)
    yield from _package(kind, path, root)


def _closed(files: Iterable[Path], directory: NodeDirectory | None) -> tuple[str, list[Path]]:
    """Returns the user of the tasks, and those of *files* that this user may not open.

    Root may open everything: where root looks, the user is the owner of the node's folder.
    """
    if os.geteuid() != 0 or directory is None:
        return "this user", [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    owner = directory.path.stat()
    try:
        entry = pwd.getpwuid(owner.st_uid)
        name, groups = entry.pw_name, os.getgrouplist(entry.pw_name, entry.pw_gid)
    except KeyError:
        name, groups = str(owner.st_uid), [owner.st_gid]

    def may(file: Path) -> bool:
        found = file.stat()
        shift = 6 if found.st_uid == owner.st_uid else 3 if found.st_gid in groups else 0
        return owner.st_uid == 0 or found.st_mode >> shift & 0o6 == 0o6

    return name, [file for file in files if not may(file)]


def _tools(kind: _Kind) -> Iterator[Finding]:
    """Runs the vendor's own tools, where they are installed."""
    if kind.tool and find_tool(kind.tool[0]) is not None:
        fine, printed = _run(kind.tool)
        found = "answers" if fine else printed
        todo = f"Run `{' '.join(kind.tool)}`; `dmesg` may say why."
        yield judged(f"{kind.name}: {kind.tool[0]}", fine, found, "exit code 0", todo)
    if kind.version and find_tool(kind.version[0]) is not None:
        fine, printed = _run(kind.version)
        yield Finding(f"{kind.name}: version of {kind.version[0]}", "ok" if fine else "unknown", printed, "any")
    if kind.figures and find_tool(kind.figures) is None:
        todo = "Install it: `skyinfra top` and the metrics have what the slots use from it."
        yield Finding(f"{kind.name}: {kind.figures}", "unknown", "not installed", "installed, for figures", todo)


def _run(command: tuple[str, ...]) -> tuple[bool, str]:
    """Returns whether *command* ended well, and the first line that it printed, or how it failed."""
    program = find_tool(command[0]) or command[0]
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, errors="replace", timeout=_TOOL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_TOOL_S:g} s"
    except OSError as error:
        return False, f"cannot be run: {error.strerror}"
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or [""]
        return False, f"exit code {done.returncode}: {last[0]}"
    first = done.stdout.strip().splitlines()[:1] or [""]
    return True, first[0].strip()


def _package(kind: _Kind, path: list[str], root: Path) -> Iterator[Finding]:
    """The Python package that tasks need, and for AMD the ROCm of torch."""
    package = packages.installed(kind.package, path)
    if package is None:
        return
    if kind.vendor != "amd":
        yield Finding(f"{kind.name}: {kind.package}", "ok", package.version, "any")
        return
    built = packages.torch_version(package, "hip")
    what, wanted, torch = "ROCm of torch", "a torch made for ROCm", f"torch {package.version}"
    if built is None:
        todo = "Install torch from the index of its ROCm builds."
        yield Finding(what, "wrong", f"{torch} is not made for ROCm", wanted, todo)
        return
    # The wheels bring ROCm's user space; only the kernel's part has to be new enough.
    system = re.match(r"\d+\.\d+", text_of(root / "opt/rocm/.info/version"))
    found = f"{torch} with ROCm {'.'.join(map(str, built))}" + (f", the machine has {system[0]}" if system else "")
    yield Finding(what, "ok", found, wanted)
