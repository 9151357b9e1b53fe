"""Print the rooms of the package: files, lines, share and imports; fail where the house is not in order.

python -m tools.house

A room is a package or a module below skyinfra/. Lazy imports and those for type checkers count. The package itself,
skyinfra/__init__.py, is the table of public names, imported by name and lazily, and no room.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "skyinfra"
MOST_SHARE = 0.12
MOST_FILES = 20


@dataclass(frozen=True)
class House:
    """The rooms as they were read. lines and imports: of each module, by its dotted name. data: how many data files of
    one kind, of which each goes with a module that is like the others, stand in a room."""

    lines: Mapping[str, int]
    imports: Mapping[str, frozenset[str]]
    data: Mapping[str, int]

    @property
    def total(self) -> int:
        """Lines of the package."""
        return sum(self.lines.values())

    def rooms(self) -> dict[str, list[str]]:
        """The modules of each room, the largest room first."""
        found: dict[str, list[str]] = {}
        for module in self.lines:
            if module != PACKAGE.name:
                found.setdefault(room(module), []).append(module)
        return dict(sorted(found.items(), key=lambda each: -self.lines_of(each[1])))

    def lines_of(self, modules: Iterable[str]) -> int:
        """Returns how many lines *modules* have together."""
        return sum(self.lines[module] for module in modules)

    def between_rooms(self) -> dict[str, frozenset[str]]:
        """The rooms that each room imports, itself left out."""
        return {
            name: frozenset({room(there) for each in modules for there in self.imports[each]} - {name})
            for name, modules in self.rooms().items()
        }

    def problems(self) -> list[str]:
        """Returns a sentence for each thing that is not in order."""
        found = [f"the rooms {' and '.join(circle)} import one another" for circle in circles(self.between_rooms())]
        found += [f"the modules {' and '.join(circle)} import one another" for circle in circles(self.imports)]
        for name, modules in self.rooms().items():
            share = self.lines_of(modules) / self.total
            if share > MOST_SHARE:
                found.append(f"the room {name} is {share:.1%} of the package, more than {MOST_SHARE:.0%}")
            # Who knows one provider knows them all.
            if len(modules) - self.data.get(name, 0) > MOST_FILES:
                found.append(f"the room {name} has {len(modules)} files, more than {MOST_FILES}")
        return found


def room(module: str) -> str:
    """The room of a module: ``skyinfra.gpu.nvml`` stands in ``gpu``."""
    return module.split(".")[1]


def read(package: Path = PACKAGE) -> House:
    """The house as it stands below *package*."""
    paths = {_name(package, path): path for path in sorted(package.rglob("*.py")) if "_bundled" not in path.parts}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    imports = {
        name: frozenset(set(_imports(name, paths[name], text, paths)) - {name, package.name})
        for name, text in texts.items()
        if name != package.name
    }
    data = Counter(path.parent.name for path in package.glob("*/*.toml"))
    return House({name: len(text.splitlines()) for name, text in texts.items()}, imports, data)


def _name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path, text: str, known: Mapping[str, Path]) -> Iterator[str]:
    top = name.split(".")[0]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], node.module or ""])
            module = base.rstrip(".") if node.level else str(node.module)
            if module.split(".")[0] == top:
                yield from (f"{module}.{a.name}" if f"{module}.{a.name}" in known else module for a in node.names)


def circles(imports: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """The groups of names that reach one another, each in order."""
    reached = {name: _reached(name, imports) for name in imports}
    found = {tuple(sorted(there for there in reached[name] if name in reached[there])) for name in imports}
    return sorted(list(group) for group in found if group)


def _reached(start: str, imports: Mapping[str, frozenset[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for there in imports.get(ahead.pop(), frozenset()) - seen:
            seen.add(there)
            ahead.append(there)
    return seen & set(imports)


def main() -> None:
    """Prints the table. Exit code 1 where something is not in order."""
    house = read()
    between = house.between_rooms()
    print(f"{'room':<14}{'files':>6}{'lines':>7}{'share':>7}  imports")
    for name, modules in house.rooms().items():
        lines = house.lines_of(modules)
        print(f"{name:<14}{len(modules):>6}{lines:>7}{lines / house.total:>7.1%}  {' '.join(sorted(between[name]))}")
    problems = house.problems()
    count = len(circles(between)) + len(circles(house.imports))
    print(f"{'total':<14}{len(house.lines):>6}{house.total:>7}{'':>7}  {count} circles")
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
