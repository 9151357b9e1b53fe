"""The reference cannot rot: every name of each kind, taken from its one source, stands on its page."""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from support import ROOT

import skyinfra as sky
from benchmarks.__main__ import ALL
from skyinfra import errors
from skyinfra.cli.app import app
from skyinfra.providers import kinds
from skyinfra.providers.data import Boot, Traits
from tools import reference, schemas, site

MODULES = sorted(path.parent for path in (ROOT / "modules").glob("*/README.md"))


@cache
def pages() -> dict[str, str]:
    """The pages of the reference, as the site has them."""
    found = {**reference.python_pages(), **site.made_pages()}
    found |= {f"modules/{module.name}": reference.module(module) for module in MODULES}
    found |= {f"json#{part.partition(chr(10))[0]}": part for part in found["json"].split("\n## ")[1:]}
    return found | {
        f"docs/{name}": (ROOT / "docs" / f"{name}.md").read_text() for name in ("errors", "command-line", "providers")
    }


def test_the_index_has_every_name_as_users_write_it_and_what_is_used_first_stands_first() -> None:
    index = reference.python_pages()["index"]
    named = [(name, page) for name, page, _ in re.findall(r"\[`sky\.(\w+)`\]\(([\w-]+)\.md#sky\.(\1)\) \| \S", index)]
    assert {name for name, _ in named} == set(sky.__all__) - set(errors.__all__) - {"__version__"}
    assert len(named) == len(dict(named)), "each once"
    assert (named[0], dict(named)["compute"]) == (("Pool", "pool"), "compute")
    assert next(iter(dict.fromkeys(page for _, page in named))) == "pool"
    assert all(f"`sky.{name}`" in index for name in errors.__all__ if name != "SkyinfraError")
    for name, page in named:
        text = reference.python_pages()[page]
        assert f'<a id="sky.{name}"></a>' in text and f"heading: sky.{name}\n" in text


def public_names() -> Iterator[str]:
    """The names of the package, as mkdocstrings ends with them; the exceptions have a page of their own."""
    for name in set(sky.__all__) - set(errors.__all__) - {"__version__"}:
        yield f".{name}\n"


def commands(path: str = "skyinfra", command: Any = None) -> Iterator[tuple[str, Any]]:
    command = command or typer.main.get_command(app)
    if not command.hidden:
        yield path, command
        for name, each in getattr(command, "commands", {}).items():
            yield from commands(f"{path} {name}", each)


def exit_codes() -> set[int]:
    """Those of errors, of commands that name one, and of the three signals."""
    found = {0, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM} | {
        getattr(errors, name).exit_code for name in errors.__all__
    }
    for path in (ROOT / "skyinfra" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Exit":
                found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found


def wanted() -> Iterator[tuple[str, str]]:
    """Each text that has to stand, after the page it has to stand on; "python" for those of public names."""
    yield from (("python", name) for name in public_names())
    for path, _ in commands():
        yield "commands", f"## `{path}`\n"
    yield from (("docs/command-line", f"\n| {code} |") for code in exit_codes())
    yield from (("docs/errors", f"- `{name}`: ") for name in errors.__all__)
    for module in MODULES:
        for path in (*module.glob("*.tf"), *module.glob("examples/*/*.tf")):
            for kind, name in re.findall(r'^(variable|output) "(\w+)"', path.read_text(), re.MULTILINE):
                if kind == "variable" or path.parent == module:
                    yield f"modules/{module.name}", f"| `{name}` |"
    for name, document in schemas.documents().items():
        yield "json", f"## {name.removesuffix('.json')}\n"
        for field in re.findall(r'"(\w+)": \{\n', document):
            if field not in ("properties", "items", "additionalProperties"):
                yield f"json#{name.removesuffix('.json')}", field
    yield from (
        ("traits", f"## {name}\n")
        for model in (Boot, Traits)
        for name in model.model_fields.keys() - {"source", "date"}
    )
    yield from (("docs/providers", f"| `{kind}` |") for kind in kinds())
    yield from (("traits", f"`{kind}`") for kind in kinds())
    yield from (("benchmarks", f"\npython -m benchmarks {name}\n") for name in ALL)


def lacking(found: dict[str, str]) -> list[tuple[str, str]]:
    """What does not stand where it has to, on these pages."""
    python = "".join(found[name] for name in reference.python_pages())
    return [(page, text) for page, text in wanted() if text not in (python if page == "python" else found[page])]


def test_everything_has_its_place() -> None:
    assert not lacking(pages())


def test_every_option_stands_at_its_command() -> None:
    for path, command in commands():
        section = pages()["commands"].split(f"## `{path}`\n", 1)[1].split("\n## ", 1)[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert re.search(rf"{parameter.opts[0]}(?![\w-])", section), f"{path} {parameter.opts[0]}"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("declare", ".ComputePool\n"),
        ("commands", "## `skyinfra mig plan`\n"),
        ("docs/command-line", "\n| 143 |"),
        ("docs/errors", "- `LayoutDoesNotFit`: "),
        ("modules/aws", "| `head_volume_gb` |"),
        ("json", "## mig-plan\n"),
        ("json#top", "figures"),
        ("traits", "## partitioned_by\n"),
        ("docs/providers", "| `gcptpu` |"),
        ("benchmarks", "\npython -m benchmarks engine\n"),
    ],
)
def test_what_is_taken_away_is_missed(page: str, text: str) -> None:
    found = lacking({**pages(), page: pages()[page].replace(text, "")})
    assert [missed for _, missed in found] == [text]


def test_nothing_stands_that_is_not() -> None:
    documented = set(re.findall(r"^ *- `(\w+)`: \S", pages()["docs/errors"], re.MULTILINE))
    assert documented == set(errors.__all__)
    # Classes that stand for those below them have causes, and cures, there.
    bases = {cls.__base__.__name__ for cls in map(vars(errors).get, errors.__all__) if cls is not None}
    cured = set(re.findall(r"^ *- `(\w+)`: .* \*Cure:\* \S", pages()["docs/errors"], re.MULTILINE))
    assert cured >= set(errors.__all__) - bases
    codes = re.findall(r"^\| (\d+) \|", pages()["docs/command-line"], re.MULTILINE)
    assert set(map(int, codes)) == exit_codes()


def test_an_input_has_its_type_default_and_meaning(tmp_path: Path) -> None:
    kind = "list(object({\n    a = number  # of it\n    b = string\n  }))"
    body = f'description = "How \\"big\\" | it is."\n  type = {kind}\n  default = []'
    text = f'variable "size" {{\n  {body}\n}}\n'
    (tmp_path / "variables.tf").write_text(text)
    tables = "| input | type | default | |\n|---|---|---|---|\n| `old` | | | |\n\n| output | |\n|---|---|\n| `x` | |\n"
    (tmp_path / "README.md").write_text(f"Before.\n\n{tables}")
    page = reference.module(tmp_path)
    assert "Before." in page and "`old`" not in page
    assert '| `size` | How "big" \\| it is. `list(object({ a = number, b = string }))`, by default `[]`. |' in page
    (tmp_path / "README.md").write_text("No table.\n")
    with pytest.raises(SystemExit, match="0 tables"):
        reference.module(tmp_path)
