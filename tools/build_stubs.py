"""Write the files that repeat the code: skyinfra/__init__.pyi, accelerators/_names.pyi and docs/errors.md.

python tools/build_stubs.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "# Written by tools/build_stubs.py from {}; do not edit."


def accelerators() -> str:
    """The factories by name; the same catalog gives the same text."""
    from skyinfra.accelerators.factories import identifiers

    lines = [NOTE.format("catalog.json"), "from skyinfra.accelerators.factories import Factory as _Factory", ""]
    return "\n".join(lines + [f"{name}: _Factory" for name in identifiers()]) + "\n"


def public() -> str:
    """The public names, from the table in skyinfra/__init__.py and the exceptions."""
    import skyinfra as sky

    names = {module: names.split() for module, names in sky._NAMES.items()}
    names["skyinfra.errors"] = list(sky._errors.__all__)
    lines = [NOTE.format("the table in __init__.py")]
    lines += sorted({f"import {place.split(':')[0]}" for place in sky._UPWARD.values()})
    for module in sky._MODULES:
        lines.append(f"from skyinfra import {module} as {module}")
    for module in sorted(names):
        lines += [f"from {module} import {name} as {name}" for name in sorted(names[module])]
    for name, place in sky._UPWARD.items():
        lines.append(f"{name} = {place.replace(':', '.')}")
    return "\n".join([*lines, "", "__version__: str", "__all__: list[str]"]) + "\n"


ERRORS = """\
# Errors

<!-- Written by tools/build_stubs.py from the docstrings of skyinfra/errors; do not edit. -->

Every error that skyinfra raises on purpose is one of these classes, as `skyinfra.NAME`; `except` with a class catches
those below it too. An error has `message`, `field`, `given`, `hint` and `exit_code`. The command line prints it without
a traceback and exits with its `exit_code`: 2 where the input is wrong, else 1. With `SKYINFRA_DEBUG=1` the traceback is
printed as well; `skyinfra doctor` looks for what is wrong on nodes.

"""


def errors() -> str:
    """The tree of exceptions, each with the first sentence of its docstring, and that of its cure."""
    from skyinfra.errors import SkyinfraError

    def lines(cls: type[SkyinfraError], depth: int) -> list[str]:
        parts = [" ".join(part.split()) for part in cls.__doc__.split("\n\n")]
        sentence = " ".join([parts[0], *(f"*{part[:5]}*{part[5:]}" for part in parts if part.startswith("Cure: "))])
        below = [each for each in cls.__subclasses__() if each.__module__ == "skyinfra"]
        own = f"{'  ' * depth}- `{cls.__name__}`: {sentence}"
        return [
            own,
            *(line for each in sorted(below, key=lambda each: each.__name__) for line in lines(each, depth + 1)),
        ]

    return ERRORS + "\n".join(lines(SkyinfraError, 0)) + "\n"


STUBS = {
    "skyinfra/accelerators/_names.pyi": accelerators,
    "skyinfra/__init__.pyi": public,
    "docs/errors.md": errors,
}


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    sys.path.insert(0, str(ROOT))
    for name, build in STUBS.items():
        path, text = ROOT / name, build()
        if not arguments:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{name} is out of date: run tools/build_stubs.py")


if __name__ == "__main__":
    main(sys.argv[1:])
