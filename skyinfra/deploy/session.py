"""A pool as the whole program: deployed where its ``with`` block begins, destroyed where it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from skyinfra.bootstrap import runner_wheel
from skyinfra.bootstrap.steps import carries_runner
from skyinfra.compiler import compile_pools
from skyinfra.deploy.apply import carry_out, hint_for
from skyinfra.deploy.cost import FREE, cost_of
from skyinfra.deploy.kept import keep_before
from skyinfra.deploy.reporting import Line, say
from skyinfra.deploy.spending import described, since, spent
from skyinfra.errors import (
    FleetError,
    NotSupported,
    ProjectError,
    SkyinfraError,
    StateNotSaved,
    TerraformError,
    counted,
)
from skyinfra.errors.signals import catch, is_first, putting_off, restore
from skyinfra.terraform import blocks
from skyinfra.terraform.backends import LocalState
from skyinfra.terraform.blocks import Opened, folder_of
from skyinfra.terraform.interrupts import hush_node
from skyinfra.terraform.program import Plan, find_program
from skyinfra.terraform.project import Project, node_environment
from skyinfra.terraform.synthesized import SynthesizedStack

if TYPE_CHECKING:
    from skyinfra.client import Pool
    from skyinfra.pool import ComputePool


# For how long machines of a cloud may boot, in seconds.
PATIENCE_S = 900.0
# After which nodes end that nobody uses, where a block says nothing else.
_IDLE = "30m"

# The sessions of the pools whose blocks are open, by the identity of the pool, which each session holds.
_open: dict[int, Session] = {}
os.register_at_fork(after_in_child=_open.clear)


def enter(pool: ComputePool) -> Pool:
    """Deploys *pool* as a stack of its own and connects to it."""
    session = Session(pool)
    client = session.open()
    _open[id(pool)] = session
    return client


def leave(pool: ComputePool) -> None:
    """Destroys the fleet that `enter` has deployed; a process that was forked meanwhile leaves it to its parent."""
    session = _open.pop(id(pool), None)
    if session is not None:
        session.close()


class Session:
    """A pool that is deployed by `open` and destroyed by `close`, as a stack of its own.

    Its state lies in the folder of its block, see `skyinfra.terraform.blocks`, until it is destroyed: a program that
    was killed leaves something that the command line lists and ends. The next program of that name takes it over.
    """

    def __init__(self, pool: ComputePool) -> None:
        # The sessions are found by its identity.
        self._given = pool
        if pool.places is not None or getattr(pool.provider, "regions", None):
            raise NotSupported(
                "a `with` block is deployed at one place",
                field=f"ComputePool({pool.name!r}).provider",
                hint="Name one, or declare the pool in a project: `skyinfra deploy` tries them one after the other.",
            )
        self.pool, self._ends = with_end(pool)
        self.stack = pool.stack or "session"
        self.base = Path.cwd()
        self.folder = folder_of(self.base, self.stack)
        self._opened = Opened.now()
        self._synthesized: SynthesizedStack | None = None
        self._unsaved = False
        self._client: Pool | None = None
        self._lock: IO[str] | None = None
        self._handlers: dict[int, Any] = {}

    def open(self) -> Pool:
        """Deploys the pool and connects to it. After any failure on the way, it destroys the created resources, unless
        their state could not be saved."""
        (deployment,) = compile_pools([self.pool], self.stack)
        if carries_runner(deployment):
            runner_wheel.check_client()
        find_program()
        self._acquire()
        self._catch_termination()
        try:
            with Line(self.stack) as line:
                line.say("compiling its declaration")
                self._synthesized = self._synthesize()
                self._client = self._deploy(self._synthesized, line)
        except BaseException as error:
            if isinstance(error, StateNotSaved):
                self._keep_unsaved(error)
            elif isinstance(error, TerraformError) and self._synthesized is not None:
                # Its own hint is for a project: there is nothing here to go on with.
                error.hint = hint_for(self._synthesized, error, "What was created is destroyed again.")
            self.close()
            raise
        return self._client

    def _deploy(self, stack: SynthesizedStack, line: Line) -> Pool:
        from skyinfra.client import connect
        from skyinfra.client.lookup import wait_until_ready

        if self._ends:
            say(f"{self.stack}: {self._ends}")
        line.begin(f"deploying {described(stack.pools)}")
        carry_out(stack, line=line)
        manifest = stack.fleet(self.pool.name)
        # A local node is ready when Terraform is.
        if manifest.provider != "local":
            wait_until_ready(manifest, patience=PATIENCE_S, on_change=line.say)
        client = connect(manifest)
        slots = counted(len(manifest.slots) * manifest.node_count, "slot")
        line.end(f"ready, {counted(manifest.node_count, 'node')} with {slots}")
        return client

    def close(self) -> None:
        """Destroys the fleet and removes the session's folder. Raises `TerraformFailed`, with what to run next."""
        with contextlib.ExitStack() as cleanup:  # whatever fails, the rest is still done
            cleanup.callback(self._release)
            cleanup.enter_context(putting_off())
            cleanup.callback(self._remove)
            if self._client is not None:
                cleanup.callback(self._client.close)

    def _remove(self) -> None:
        """Destroys the fleet, then removes the folder with its state; neither where a state does not have it all."""
        if self._unsaved:
            return
        if self._synthesized is None and any(self.folder.rglob("*.tfstate")):
            say(f"{self.stack}: its fleet still exists. Destroy it with: skyinfra destroy {self.stack}")
            return
        if self._synthesized is not None:
            before = partial(_keep_jobs, self._synthesized, project=self.base)
            try:
                with Line(self.stack) as line:
                    line.say("destroying")
                    carry_out(self._synthesized, destroy=True, before=before, line=line)
                    declared = cost_of(self._synthesized.pools)
                    cost = spent(declared.usd_per_hour, self._opened)
                    most = "at most " if any(pool.least is not None for pool in declared.pools) else ""
                    line.end(f"destroyed; it cost {most}{cost}" if cost else "destroyed")
            except StateNotSaved as error:
                self._keep_unsaved(error)
                raise
            except SkyinfraError as error:
                error.hint = f"The fleet still exists. Destroy it with: skyinfra destroy {self.stack}"
                raise
        blocks.remove(self.folder)

    def _keep_unsaved(self, error: StateNotSaved) -> None:
        """Keeps the folder: a destroy by the earlier state would leave machines, and remove the file that has them."""
        self._unsaved = True
        error.hint = f"{error.hint}\nThen destroy the fleet with: skyinfra destroy {self.stack}"

    def _synthesize(self) -> SynthesizedStack:
        os.environ.update(node_environment())
        hush_node()
        from skyinfra.stack import FleetStack, load_library

        library = load_library()
        output = self.folder / "cdktf.out"
        state = (self.folder / "terraform.tfstate").relative_to(self.base).as_posix()
        with _earlier_kept(output / "stacks" / self.stack / "cdk.tf.json"):
            app = library.App(outdir=str(output))
            FleetStack(app, self.stack, pools=[self.pool], backend=LocalState(path=state))
            app.synth()
        return Project(folder=self.base, app="", output=output).stack(self.stack)

    def _acquire(self) -> None:
        """Takes the folder of the block, and the fleet of a killed program in it, whose costs began with that one."""
        self._refuse_declared()
        self._refuse_unsaved()
        self._lock = blocks.hold(self.folder)
        earlier = blocks.opened(self.folder)
        if self._lock is None:
            by = f": {earlier.program}, process {earlier.pid}" if earlier else ""
            raise FleetError(
                f"another program in this folder has a pool open under that name{by}",
                field="stack",
                given=self.stack,
                hint='Give this one a name of its own: sky.ComputePool(..., stack="...")',
            )
        if earlier is not None and (self.folder / "terraform.tfstate").exists():
            say(f"{self.stack}: takes over the fleet that {earlier.program} left, {since(earlier)}")
            self._opened = replace(self._opened, began=earlier.began)
        blocks.record(self._lock, self._opened)

    def _refuse_declared(self) -> None:
        """Raises `FleetError` where the project in this folder declares a stack of that name."""
        with contextlib.suppress(ProjectError):
            if self.stack in {each.name for each in Project.read(self.base).stacks()}:
                raise FleetError(
                    "the project in this folder declares a stack of that name",
                    field="stack",
                    given=self.stack,
                    hint=f'Connect to its fleet: sky.connect("{self.stack}"). Or give this pool a name of its own: '
                    'sky.ComputePool(..., stack="...")',
                )

    def _refuse_unsaved(self) -> None:
        """Raises `ProjectError` where a state lies in the folder that Terraform could not save: what it has made then
        would be made again, and the file removed with the folder."""
        if found := sorted(self.folder.rglob("errored*.tfstate")):
            push = shlex.join([*find_program(), f"-chdir={found[0].parent}", "state", "push", str(found[0])])
            raise ProjectError(
                "has machines of an earlier block, and Terraform could not save it",
                field=str(found[0]),
                hint=f"Save it, and destroy them:\n{push}\nskyinfra destroy {self.stack}",
            )

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        restore(self._handlers)
        self._handlers = {}

    def _catch_termination(self) -> None:
        """A signal that ends the program leaves the block as an exception, so that the fleet is destroyed."""

        def leave(number: int, _frame: object) -> None:
            if is_first(number):
                raise SystemExit(128 + number)

        self._handlers = catch(leave)


