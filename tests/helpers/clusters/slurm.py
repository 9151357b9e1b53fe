"""Slurm from Debian on this machine: a controller and nodes by name, with their folders below one of the test."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from local_fleets.running_node import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
# SIGKILL follows SIGTERM that many seconds later.
KILL_WAIT_S = 25
# The GPUs of each node.
GPU_FILES = ("/dev/null", "/dev/zero")


def unusable() -> str | None:
    """Why Slurm cannot run here, or None."""
    if os.geteuid() != 0:
        return "the daemons of Slurm need root"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    return f"{', '.join(missing)} of Slurm are missing: `make debian` installs them" if missing else None


class Slurm:
    """A running cluster. environment: what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Returns what the *command* prints."""
        done = subprocess.run(
            command,
            env={**self.environment, **variables},
            cwd=self.folder / "jobs",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, such as ``RUNNING``."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(part.partition("=")[::2] for part in shown.split())["JobState"]

    def log(self, job: str) -> str:
        """What the job printed."""
        file = self.folder / "jobs" / f"skyinfra-{job}.log"
        return file.read_text() if file.exists() else ""

    def logs(self) -> str:
        """The ends of the logs of Slurm itself."""
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in sorted(self.folder.glob("*.log")))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configuration(folder: Path, nodes: tuple[str, ...]) -> str:
    host = socket.gethostname().partition(".")[0]
    port, *ports = _free_ports(len(nodes) + 1)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket",
        "CryptoType=crypto/munge",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
        "SchedulerParameters=sched_min_interval=100000",
        "ReturnToService=2",
        "MpiDefault=none",
        f"KillWait={KILL_WAIT_S}",
        "InactiveLimit=0",
        "MinJobAge=300",
        "GresTypes=gpu",
        # The CPUs of each node are as declared, however many this machine has.
        "SlurmdParameters=config_overrides",
    ]
    for node, its_port in zip(nodes, ports, strict=True):
        address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={its_port}"
        lines.append(f"NodeName={node} {address} CPUs=4 Gres=gpu:{len(GPU_FILES)} State=UNKNOWN")
    lines.append(f"PartitionName=all Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def one_node(folder: Path, gres: str) -> str:
    """A configuration with the node n1, which has *gres*, for a slurmd that only says what it finds."""
    lines = [line for line in _configuration(folder, ("n1",)).splitlines() if "munge" not in line]
    return "\n".join(re.sub(r"Gres=\S+", f"Gres={gres}", line) for line in lines) + "\n"


@contextlib.contextmanager
def running(folder: Path, *nodes: str) -> Iterator[Slurm]:
    """Slurm with these *nodes*, whose daemons end with the block."""
    for name in ("state", "jobs", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(_configuration(folder, nodes))
    # Files that every machine has: what counts is what Slurm says of its GPUs to the job.
    gres = "".join(f"NodeName={','.join(nodes)} Name=gpu File={file}\n" for file in GPU_FILES)
    (folder / "gres.conf").write_text(gres)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    slurm = Slurm(folder)
    daemons = []
    munged = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
    with contextlib.ExitStack() as ends:

        def start(name: str, *command: str) -> None:
            log = ends.enter_context((folder / f"{name}.out.log").open("wb"))
            daemon = subprocess.Popen(command, env=slurm.environment, stdout=log, stderr=log, start_new_session=True)
            daemons.append(daemon)

        try:
            start("munged", *munged)
            until((folder / "munge.socket").exists, "munged listens")
            start("slurmctld", "slurmctld", "-D")
            for node in nodes:
                start(node, "slurmd", "-D", "-N", node)
            _await_idle(slurm, len(nodes))
            yield slurm
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in reversed(daemons):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.wait(timeout=15)
                daemon.kill()
                daemon.wait()


def _await_idle(slurm: Slurm, count: int) -> None:
    deadline = time.monotonic() + 60
    while slurm.run("sinfo", "--noheader", "--Node", "--format=%T", check=False).split() != ["idle"] * count:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.3)
