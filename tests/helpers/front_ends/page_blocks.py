"""The code blocks of a page, and a program that runs those of Python: ``python page_blocks.py PAGE < prelude``.

A block that runs nowhere has a comment above it, ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r'^( *)```(\w*)(?: title="([\w.]+)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)(?:^(?:    .*)?\n)*", re.MULTILINE)
_REASON = re.compile(r"<!-- not run: (.+?) -->\n+$", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One block. language: "" where none is named. reason: the words of the comment that says why it does not run."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of *page* in their order, fenced and indented."""
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    # Of the same length, so that places stay what they are.
    rest = _FENCE.sub(lambda found: re.sub(r"[^\n]", "-", found[0]), text)
    found = [(each.start(), each[2], each[3], each[4]) for each in fences]
    found += [(each.start(), "", None, each[0]) for each in _indented(rest)]
    made = []
    for start, language, title, body in sorted(found):
        reason = _REASON.search(text[:start])
        line = text.count("\n", 0, start) + 1
        made.append(Block(page, line, language, title, textwrap.dedent(body).strip("\n") + "\n", reason and reason[1]))
    return made


def _indented(text: str) -> Iterator[re.Match[str]]:
    """Indented blocks; not the paragraphs of an entry of a list."""
    for found in _INDENTED.finditer(text):
        before = text[: found.start()]
        outer = next((line for line in reversed(before.splitlines()) if line and not line.startswith(" ")), "")
        if before.endswith("\n\n") and not re.match(r"(- |\d+\. )", outer):
            yield found


def commands(block: Block) -> list[str]:
    """The command lines of a block; where it has prompts, the other lines are what the commands print."""
    lines = [line for line in block.text.splitlines() if line.strip()]
    if prompts := [line[2:] for line in lines if line.startswith("$ ")]:
        return prompts
    return lines


def run(block: Block, names: dict[str, Any]) -> list[object]:
    """Runs a block of Python as one that stands in *names*; returns the values of its expressions."""
    values = []
    for node in ast.parse(block.text, block.place).body:
        if isinstance(node, ast.Expr):
            code = compile(ast.Expression(node.value), block.place, "eval")
        else:
            code = compile(ast.Module([node], []), block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, names)
        if inspect.iscoroutine(value):
            asyncio.run(value)
        elif isinstance(node, ast.Expr):
            values.append(value)
    return values


def declared(values: list[object]) -> Iterator[Any]:
    """The pools among *values*, and one with each provider among them."""
    import skyinfra as sky
    from skyinfra.providers import Provider

    for value in values:
        if isinstance(value, sky.ComputePool):
            yield value
        elif isinstance(value, Provider):
            yield from _pools(value)


# What a pool of a provider needs beside the provider, where it is more than a name.
_GPU = {
    "aws": "L4",
    "digitalocean": "H100",
    "gcp": "H100:8",
    "lambda": "GH200",
    "vastai": "RTX-4090:2",
    "verda": "H100",
}


def _pools(provider: Any) -> Iterator[Any]:
    import skyinfra as sky

    runner = f"https://packages.example.com/skyinfra-0.1.0-py3-none-any.whl#sha256={'a' * 64}"
    image = sky.Image(runner=runner) if provider.kind == "vastai" else sky.Image()
    spot = getattr(provider, "bid", None) is not None
    more = {"max_hourly_cost": 2} if provider.kind == "vastai" and not spot else {}
    if provider.kind == "container":
        accelerator = "H100:2" if provider.gpus else None
    else:
        accelerator = "H200:8" if getattr(provider, "gpudirect", False) else _GPU[provider.kind]
    yield sky.ComputePool(name="shown", provider=provider, accelerator=accelerator, image=image, spot=spot, **more)


def main() -> None:
    """Runs the prelude before each block, for what the page takes as given; compiles what is declared."""
    from skyinfra.compiler import compile_pool

    page = Path(sys.argv[1])
    names: dict[str, Any] = {"__name__": "__main__"}
    prelude = compile(sys.stdin.read(), "prelude", "exec")
    ran = 0
    for block in blocks(page):
        if block.language != "python" or block.title or block.reason:
            continue
        exec(prelude, names)
        before = dict(names)
        values = run(block, names)
        values += [value for name, value in names.items() if before.get(name) is not value]
        for pool in declared(values):
            deployment = compile_pool(pool, "shown")
            assert deployment.slots and deployment.head.to_json(), block.place
            print(f"{block.place}: {deployment.fleet}: {len(deployment.slots)} slots")
        print(f"{block.place}: ran")
        ran += 1
    assert ran, "a page without blocks is not run"


if __name__ == "__main__":
    main()
