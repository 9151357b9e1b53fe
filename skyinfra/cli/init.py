"""``skyinfra init``: a project that works as it is; ``skyinfra completion``."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import uuid
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from typer._completion_shared import get_completion_script

from skyinfra.bootstrap import bundled
from skyinfra.errors import InvalidField, ProjectError, did_you_mean, written
from skyinfra.stack import LIBRARIES, check_name
from skyinfra.terminal.overview import show_steps

# The living one first.
_PREFERRED = ("cdktn", "cdktf")
_ABOUT = {"cdktn": "CDK Terrain", "cdktf": "which HashiCorp archived in December 2025; cdktn is its continuation"}

# Files of a project, and the templates that they are made of.
_PROJECT = {"cdktf.json": "cdktf.json.j2", "main.py": "main.py.j2", ".gitignore": "gitignore.j2"}
_SCRIPT = {"train.py": "train.py.j2"}
_NOTEBOOK = {"notebook.ipynb": "notebook.ipynb.j2"}
_HCL = {"main.tf": "main.tf.j2", ".gitignore": "gitignore.j2"}
# A program of examples/, for the stack of this name.
_PROGRAMS = {"tour": "tour.py", "jobs": "job.py", "gang": "gang.py"}
_STACK = "quickstart"
EXAMPLES = (*_PROGRAMS, "notebook", "hcl")


app = typer.Typer()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of the new project.")] = Path(),
    stack: Annotated[str, typer.Option(help="Name of its stack.")] = "quickstart",
    library: Annotated[
        str | None, typer.Option(help="cdktf or cdktn; the one that is installed, and cdktn where both are.")
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(help="tour, jobs, gang, notebook, or hcl: without Python, in Terraform's own language."),
    ] = None,
) -> None:
    """Make a project. It declares a pool of simulated nodes, and has a script and a notebook that use them."""
    selected = library or installed_library() or _PREFERRED[0]
    for file in make_project(folder, stack=stack, library=selected, example=example):
        typer.echo(f"made {file}")
    if example != "hcl":
        typer.echo(f"It declares with {selected}, {_ABOUT.get(selected, '')}.")
    steps = [] if folder.resolve() == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    if example == "hcl":
        # The output is the manifest, which holds the fleet secret.
        steps += ["terraform init && terraform apply", "(umask 077; terraform output -json fleet_mig > fleet.json)"]
        steps.append("skyinfra top fleet.json")
    else:
        if importlib.util.find_spec(selected) is None:
            steps.append(f'{Path(sys.executable).name} -m pip install "skyinfra[{selected}]"')
        steps += ["skyinfra deploy", _use(example, stack), "skyinfra destroy"]
    show_steps((step, "") for step in steps)


def installed_library() -> str | None:
    """Returns the library that is installed, cdktn where both are; None without one."""
    return next((name for name in _PREFERRED if importlib.util.find_spec(name) is not None), None)


def make_project(folder: Path, *, stack: str, library: str, example: str | None = None) -> list[Path]:
    """Writes the project's files and returns them.

    example: one of `EXAMPLES`; without it, a script and a notebook. Raises `InvalidField`, and `ProjectError` rather
    than overwrite a file.
    """
    if library not in LIBRARIES:
        raise InvalidField("no such library", field="--library", given=library, hint=f"{' or '.join(LIBRARIES)}.")
    check_name(stack, field="--stack")
    contents = {folder / name: text for name, text in _contents(stack, library, example).items()}
    for file in contents:
        if file.exists():
            raise ProjectError("exists already and is not overwritten", field=str(file), hint="Choose an empty folder.")
    with written(ProjectError, str(folder)):
        for file, text in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    return list(contents)


def _contents(stack: str, library: str, example: str | None) -> dict[str, str]:
    """Returns the texts of the files, by their names."""
    if example is not None and example not in EXAMPLES:
        hint = f"{did_you_mean(example, EXAMPLES)} One of {', '.join(EXAMPLES)}.".strip()
        raise InvalidField("no such example", field="--example", given=example, hint=hint)
    if example in _PROGRAMS and stack != _STACK:
        raise InvalidField(f"the stack of this example is {_STACK}", field="--stack", given=stack)
    loader = FileSystemLoader(bundled.folder("templates", "project"))
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701 - not HTML
    values = {"stack": stack, "library": library, "project_id": str(uuid.uuid4())}
    templates = {None: _PROJECT | _SCRIPT | _NOTEBOOK, "notebook": _PROJECT | _NOTEBOOK, "hcl": _HCL}
    made = {
        name: environment.get_template(template).render(values)
        for name, template in templates.get(example, _PROJECT).items()
    }
    if example in _PROGRAMS:
        program = _PROGRAMS[example or ""]
        made[program] = (bundled.folder("examples") / program).read_text(encoding="utf-8")
    if example == "hcl":
        module = bundled.folder("modules", "local")
        made |= {f"modules/local/{file.name}": file.read_text(encoding="utf-8") for file in sorted(module.iterdir())}
    return made


def _use(example: str | None, stack: str) -> str:
    """Returns the command that uses the deployed fleet."""
    if example in _PROGRAMS:
        return f"python {_PROGRAMS[example or '']}"
    if example == "notebook":
        return "jupyter lab notebook.ipynb"
    return f"skyinfra run {stack}/mig train.py --epochs 3"


class Shell(StrEnum):
    """A shell that completes commands."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command()
def completion(shell: Annotated[Shell, typer.Argument(help="The shell.")]) -> None:
    """Print the completion of a shell. --install-completion installs it; it knows stacks, pools, nodes and jobs."""
    typer.echo(get_completion_script(prog_name="skyinfra", complete_var="_SKYINFRA_COMPLETE", shell=shell.value))
