"""Pages of the reference that are made of code and data: Python names, modules, JSON schemas, traits of providers,
benchmarks."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import skyinfra
from benchmarks.__main__ import ALL
from skyinfra import errors
from skyinfra.providers import kinds, read
from skyinfra.providers.data import Boot, Traits

ROOT = Path(__file__).resolve().parents[1]
_SOURCED = ("source", "date")
# The pages of the Python names in the order of their use: title, and the names in theirs. "*": those of all providers.
PYTHON = {
    "pool": (
        "Pool: a fleet in a program",
        "Pool connect Future Job wait current_pool AsyncPool AsyncJob connect_async JobInfo KeptJob kept_jobs Manifest "
        "GangWarning",
    ),
    "compute": ("compute: tasks", "compute Task gather Gather cls enter exit gang Gang"),
    "in-a-task": (
        "In a task",
        "instance_info InstanceInfo current_accelerator progress files synced Secret SpotCheckpointer interrupted "
        "interruption on_interrupt Interruption",
    ),
    "declare": (
        "ComputePool: what is declared",
        "ComputePool Image Worker Range Budget Volume Mount FleetStack HCPTerraform LocalState S3 plugins",
    ),
    "accelerators": (
        "Accelerators",
        "accelerators Accelerator NVIDIA AcceleratorSpec is_nvidia is_amd is_tpu is_trainium",
    ),
    "mig": ("MIG layouts", "mig"),
    "places": ("Places", "*"),
    "finding": ("Finding machines", "offers recommend pack"),
}
_OPTIONS = """\
    options:
      show_root_heading: true
      heading_level: 2
      heading: sky.{name}
      toc_label: sky.{name}
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def module(folder: Path) -> str:
    """Returns the README of a module with the tables of its inputs and outputs, and those of its examples, made anew
    from its .tf files."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    for head, table in ((r"input \| type \| default", _variables(folder)), ("output", _outputs(folder))):
        text, found = re.subn(rf"^\| {head} \| \|\n(?:\|.*\n)+", lambda _, new=table: new, text, flags=re.MULTILINE)
        if found != 1:
            raise SystemExit(f"{folder.name}/README.md: {found} tables that begin with: {head}")
    for example in sorted(folder.glob("examples/*/")):
        if table := _variables(example):
            text += f"\n## Inputs of examples/{example.name}\n\n{table}"
    return text


def _blocks(kind: str, folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.tf")):
        text = path.read_text(encoding="utf-8")
        yield from re.findall(rf'^{kind} "(\w+)" \{{\n(.*?)^\}}', text, re.MULTILINE | re.DOTALL)


def _argument(name: str, body: str) -> str:
    found = re.search(rf"^  {name} += (.*?)(?=^  \w|^\n|\Z)", body, re.MULTILINE | re.DOTALL)
    if not found:
        return ""
    # Lines of a type end its attributes, as commas do.
    lines = re.sub(r"(?<=[^\s({\[,])\n\s*(?=\w)", ", ", re.sub(r" *#.*", "", found[1]) if name == "type" else found[1])
    return " ".join(lines.split())


def _variables(folder: Path) -> str:
    rows = []
    for name, body in sorted(_blocks("variable", folder)):
        default = _argument("default", body)
        words = _argument("description", body).strip('"').replace('\\"', '"')
        kind = f"`{_argument('type', body)}`, {f'by default `{default}`' if default else 'required'}"
        rows.append((f"`{name}`", f"{words} {kind}."))
    return _table(("input", "meaning, type, default"), rows) if rows else ""


def _outputs(folder: Path) -> str:
    rows = [
        (f"`{name}`", _argument("description", body).strip('"')) for name, body in sorted(_blocks("output", folder))
    ]
    return _table(("output", "meaning"), rows)


def schemas() -> str:
    """Returns the page of the JSON documents that commands print: the fields of each, from docs/schemas."""
    parts = [
        "# JSON documents\n\nWhat commands print with `--json`, field by field. `[]` is each entry of a list, `*` any "
        "name; a field that may be missing has a question mark. The schemas themselves stand beside this page.\n"
    ]
    for path in sorted((ROOT / "docs" / "schemas").glob("*.json")):
        schema = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, list[str]] = {}
        for name, kind in _fields(schema, ""):
            rows.setdefault(name, []).append(kind)
        parts.append(
            f"\n## {path.stem}\n\n`{schema['title']}`: [{path.name}](../schemas/{path.name})\n\n"
            + _table(
                ("field", "type"), [(f"`{name}`", " or ".join(dict.fromkeys(found))) for name, found in rows.items()]
            )
        )
    return "".join(parts)


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for each in schema.get("anyOf", ()):
        yield from _fields(each, path)
    below = f"{path}." if path else ""
    for name, field in schema.get("properties", {}).items():
        found = f"{below}{name}{'' if name in schema['required'] else '?'}"
        yield found, _type(field)
        yield from _fields(field, found)
    if isinstance(every := schema.get("additionalProperties"), dict):
        yield f"{below}*", _type(every)
        yield from _fields(every, f"{below}*")
    for items in (schema.get("items"), *schema.get("prefixItems", ())):
        if items:
            yield from _fields(items, f"{path}[]")


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(each)}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if "items" in schema else "list"
    return str(schema.get("type", "any"))


def traits() -> str:
    """Returns the page of the traits of the providers: the meaning of each, and the providers that have each value."""
    found = {kind: read(kind) for kind in kinds()}
    parts = [
        "# Traits of providers\n\nThe abilities of each place, from `skyinfra/providers/KIND.toml`, where their "
        "sources and dates stand.\n"
    ]
    for part, model in (("boot", Boot), ("traits", Traits)):
        words = dict(re.findall(r"(\w+): (.+?)(?=\. \w+: |\.$)", " ".join(inspect.getdoc(model).split())))  # type: ignore[union-attr]
        for name in (each for each in model.model_fields if each not in _SOURCED):
            values: dict[str, list[str]] = {}
            for kind, data in found.items():
                values.setdefault(_value(getattr(getattr(data, part), name)), []).append(f"`{kind}`")
            rows = [(f"`{value}`", ", ".join(who)) for value, who in sorted(values.items())]
            parts.append(
                f"\n## {name}\n\n{words[name][0].upper()}{words[name][1:]}.\n\n" + _table(("value", "providers"), rows)
            )
    return "".join(parts)


def _value(value: object) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return {"True": "yes", "False": "no", "None": "none"}.get(str(value), str(value))


def benchmarks() -> str:
    """Returns the page of the benchmarks: the measure and the baseline of each, and the command that repeats it."""
    parts = [
        "# Benchmarks\n\nEach compares with a named baseline of the same run, so that figures of different machines "
        "can be read side by side. `make bench` runs them all, in a checkout of the repository.\n"
    ]
    for name, run in ALL.items():
        words = inspect.getdoc(inspect.getmodule(run))
        parts.append(f"\n## {name}\n\n{words}\n\n```\npython -m benchmarks {name}\n```\n")
    return "".join(parts)


def python_pages() -> dict[str, str]:
    """Returns the pages of the public names, as users write them (``sky.NAME``), and the index of all of them."""
    found = {
        page: f"# {title}\n\n" + "\n".join(_entry(name) for name in names) for page, (title, names) in _pages().items()
    }
    return {"index": _index(), **found}


def _pages() -> dict[str, tuple[str, list[str]]]:
    named = {name for _, names in PYTHON.values() for name in names.split()}
    places = [each for module, each in _public().items() if module.startswith("skyinfra.providers.")]
    rest = [name for names in places for name in names.split() if name not in named]
    return {page: (title, rest if names == "*" else names.split()) for page, (title, names) in PYTHON.items()}


def _public() -> dict[str, str]:
    found: dict[str, str] = vars(skyinfra)["_NAMES"]
    return found


def _entry(name: str) -> str:
    module = next((each for each, names in _public().items() if name in names.split()), "skyinfra")
    return f'<a id="sky.{name}"></a>\n\n::: {module}.{name}\n{_OPTIONS.format(name=name)}'


def _index() -> str:
    """Returns the page that lists all names, each with its first sentence."""
    parts = [
        "# Reference\n\nWhat `import skyinfra as sky` gives, in the order of its use. [All commands](commands.md) have "
        "a page of their own, as have the [JSON documents](json.md) that they print and the [errors](errors.md).\n"
    ]
    for page, (title, names) in _pages().items():
        rows = [(f"[`sky.{name}`]({page}.md#sky.{name})", _first_sentence(name)) for name in names]
        parts.append(f"\n## {title}\n\n" + _table(("name", "what it is"), rows))
    exceptions = sorted(each for each in errors.__all__ if each != "SkyinfraError")
    parts.append(
        f"\n## Errors\n\nAll {len(exceptions)} below [`sky.SkyinfraError`](errors.md): "
        + ", ".join(f"`sky.{name}`" for name in exceptions)
        + ".\n"
    )
    return "".join(parts)


def _first_sentence(name: str) -> str:
    words = " ".join((inspect.getdoc(getattr(skyinfra, name)) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", words)[0].replace("``", "`")
