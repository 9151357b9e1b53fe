"""Import time and ``--help``, against a Python that does nothing."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import Result, compare, python

NOTHING = ("python -c pass", python("pass"))


def run() -> Iterator[Result]:
    yield compare("import skyinfra", python("import skyinfra"), *NOTHING, aim="< 100 ms in all")
    help_text = "import sys; sys.argv = ['skyinfra', '--help']; from skyinfra.cli import main; main()"
    yield compare("skyinfra --help", python(help_text), *NOTHING, aim="< 200 ms in all")
    catalog = ("import skyinfra.accelerators", python("import skyinfra.accelerators"))
    yield compare(*catalog, *NOTHING)
    yield compare("reading the offers", python("from skyinfra import offers; offers.load()"), *catalog)
