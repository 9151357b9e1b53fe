"""``skyinfra-runner partition``: brings GPUs to a layout by hand or at boot, compares them with it, exports it.
``skyinfra-runner adopt``: the declaration that keeps what others have partitioned.

The output is one JSON object a line: ``{"event": "partition", "phase": ..., "gpu": ...}`` for each change,
``standing`` for each partition in the end, ``differs`` for each step that ``--check`` and ``--dry-run`` do not execute,
``stays`` for each partition that ``--dry-run`` would leave.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyinfra.errors import InvalidField, SkyinfraError
from skyinfra.mig.manager import DEFAULT_CONFIG, Selected
from skyinfra.node.folder import NodeDirectory
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeConfig

# Root's folder on a cloud node; also where there is no node configuration, it remembers a reboot.
_ROOT = Path("/etc/skyinfra")


def add(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Adds the commands."""
    _add_adopt(commands)
    text = "bring the GPUs to a layout; changes nothing where it is there already"
    parser = commands.add_parser("partition", help=text, description=text)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="the layouts of a node configuration, node.json")
    source.add_argument("--layout", metavar="L", help='this layout, such as "3g.40gb+2g.20gb+1g.10gb*2"; "off": no MIG')
    source.add_argument("--export", action="store_true", help="print what exists, see --format; change nothing")
    text = "note how the GPUs are in FILE, unless that is there; change nothing"
    source.add_argument("--save", type=Path, metavar="FILE", help=text)
    source.add_argument("--restore", type=Path, metavar="FILE", help="bring the GPUs back to what --save noted")
    text = "with --export: mig-parted's YAML (the default), a file for NVIDIA's mig-manager with what makes it "
    text += "keep what exists, lines of Slurm's gres.conf with the device files of what "
    text += "exists, the configuration of NVIDIA's device plugin for Kubernetes, or the mig= of a declaration that "
    text += "keeps every partition where it is"
    forms = ("mig-parted", "mig-manager", "gres", "device-plugin", "declaration")
    parser.add_argument("--format", choices=forms, help=text)
    parser.add_argument("--gpu", metavar="LIST", help="with --layout: all (the default), or indices such as 0,3")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="change nothing; exit 1 where the layout differs")
    mode.add_argument("--dry-run", action="store_true", help="change nothing; print what would be done")
    parser.add_argument(
        "--force", action="store_true", help="end the processes on what has to go, and what a reboot ends"
    )
    parser.add_argument(
        "--reboot", action="store_true", help="reboot, once, where the driver needs it for the MIG mode"
    )
    text = "with --config: only where nothing was done since the machine started, or the runner has asked since"
    parser.add_argument("--on-request", action="store_true", help=text)
    parser.set_defaults(command=run, usage=parser.error)


