"""``skyinfra init``: a project that works as it is."""

from __future__ import annotations

import uuid
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from skyinfra.bootstrap import bundled
from skyinfra.errors import InvalidField, ProjectError
from skyinfra.stack import LIBRARIES, check_name


def make_project(folder: Path, *, stack: str, library: str) -> list[Path]:
    """Writes the project's files and returns them.

    Raises `InvalidField`, and `ProjectError` rather than overwrite one.
    """
    if library not in LIBRARIES:
        raise InvalidField("no such library", field="--library", given=library, hint=f"{' or '.join(LIBRARIES)}.")
    check_name(stack, field="--stack")
    loader = FileSystemLoader(bundled.folder("templates", "project"))
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)  # noqa: S701 - not HTML
    files = {
        folder / "cdktf.json": "cdktf.json.j2",
        folder / "main.py": "main.py.j2",
        folder / ".gitignore": "gitignore.j2",
    }
    for file in files:
        if file.exists():
            raise ProjectError("exists already and is not overwritten", field=str(file), hint="Choose an empty folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, template in files.items():
            values = {"stack": stack, "library": library, "project_id": str(uuid.uuid4())}
            file.write_text(environment.get_template(template).render(values), encoding="utf-8")
    except OSError as error:
        raise ProjectError(f"cannot be written: {error.strerror}", field=str(folder)) from None
    return list(files)
