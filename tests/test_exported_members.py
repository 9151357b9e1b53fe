"""The public names: all there, all documented, none by accident, and cheap to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import skyinfra as sky
from skyinfra import errors

SOURCE = Path(sky.__file__)


def test_every_public_name_can_be_had_and_is_documented() -> None:
    for name in sky.__all__:
        value = getattr(sky, name)
        assert name == "__version__" or value.__doc__, name
    assert set(sky.__all__) == set(dir(sky))
    assert len(sky.__all__) == len(set(sky.__all__))


def test_no_module_takes_the_place_of_a_name() -> None:
    # Importing skyinfra.NAME would put the module there.
    taken = {path.stem for path in SOURCE.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not [name for name, module in sky._LAZY.items() if name in taken]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sky, "nothing_of_the_sort")


def test_every_exception_is_public_and_says_skyinfra() -> None:
    classes = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, sky.SkyinfraError)}
    assert classes == set(errors.__all__)
    for name in classes:
        assert getattr(sky, name).__module__ == "skyinfra"
        assert name in sky.__all__


def test_type_checkers_see_every_lazy_name() -> None:
    tree = ast.parse(SOURCE.with_suffix(".pyi").read_text())
    seen = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*seen, "__version__"} == set(sky.__all__)


def test_importing_starts_nothing_heavy() -> None:
    program = "import sys, skyinfra; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {
        "jsii",
        "cdktf",
        "cdktn",
        "distributed",
        "dask",
        "boto3",
        "pydantic",
        "cryptography",
        "rich",
        "typer",
    }


def test_help_starts_nothing_heavy() -> None:
    program = (
        "import sys; sys.argv = ['skyinfra', '--help']\n"
        "from skyinfra.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(result.stderr.split()) & {"jsii", "cdktf", "cdktn", "distributed", "dask", "boto3", "pydantic"}
    for command in ("init", "synth", "plan", "deploy", "destroy", "status", "run"):
        assert command in result.stdout