def _add_adopt(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    text = "print the mig= of a declaration that keeps the GPUs as others have partitioned them; change nothing"
    parser = commands.add_parser("adopt", help=text, description=text)
    text = "not what exists, but what nvidia-mig-manager.service selects on this machine"
    parser.add_argument("--selected", action="store_true", help=text)
    text = "not what exists, but that configuration of mig-parted: the value of the node's label nvidia.com/mig.config"
    parser.add_argument("--label", metavar="LABEL", help=text)
    text = "with --label: the file of the configurations; else that of nvidia-mig-manager.service"
    parser.add_argument("--file", type=Path, metavar="FILE", help=text)
    parser.set_defaults(command=adopt, usage=parser.error, config=None)


def adopt(options: argparse.Namespace) -> int:
    """Prints the declaration; who else partitions this machine is told on stderr."""
    from skyinfra.gpu import exports
    from skyinfra.gpu.hardware import session
    from skyinfra.gpu.machine import SystemMachine
    from skyinfra.gpu.nvml import Nvml

    if options.file is not None and options.label is None:
        options.usage("--file needs --label, which names one of its configurations")
    if options.selected and options.label is not None:
        options.usage("--selected and --label name a configuration each")
    machine = SystemMachine()
    wanted = machine.selected_at_boot()
    if options.selected and wanted is None:
        raise InvalidField(
            "nvidia-mig-manager.service is not enabled on this machine, or selects nothing",
            field="--selected",
            hint="Name a configuration with --label and its file with --file, or leave them out for what exists.",
        )
    selection = None
    if options.selected or options.label is not None:
        file = options.file or (wanted.file if wanted is not None else DEFAULT_CONFIG)
        selection = Selected(str(file), options.label or (wanted.label if wanted is not None else ""))
    with session(Nvml()) as nvml:
        text, warnings = exports.declaration(nvml) if selection is None else exports.configured(nvml, selection)
    sys.stdout.write(text)
    for warning in [*warnings, *machine.others_that_partition()]:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def run(options: argparse.Namespace) -> int:
    """Executes the command."""
    if options.gpu is not None and options.layout is None:
        options.usage("--gpu needs --layout: everything else is about every GPU")
    if options.on_request and options.config is None:
        options.usage("--on-request needs --config")
    if options.format is not None and not options.export:
        options.usage("--format needs --export")
    if options.export and (options.check or options.dry_run):
        options.usage("--export changes nothing and compares nothing")
    if (options.check or options.dry_run) and (options.save or options.restore):
        options.usage("--check and --dry-run go with --config or --layout")
    if (options.force or options.reboot) and (options.export or options.save or options.check or options.dry_run):
        options.usage("--force and --reboot go with a change, and nothing is changed here")
    if options.export:
        return _export(options.format)
    with _orderly_end():
        try:
            if options.save or options.restore:
                return _snapshot(options)
            return _by_config(options) if options.layout is None else _by_layout(options)
        except SkyinfraError as error:
            # The stream of events ends with the error, which goes to the user as well.
            if not (options.check or options.dry_run):
                _print_event({"phase": "failed", "class": type(error).__name__, "message": str(error)})
            raise


def _by_config(options: argparse.Namespace) -> int:
    from skyinfra import desired
    from skyinfra.gpu import record
    from skyinfra.gpu.hardware import Hardware
    from skyinfra.node.node import file_sha256

    directory = directory_of(options.config)
    if options.on_request and not record.asked(directory):
        return 0
    # The head may have sent another layout since the configuration was written.
    found = desired.find(NodeConfig.load(options.config), file_sha256(options.config), directory)
    if found.refused is not None:
        print(f"warning: {found.refused}", file=sys.stderr)
    hardware = Hardware(found.config, directory)
    if options.check or options.dry_run:
        hardware.devices()
        return _print_steps(hardware.plan(), hardware.existing(), options)
    try:
        hardware.devices()
        partitions = hardware.partition(_print_event, force=options.force, reboot=options.reboot)
    except SkyinfraError as error:
        # Some GPUs may have their layout: the runner plans from what is recorded.
        record.write(directory, found.config, error, request=found.request, existing=hardware.usable())
        raise
    record.write(directory, found.config, partitions, request=found.request)
    _print_partitions(partitions)
    return 0


def _snapshot(options: argparse.Namespace) -> int:
    from skyinfra.gpu import snapshot
    from skyinfra.gpu.nvml import Nvml

    if options.save:
        snapshot.save(options.save, Nvml())
    else:
        snapshot.restore(options.restore, Nvml(), emit=_print_event, options=_apply_options(options))
    return 0


def _apply_options(options: argparse.Namespace) -> Any:
    from skyinfra.gpu.machine import SystemMachine
    from skyinfra.gpu.partitioner import ApplyOptions

    return ApplyOptions(
        machine=SystemMachine(),
        force=options.force,
        reboot=options.reboot,
        reboot_file=NodeDirectory(_ROOT).reboot_file,
    )


def _by_layout(options: argparse.Namespace) -> int:
    from skyinfra.gpu import actual, partitioner, targets
    from skyinfra.gpu.hardware import session
    from skyinfra.gpu.nvml import Nvml

    with session(Nvml()) as nvml:
        desired = targets.given(nvml, options.layout, "all" if options.gpu is None else options.gpu)
        if options.check or options.dry_run:
            there = [each for each in actual.existing(nvml) if each.gpu in desired]
            return _print_steps(partitioner.plan(nvml, desired), there, options)
        _print_partitions(partitioner.apply(nvml, desired, emit=_print_event, options=_apply_options(options)))
    return 0


def _export(form: str | None) -> int:
    from skyinfra.gpu import exports
    from skyinfra.gpu.hardware import session
    from skyinfra.gpu.nvml import Nvml

    forms = {
        "mig-manager": exports.mig_manager,
        "gres": exports.gres,
        "device-plugin": exports.device_plugin,
        "declaration": exports.declaration,
    }
    with session(Nvml()) as nvml:
        text, warnings = forms.get(form or "", exports.export)(nvml)
    sys.stdout.write(text)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _print_partitions(partitions: Sequence[Any]) -> None:
    for partition in partitions:
        _print({"event": "standing", **partition.to_json()})


def _print_steps(steps: Sequence[Any], existing: Sequence[Any], options: argparse.Namespace) -> int:
    for step in steps:
        _print({"event": "differs", **step.to_json()})
    for partition in existing if options.dry_run else ():
        if not any(step.undoes(partition) for step in steps):
            _print({"event": "stays", **partition.to_json()})
    return 1 if steps and options.check else 0


@contextlib.contextmanager
def _orderly_end() -> Iterator[None]:
    """Turns signals that end it into an exception in the body, so that services that were stopped are started again.

    SIGHUP comes when the terminal of a person closes, who may be logged in over a link that breaks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for each in numbers:  # one that is repeated, or follows the other, does not end that
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _print_event(event: dict[str, Any]) -> None:
    _print({"event": "partition", **event})


def _print(event: dict[str, Any]) -> None:
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        # The reader of the events has gone. Partitioning goes on: a half-made layout is worse than lost events.
        # All further output is discarded, also what is flushed at the end of the program.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
