"""A pool as the whole program: deployed where its ``with`` block begins, destroyed where it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skyinfra.compiler import compile_pools
from skyinfra.deploy.apply import NODES, carry_out, hint_for
from skyinfra.deploy.kept import keep_before
from skyinfra.errors import (
    FleetError,
    ProjectError,
    SkyinfraError,
    TerraformError,
)
from skyinfra.terraform.backends import LocalState
from skyinfra.terraform.program import Plan, find_program
from skyinfra.terraform.project import Project, node_environment
from skyinfra.terraform.state import refuse_shared
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Pool
    from skyinfra.pool import ComputePool


# The sessions of the pools whose blocks are open, by the identity of the pool, which each session holds.
_open: dict[int, Session] = {}


def enter(pool: ComputePool) -> Pool:
    """Deploys *pool* as a stack of its own and connects to it."""
    session = Session(pool)
    client = session.open()
    _open[id(pool)] = session
    return client


def leave(pool: ComputePool) -> None:
    """Destroys the fleet that `enter` has deployed."""
    _open.pop(id(pool)).close()


class Session:
    """A pool that is deployed by `open` and destroyed by `close`, as a stack of its own.

    Its state stands in ``.skyinfra/.sessions/STACK`` below the current folder until it is destroyed, so that a program
    that was killed leaves something to destroy: the next session of that name takes the fleet over.
    """

    def __init__(self, pool: ComputePool) -> None:
        self.pool = pool
        self.stack = pool.stack or "session"
        self.base = Path.cwd()
        self.folder = self.base / NODES / ".sessions" / self.stack
        self._synthesized: SynthesizedStack | None = None
        self._client: Pool | None = None
        self._lock: IO[str] | None = None
        self._previous_handler: Any = None

    def open(self) -> Pool:
        """Deploys the pool and connects to it. After any failure on the way, it destroys the created resources."""
        from skyinfra.client import connect

        compile_pools([self.pool], self.stack)
        find_program()
        self._acquire()
        self._catch_termination()
        try:
            self._synthesized = self._synthesize()
            carry_out(self._synthesized)
            self._client = connect(self._synthesized.fleet(self.pool.name))
        except BaseException as error:
            if isinstance(error, TerraformError):
                # Its own hint is for a project: there is nothing here to go on with.
                last = "What was created is destroyed again."
                error.hint = hint_for(self._synthesized, error, last) if self._synthesized else last
            self.close()
            raise
        return self._client

    def close(self) -> None:
        """Destroys the fleet and removes the session's folder. Raises `TerraformFailed`, with what to run next."""
        with contextlib.ExitStack() as leaving:  # whatever fails, the rest is still done
            leaving.callback(self._release)
            leaving.callback(self._remove)
            if self._client is not None:
                leaving.callback(self._client.close)

    def _remove(self) -> None:
        """Destroys the fleet, then removes the folder with its state."""
        if self._synthesized is not None:
            try:
                carry_out(
                    self._synthesized, destroy=True, before=partial(_keep_jobs, self._synthesized, project=self.base)
                )
            except SkyinfraError as error:
                command = shlex.join([*find_program(), f"-chdir={self._synthesized.folder}", "destroy"])
                error.hint = f"The fleet still exists. Destroy it with: {command}"
                raise
        shutil.rmtree(self.folder, ignore_errors=True)
        for folder in (self.folder.parent, self.folder.parent.parent):
            with contextlib.suppress(OSError):  # other fleets and sessions stand there
                folder.rmdir()

    def _synthesize(self) -> SynthesizedStack:
        os.environ.update(node_environment())
        from skyinfra.stack import FleetStack, load_library

        library = load_library()
        output = self.folder / "cdktf.out"
        app = library.App(outdir=str(output))
        state = (self.folder / "terraform.tfstate").relative_to(self.base).as_posix()
        FleetStack(app, self.stack, pools=[self.pool], backend=LocalState(path=state))
        app.synth()
        return Project(folder=self.base, app="", output=output).stack(self.stack)

    def _acquire(self) -> None:
        try:
            # The state, which holds the fleet secret, is written there.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Somebody else may have made them where the current folder is one for all, such as /tmp.
            for folder in (self.folder, self.folder.parent, self.folder.parent.parent):
                refuse_shared(folder)
            self._lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise ProjectError(
                f"cannot be written: {error.strerror}",
                field=str(self.folder),
                hint="Run the program in a folder that is yours, on a disk that has space.",
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise FleetError(
                "another program in this folder has a pool open under that name",
                field="stack",
                given=self.stack,
                hint='Give this one a name of its own: sky.ComputePool(..., stack="...")',
            ) from None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def _catch_termination(self) -> None:
        """SIGTERM leaves the block as an exception, so that the fleet is destroyed; a program's own handler stays."""

        def leave(number: int, _frame: object) -> None:
            raise SystemExit(128 + number)

        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._previous_handler = signal.signal(signal.SIGTERM, leave)


def _keep_jobs(stack: SynthesizedStack, plan: Plan, *, project: Path) -> None:
    # An interrupt ends the keeping alone: what costs money is destroyed all the same.
    with contextlib.suppress(KeyboardInterrupt):
        for done in keep_before(stack, plan, project, destroy=True):
            sys.stderr.write(f"{done}\n")
