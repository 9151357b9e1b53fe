"""Carrying out a stack: plan, apply, destroy; and a pool that lives as long as a ``with`` block."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skyinfra._errors import (
    CloudRefused,
    FleetError,
    ProjectError,
    RunsElsewhere,
    SkyinfraError,
    StateLocked,
    TerraformError,
    TerraformFailed,
)
from skyinfra.backends import LocalState
from skyinfra.compiler import compile_pools
from skyinfra.next_steps import next_steps
from skyinfra.project import Project, SynthesizedStack, node_environment
from skyinfra.reporting import Reporter
from skyinfra.terraform import Plan, Terraform, find_program

if TYPE_CHECKING:
    from skyinfra.client import Pool
    from skyinfra.pool import ComputePool

NODES = ".skyinfra"


@contextlib.contextmanager
def planned(
    stack: SynthesizedStack, *, destroy: bool = False, replace: Sequence[str] = ()
) -> Iterator[tuple[Terraform, Plan]]:
    """What a deploy of *stack* would change, or a destroy; the plan exists as long as the block runs.

    replace: addresses of resources to make anew. Raises `TerraformFailed`, `TerraformNotFound`, `DeployInterrupted`,
    `RunsElsewhere`.
    """
    with contextlib.ExitStack() as inside:
        try:
            terraform = stack.terraform()
            terraform.prepare()
            again = [*replace, *([] if destroy else lost_local_nodes(stack))]
            plan = inside.enter_context(terraform.planned(lambda event: None, destroy=destroy, replace=again))
        except CloudRefused as error:
            error.hint = _hint(stack, error, "Nothing was changed.")
            raise
        _check_place(stack, plan)
        yield terraform, plan


def _check_place(stack: SynthesizedStack, plan: Plan) -> None:
    """Nodes of this machine are processes that Terraform starts here."""
    local = [pool["name"] for pool in stack.pools if pool["provider"] == "local"]
    if plan.run is not None and local and not plan.empty:
        raise RunsElsewhere(
            f"the stack {stack.name!r} has nodes of this machine (pool {', '.join(local)}), and its workspace runs "
            f"Terraform in HCP Terraform: {plan.run}",
            hint="Nothing was changed. Set the workspace's execution mode to local, or declare a provider to buy from.",
        )


def _hint(stack: SynthesizedStack, error: TerraformError, last: str) -> str:
    """What to do where a cloud refused something, and what there is now."""
    return "\n".join([*(next_steps(stack, error) if isinstance(error, CloudRefused) else []), last])


def carry_out(
    stack: SynthesizedStack,
    *,
    approve: Callable[[Plan], bool] = lambda plan: True,
    destroy: bool = False,
    replace: Sequence[str] = (),
) -> Plan | None:
    """Plans *stack*, asks *approve*, applies. Returns the plan, or None where *approve* said no.

    An empty plan is returned without asking. Raises what `planned` raises.
    """
    verb = "destroy" if destroy else "deploy"
    with planned(stack, destroy=destroy, replace=replace) as (terraform, plan):
        if plan.empty:
            return plan
        if not approve(plan):
            return None
        with Reporter(f"{verb} {stack.name}", total=len(plan.changes)) as reporter:
            try:
                terraform.apply_plan(plan, reporter)
            except StateLocked:
                raise
            except TerraformFailed as error:
                again = "" if destroy else f", or `skyinfra destroy {stack.name}`"
                error.hint = _hint(
                    stack,
                    error,
                    "The state is intact, and what exists is in it. "
                    f"Mend the cause and run `skyinfra {verb} {stack.name}` again{again}.",
                )
                raise
        return plan


def lost_local_nodes(stack: SynthesizedStack) -> list[str]:
    """Addresses to replace so that local nodes that died are started again, such as after a reboot of this machine.

    Where the fleet's folder was removed, its copy of the secret is made again as well.

    Terraform cannot see that a process is gone. A cloud restarts its machines; here a deploy does.
    """
    lost = []
    for name, manifest in stack.fleets().items():
        root = stack.modules.get(name, {}).get("root")
        if manifest.provider != "local" or root is None:
            continue
        folder = stack.folder / root / manifest.stack / manifest.pool
        if not (folder / "secret").exists():
            lost.append(f"module.{name}.terraform_data.credential")
        for node in manifest.nodes:
            if not _is_served(folder / node.name):
                resource = "head" if node.head else f'worker["{node.name}"]'
                lost.append(f"module.{name}.terraform_data.{resource}")
    return lost


def _is_served(folder: Path) -> bool:
    """Whether a runner holds the lock of the node's *folder*."""
    try:
        with (folder / "runner.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


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
        """Deploys the pool and connects to it. Whatever stops it on the way, what was created is destroyed."""
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
                error.hint = _hint(self._synthesized, error, last) if self._synthesized else last
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
                carry_out(self._synthesized, destroy=True)
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
