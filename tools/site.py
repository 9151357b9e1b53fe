"""Build the pages: ``python -m tools.site`` writes build/site, from docs/ and from the code. Asks no network.

The reference has no text of its own: Python names come from the table of skyinfra/__init__.py and their docstrings,
commands from the program, modules from their READMEs and .tf files, layouts from the geometry of the GPUs; see also
tools/reference.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from skyinfra.cli.app import app
from tools import reference

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site-source"
TOOLS = ROOT / "build" / "docs-tools"
SITE = ROOT / "build" / "site"
# The pages of docs/ in their order; the reference comes after them.
PAGES: dict[str, tuple[str, ...]] = {
    "Start": (
        "laptop",
        "installing",
        "tutorials/sweep",
        "tutorials/fine-tune",
        "tutorials/lab",
        "tutorials/ci",
        "tutorials/plain-hcl",
    ),
    "Declare": ("declaration", "mig", "places", "providers", "offers", "recommend"),
    "Run": (
        "deploying",
        "command-line",
        "tasks",
        "jobs",
        "secrets",
        "volumes",
        "buckets",
        "failover",
        "spending",
        "notebooks",
        "slurm-and-kubernetes",
        "hcp-terraform",
        "upgrading",
        "troubleshooting",
    ),
    "Understand": ("architecture", "performance", "testing", "nodes", "security", "what-works", "versus", "gpu-run"),
}
# The pages of the reference after those of the Python names.
REFERENCE = ("errors", "commands", "json", "traits", "benchmarks")
# Documents beside docs/, and their pages.
PROJECT = {"CONTRIBUTING": "contributing.md", "CHANGELOG": "changelog.md", "SECURITY": "reporting.md"}
_PICTURE = '\n<figure markdown="span">\n![{alt}]({path}){{ loading=lazy }}\n</figure>\n'
_LIVES = {"task": "The life of a task", "layout": "The life of a layout change", "node": "The life of a node"}


def prepare(source: Path = SOURCE) -> None:
    """Writes everything that the pages are made of below *source*, anew."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source)
    for page in source.rglob("*.md"):
        depth = len(page.relative_to(source).parts) - 1
        page.write_text(links(page.read_text(encoding="utf-8"), depth), encoding="utf-8")
    _architecture(source / "architecture.md")
    for name, written in PROJECT.items():
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8").replace("](docs/", "](")
        (source / written).write_text(links(text, 0), encoding="utf-8")
    for folder in (source / "modules", source / "reference"):
        folder.mkdir()
    for readme in sorted((ROOT / "modules").glob("*/README.md")):
        words = reference.module(readme.parent).replace("](../../docs/", "](../")
        words = re.sub(r"\]\(\.\./(\w+)(?:/README\.md)?\)", r"](\1.md)", words)
        (source / "modules" / f"{readme.parent.name}.md").write_text(unlinked(words, 1), encoding="utf-8")
    for name, page in {**reference.python_pages(), **made_pages()}.items():
        (source / "reference" / f"{name}.md").write_text(page, encoding="utf-8")
    shutil.move(source / "errors.md", source / "reference" / "errors.md")
    gallery = ["mig", "gallery", "--out", source / "gallery", "--home", "../index.html"]
    subprocess.run([sys.executable, "-m", "skyinfra.cli", *gallery], check=True)


def links(text: str, depth: int) -> str:
    """Returns *text* of docs/, with links that lead out of docs/ to the pages that the site has of them."""
    up = "../" * depth
    text = re.sub(r"\]\((?:\.\./)+modules/(\w+)(?:/README\.md|/)?\)", rf"]({up}modules/\1.md)", text)
    text = re.sub(
        r"\]\((?:\.\./)+(CONTRIBUTING|CHANGELOG|SECURITY)\.md", lambda found: f"]({up}{PROJECT[found[1]]}", text
    )
    text = text.replace(
        "`skyinfra mig gallery --out DIR`", f"[`skyinfra mig gallery --out DIR`]({up}gallery/index.html)"
    )
    text = re.sub(r"\]\((?:\./)?errors\.md", rf"]({up}reference/errors.md", text)
    text = re.sub(r"\]\(schemas/([\w-]+)\.json\)", rf"]({up}reference/json.md#\1)", text)
    return unlinked(text, depth)


def unlinked(text: str, depth: int) -> str:
    """Returns *text* with the words alone of each link that leads to no page: to a file of the repository."""
    up = r"\.\./" * (depth + 1)
    return re.sub(rf"\[([^\]]+)\]\((?:{up}[^)\s]*|[\w./-]+(?<!\.md)(?<!\.svg)(?<!\.html))\)", r"\1", text)


def _architecture(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    way = _PICTURE.format(alt="The way of the data", path="pictures/way-of-the-data.svg")
    text = re.sub(r"```mermaid\n.*?```\n", lambda _: way, text, flags=re.DOTALL)
    for name, title in _LIVES.items():
        shown = _PICTURE.format(alt=title, path=f"pictures/life-of-a-{name}.svg")
        text = text.replace(f"## {title}\n", f"## {title}\n{shown}")
    page.write_text(text, encoding="utf-8")


def made_pages() -> dict[str, str]:
    """Returns the pages of the reference that are made of the program and of its data, by their names."""
    return {
        "benchmarks": reference.benchmarks(),
        "commands": commands(),
        "json": reference.schemas(),
        "traits": reference.traits(),
    }


def commands() -> str:
    """Returns the page of all commands, with their options, from the program itself."""
    group = typer.main.get_command(app)
    return "# Commands\n\n" + "\n".join(_command("skyinfra", group))


def _command(path: str, command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=path)
    yield f"## `{path}`\n\n{command.help or ''}\n"
    yield f"```\n{command.get_usage(context)}\n```\n"
    rows = [_row(parameter, context) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows]) + "\n"
    for name, found in sorted(getattr(command, "commands", {}).items()):
        if not found.hidden:
            yield from _command(f"{path} {name}", found)


def _row(parameter: Any, context: typer.Context) -> str:
    shown = parameter.get_help_record(context) or (parameter.make_metavar(context), "")
    name, words = (part.replace("|", "\\|").replace("\n", " ") for part in shown)
    return f"| `{name}` | {words or getattr(parameter, 'help', None) or ''} |"


def nav(source: Path = SOURCE) -> list[dict[str, object]]:
    """Returns the navigation, as zensical.toml has it."""
    found: list[dict[str, object]] = [{"Home": "index.md"}]
    for title, pages in PAGES.items():
        found.append({title: [f"{page}.md" for page in pages]})
    modules = sorted(f"modules/{page.name}" for page in (source / "modules").glob("*.md"))
    pages = [f"reference/{name}.md" for name in ("index", *reference.PYTHON, *REFERENCE)]
    found.append({"Reference": [*pages, {"Modules": modules}]})
    found.append({"Project": list(PROJECT.values())})
    return found


def configuration(source: Path = SOURCE) -> str:
    """Returns zensical.toml: the settings of docs/zensical.toml, with the navigation."""
    settings = (ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8")
    return settings.replace("nav = []", f"nav = {_toml(nav(source))}")


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value)


def build(config: Path) -> None:
    """Runs the builder, which `make docs` keeps in a folder of its own; a warning of it is an error."""
    path = os.pathsep.join([os.fspath(TOOLS), os.fspath(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", os.fspath(config)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def main() -> None:
    """Builds the pages."""
    prepare()
    config = SOURCE.parent / "zensical.toml"
    config.write_text(configuration(), encoding="utf-8")
    shutil.rmtree(SITE, ignore_errors=True)
    build(config)
    shutil.copytree(SOURCE / "gallery", SITE / "gallery", dirs_exist_ok=True)
    print(f"built: {SITE.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
