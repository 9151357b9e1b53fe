"""`doctor` for the accelerators of AMD, AWS, Google and Intel: device files, kernel module, and the user's rights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from skyinfra.doctor import packages
from skyinfra.doctor.system import judged, layout, text_of
from skyinfra.gpu import inventory
from skyinfra.gpu.hardware import Hardware
from skyinfra.node.folder import NodeDirectory
from skyinfra.protocol.findings import Finding
from skyinfra.protocol.nodeconfig import NodeConfig, Vendor

_TOOL_S = 20.0


class _Kind(NamedTuple):
    """The way to examine the accelerators of one vendor. *tool*: a command that fails where something is wrong."""

    vendor: Vendor
    name: str
    module: str
    tool: tuple[str, ...]
    package: str


_KINDS = (
    _Kind("amd", "AMD GPUs", "amdgpu", ("rocminfo",), "torch"),
    _Kind("aws", "Neuron devices", "neuron", ("neuron-ls", "--json-output"), "libneuronxla"),
    _Kind("google", "TPU chips", "vfio_pci", (), "libtpu"),
    _Kind("intel", "Gaudi cards", "habanalabs", ("hl-smi", "-L"), "habana-torch-plugin"),
)


def look(node: NodeConfig | None, directory: NodeDirectory | None, path: list[str], root: Path) -> Iterator[Finding]:
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
            yield from _details(kind, files, path, root)
        if accelerator is not None and files and node is not None and directory is not None and kind.vendor == "amd":
            wanted = next((p.profile for each in accelerator.layouts for p in each), "as they are")
            todo = "`skyinfra-runner partition --config FILE` sets it, as root."
            yield layout("partition mode", Hardware(node, directory), wanted, todo)


def _details(kind: _Kind, files: list[Path], path: list[str], root: Path) -> Iterator[Finding]:
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    rights = f"may not be opened: {', '.join(map(str, closed))}" if closed else "may be opened"
    todo = "Add the user of the runner to the groups of the files (`ls -l`), such as render or neuron."
    yield judged(f"{kind.name}: files", not closed, rights, "to be opened", todo)
    version = text_of(root / f"sys/module/{kind.module}/version")
    if kind.module != "vfio_pci":
        loaded = (root / f"sys/module/{kind.module}").is_dir()
        found = f"{kind.module} {version}".strip() if loaded else f"{kind.module} is not loaded"
        todo = f"`modprobe {kind.module}` loads it; `dmesg` says why it does not."
        yield judged(f"{kind.name}: driver", loaded, found, f"{kind.module} is loaded", todo)
    yield from _tool(kind)
    yield from _package(kind, path, root)


def _tool(kind: _Kind) -> Iterator[Finding]:
    """Runs the vendor's own tool, where it is installed."""
    program = shutil.which(kind.tool[0]) if kind.tool else None
    if program is None:
        return
    what, wanted = f"{kind.name}: {kind.tool[0]}", "exit code 0"
    try:
        done = subprocess.run(
            [program, *kind.tool[1:]], capture_output=True, text=True, errors="replace", timeout=_TOOL_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding(what, "wrong", f"no answer within {_TOOL_S:g} s", wanted, "`dmesg` may say why; reboot the node.")
        return
    tail = (done.stderr or done.stdout).strip().splitlines()[-1:] or [""]
    fine = done.returncode == 0
    found = "answers" if fine else f"exit code {done.returncode}: {tail[0]}"
    yield judged(what, fine, found, wanted, f"Run `{' '.join(kind.tool)}`.")


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
