"""``skyinfra-runner``: what runs on a node, and what an operator runs there."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import stat
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from skyinfra.doctor import cli as doctor_cli
from skyinfra.drain import cli as drain_cli
from skyinfra.errors import InvalidField, NotSupported, SkyinfraError
from skyinfra.errors.printable import printable
from skyinfra.errors.streams import guarded, write_output
from skyinfra.node import code, detach, watchdog
from skyinfra.node.folder import NodeDirectory, Status, appending
from skyinfra.node.node import directory_of
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.runner import partition_cli

# A service that could not start reports the reason for that long; then it ends, and its supervisor restarts it.
_REPORT_S = 15.0
_LOG_BYTES = 5 * 2**20
_LISTEN = "127.0.0.1:9835"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. 0 done, 1 failed, 2 wrong usage."""
    # Root runs it, and what it prints comes from files and processes of the tasks' user, too.
    with guarded():
        return _run(_parser().parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    try:
        return int(options.command(options))
    except SkyinfraError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - the person gets one line, the log all of it
        return _unknown(options.config, error)


def _unknown(config: Path | None, error: Exception) -> int:
    text = "".join(traceback.format_exception(error))
    log_hint = ""
    if config is not None:
        log = directory_of(config).log_file
        with contextlib.suppress(OSError), appending(log) as stream:
            stream.write(text)
            log_hint = f"; {log} has the details"
    print(printable(f"skyinfra-runner failed: {type(error).__name__}: {error}{log_hint}"), file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="skyinfra-runner", description="Partitions and serves one node of a fleet.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    boot = _command(commands, "boot", _boot, "partition, then serve; changes nothing where that is done already")
    boot.add_argument("--detach", action="store_true", help="serve in the background; return once every slot is ready")
    boot.add_argument("--restart", action="store_true", help="with --detach: start it again where it is killed")
    boot.add_argument("--wait", type=float, default=120, metavar="SECONDS", help="with --detach: for how long (120)")
    keep = _command(commands, "keep", _keep, "start a runner in the background again where it is killed")
    keep.add_argument("--wait", type=float, default=120, metavar="SECONDS", help="for it to be ready (120)")
    partition_cli.add(commands)
    _command(
        commands, "serve", partial(_run_service, partitions=False), "serve the node; its GPUs stand as declared already"
    )
    watch = _command(commands, "watch", _watch, "on the head: take over the layout that the provider's tag says")
    watch.add_argument("--once", action="store_true", help="look once")
    _command(commands, "end", _end, "as root: shut this machine down, where its node configuration declares an end")
    status = _command(commands, "status", _status, "what the node is doing")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument("--ready", action="store_true", help="exit with 1 unless every slot takes tasks")
    drain_cli.add(commands, _command)
    doctor_cli.add(commands)
    metrics = _command(commands, "metrics", _metrics, "serve what the slots use for Prometheus, or print it once")
    metrics.add_argument("--listen", default=_LISTEN, metavar="HOST:PORT", help=f"for GET /metrics ({_LISTEN})")
    metrics.add_argument("--once", action="store_true", help="print it, for a textfile collector")
    stop = _command(commands, "stop", _stop, "end the runner and its workers")
    stop.add_argument("--timeout", type=float, default=15, metavar="SECONDS", help="then it is killed (15)")
    text = "serve a node of this machine with this installation of skyinfra, in place of the one that started it"
    upgrade = _command(commands, "upgrade", _upgrade, text)
    upgrade.add_argument("--wait", type=float, default=120, metavar="SECONDS", help="for it to be ready (120)")
    upgrade.add_argument("--drain", type=float, metavar="SECONDS", help="only drain it; tasks may go on for that long")
    upgrade.add_argument("--cancel", action="store_true", help="only end the drain of an upgrade")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, function: object, text: str) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the node configuration, node.json")
    parser.set_defaults(command=function)
    return parser  # type: ignore[no-any-return]


def _boot(options: argparse.Namespace) -> int:
    if not options.detach:
        return _run_service(options, partitions=True)
    # The clock that counts sleep, the ends of child processes and their figures are Linux's. Read each time: a type
    # checker takes `sys.platform` for that of its own machine.
    if not sys.platform.startswith("linux"):
        raise NotSupported(
            "nodes of this machine need Linux",
            field="sky.Local",
            hint="Run it in a virtual machine or a container of Linux, or take machines: sky.SSH, a cloud. Clients "
            "work here.",
        )
    declared = NodeConfig.load(options.config).secrets
    for name in {*declared, *declared.values()}:
        os.environ.pop(name, None)  # whoever deploys a local node may have them: each client gives its own
    status = detach.boot(options.config, wait_s=options.wait)
    if options.restart:
        watchdog.ensure(options.config, wait_s=options.wait)
    print(printable(_text(status)))
    return 0


def _keep(options: argparse.Namespace) -> int:
    watchdog.keep(options.config, wait_s=options.wait)
    return 0


def _run_service(options: argparse.Namespace, *, partitions: bool) -> int:
    # A configuration that changes before the service listens to SIGHUP is read by its start.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format=drain_cli.LOG_FORMAT, stream=sys.stderr)
    file = options.config.absolute()
    # What cannot be read does not say where the node's directory is.
    NodeConfig.load(file)
    directory = directory_of(file)
    supervised = "NOTIFY_SOCKET" in os.environ
    try:
        with directory.held(), _log_kept(directory):
            import asyncio

            from skyinfra.runner.serve import Service

            os.chdir(directory.path)
            try:
                asyncio.run(Service(file, directory, partitions=partitions).run())
            finally:
                detach.end_left()
    except SkyinfraError as error:
        if supervised:
            from skyinfra.runner import reports

            # It is started again then.
            reports.send_failure(file, error, seconds=_REPORT_S)
        raise
    return 0


@contextlib.contextmanager
def _log_kept(directory: NodeDirectory) -> Iterator[None]:
    """Writes the log to ``runner.log`` too, where it goes to a journal: that is not for the runner's user to read."""
    if stat.S_ISREG(os.fstat(2).st_mode):
        yield
        return
    from logging.handlers import RotatingFileHandler

    try:
        handler = RotatingFileHandler(directory.log_file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    except OSError:
        yield
        return
    handler.setFormatter(logging.Formatter(drain_cli.LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        # Closing writes what is left; on a full disk that must not take the place of the error that ends the runner.
        with contextlib.suppress(OSError):
            handler.close()


def _watch(options: argparse.Namespace) -> int:
    from skyinfra.runner.watch import Watch

    watcher = Watch(options.config)
    return drain_cli.watch(watcher.check, once=options.once, pause_s=watcher.pause_s)


def _end(options: argparse.Namespace) -> int:
    from skyinfra.idle import ending

    ending.end(options.config)
    return 0


def _metrics(options: argparse.Namespace) -> int:
    from skyinfra.readings import prometheus
    from skyinfra.runner import metrics

    if options.once:
        # As it is, but on a terminal: names of control characters are no escapes of Prometheus.
        write_output(sys.stdout, prometheus.text(metrics.read(options.config)))
        return 0
    host, _, port = options.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidField("expected HOST:PORT", field="--listen", given=options.listen)
    # Read once, so that a wrong configuration is refused at the start.
    metrics.read(options.config)
    metrics.serve(options.config, host, int(port))
    return 0


def _status(options: argparse.Namespace) -> int:
    directory = directory_of(options.config)
    status = directory.status()
    if status is None:
        print("No runner has served this node yet.", file=sys.stderr)
        return 1
    if directory.holder() is None and status.state not in ("failed", "stopped"):
        gone = ("NodeFailed", "the runner ended without a word; its log may say why")
        status = replace(status, state="failed", pid=None, error=gone)
    print(status.dumps() if options.json else printable(_text(status)), end="" if options.json else "\n")
    return 1 if options.ready and status.state != "ready" else 0


def _stop(options: argparse.Namespace) -> int:
    directory = directory_of(options.config)
    watchdog.end(directory)
    with contextlib.suppress(ProcessLookupError):
        stopped = detach.stop(directory, timeout_s=options.timeout)
        print("stopped" if stopped else "no runner serves this node")
    return 0


def _upgrade(options: argparse.Namespace) -> int:
    from skyinfra.drain import request
    from skyinfra.runner import upgrade

    directory = directory_of(options.config)
    if options.cancel:
        request.end_of(directory, request.UPGRADE)
    elif options.drain is not None:
        upgrade.drain(directory, options.drain)
    else:
        upgrade.restart(options.config, directory, wait_s=options.wait)
        print(f"runner {code.version()} serves")
    return 0


def _text(status: Status) -> str:
    lines = [f"{status.fleet} node {status.node}: {status.state}"]
    if status.drain_reason:
        lines.append(f"out of service: {status.drain_reason}")
    if status.stops:
        lines.append(f"the node {status.stops}" if status.state != "stopped" else f"ended by itself: {status.stops}")
    if status.unwarned:
        lines.append(f"will not be warned before it is taken back: {status.unwarned}")
    if status.unwatched:
        lines.append(f"missing: {status.unwatched}")
    if status.scheduler:
        lines.append(f"scheduler {status.scheduler}")
    if status.layouts:
        lines.append(f"layout {', '.join(status.layouts)} (from {status.layout_from})")
    lines.extend(f"waits for {each}" for each in status.waits_for)
    for slot in status.slots:
        what = " ".join(str(part) for part in (slot.accelerator, slot.profile, slot.uuid) if part)
        shared = f" ({slot.memory_gb:g} GB shared by {slot.shared_by})" if (slot.shared_by or 0) > 1 else ""
        lines.append(f"slot {slot.slot} {slot.kind} {what}".rstrip() + shared)
    if status.error:
        lines.append(": ".join(status.error))
    return "\n".join(lines)