@contextlib.contextmanager
def _earlier_kept(file: Path) -> Iterator[None]:
    """Puts *file* back where the block fails: the fleet of a killed program is found and destroyed by it."""
    aside = file.with_suffix(".earlier.json")
    if file.exists():
        shutil.copyfile(file, aside)
    try:
        yield
    except BaseException:
        if aside.exists():
            aside.replace(file)
        raise
    aside.unlink(missing_ok=True)


def with_end(pool: ComputePool) -> tuple[ComputePool, str]:
    """Returns *pool* with the idle time that a block gives it, and what to say of its end; empty for a declared one.

    A program that was killed never comes back to destroy what it has made. Nothing but what is declared ends tasks that
    run, so there is no lifetime.
    """
    if pool.stop_after_idle is not None or pool.max_lifetime is not None or pool.provider.kind in FREE:
        return pool, ""
    limited = pool.model_copy(update={"stop_after_idle": _IDLE})
    try:
        compile_pools([limited], pool.stack or "session")
    except NotSupported as error:
        return pool, f"nothing stops it if this program does not come back: {error.message}"
    never = 'sky.ComputePool(..., stop_after_idle="never") keeps it'
    return limited, f"its nodes end themselves when nothing has used them for {_IDLE}; {never}"


def _keep_jobs(stack: SynthesizedStack, plan: Plan, *, project: Path) -> None:
    # An interrupt ends the keeping alone: what costs money is destroyed all the same.
    with contextlib.suppress(KeyboardInterrupt):
        for done in keep_before(stack, plan, project, destroy=True, resumed=False):
            say(str(done))
