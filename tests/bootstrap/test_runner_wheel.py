"""The runner as a wheel: the code that runs here, the same bytes for the same code, good for pip."""

from __future__ import annotations

import ast
import base64
import bz2
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.bootstrap import runner_wheel, steps
from skyinfra.cli.stacks import show_differing
from skyinfra.node import code
from tools import runner_requirements

# A requirement with its hashes.
NEED = r"(?m)^([a-z0-9-]+==[^\s;]+)((?:.*\\\n)+.*)$"


def install(wheel: runner_wheel.Wheel, folder: Path) -> Path:
    (folder / wheel.name).write_bytes(wheel.content)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*pip, str(folder / wheel.name)], check=True, capture_output=True)
    return folder / "site"


def python(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment, cwd=site.parent
    )


def test_what_is_installed_from_it_is_the_code_that_runs_here(tmp_path: Path) -> None:
    wheel = runner_wheel.wheel()
    site = install(wheel, tmp_path)
    here = Path(runner_wheel.__file__).parents[1]
    for room in ("runner", "mig", "protocol", "tasks", "worker", "head", "gpu", "errors"):
        files = {path.relative_to(here) for path in (here / room).rglob("*") if path.suffix in (".py", ".json")}
        assert files
        for file in files:
            assert (site / "skyinfra" / file).read_bytes() == (here / file).read_bytes()
    assert not (site / "skyinfra" / "cli").exists()
    found = python(site, "-c", "import skyinfra, skyinfra.runner; print(skyinfra.__file__, skyinfra.instance_info)")
    assert str(site) in found.stdout
    # What a module of tasks says on a node, where it was synced to.
    decorated = "import skyinfra as sky\n@sky.compute(timeout=1)\ndef f(): return 7\nprint(f())"
    environment_of_a_slot = f"import os; os.environ['SKYINFRA_SLOT'] = '{{}}'\n{decorated}"
    assert python(site, "-c", environment_of_a_slot).stdout == "7\n"
    shown = python(site, "-m", "skyinfra.runner", "--help").stdout
    assert "partition" in shown
    named = python(
        site, "-c", "from importlib import metadata as m; print(m.version('skyinfra'), m.requires('skyinfra'))"
    )
    assert wheel.version in named.stdout
    for pin in runner_wheel.pins():
        assert pin in named.stdout


def test_what_is_carried_in_metadata_is_that_code_line_by_line_without_its_docstrings(tmp_path: Path) -> None:
    wheel = runner_wheel.wheel()
    name, content = runner_wheel.packed(wheel)
    carried = runner_wheel.Wheel(wheel.name, wheel.version, bz2.decompress(content), "")
    assert name == f"{wheel.name}.bz2" and len(content) < len(bz2.compress(wheel.content)) * 0.9
    whole, bare = (zipfile.ZipFile(io.BytesIO(each.content)) for each in (wheel, carried))
    assert whole.namelist() == bare.namelist()
    for file in whole.namelist():
        if file.endswith(".py"):
            assert parsed(whole.read(file)) == parsed(bare.read(file)), file
        elif not file.endswith("/RECORD"):
            assert whole.read(file) == bare.read(file), file
    site = install(carried, tmp_path)
    assert "partition" in python(site, "-m", "skyinfra.runner", "--help").stdout
    for row in next(site.glob("*.dist-info/RECORD")).read_text().splitlines():
        path, digest, _ = row.rsplit(",", 2)
        if digest and path.startswith("skyinfra/"):
            found = hashlib.sha256((site / path).read_bytes()).digest()
            assert digest == f"sha256={base64.urlsafe_b64encode(found).rstrip(b'=').decode()}"


def parsed(source: bytes) -> str:
    """Returns the tree of *source* with the places of everything, but its docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None and (len(node.body) > 1 or isinstance(node, ast.Module))
        ):
            del node.body[0]
    return ast.dump(tree, include_attributes=True)


def test_the_same_code_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wheel = runner_wheel.wheel()
    assert hashlib.sha256(wheel.content).hexdigest() == wheel.sha256
    copy = tmp_path / "skyinfra"
    shutil.copytree(Path(runner_wheel.__file__).parents[1], copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "_PACKAGE", copy)
    runner_wheel.wheel.cache_clear()
    try:
        for path in copy.rglob("*"):
            os.utime(path, (1, 1))
        assert runner_wheel.wheel() == wheel
        with (copy / "runner" / "serve.py").open("a") as file:
            file.write("# more\n")
        runner_wheel.wheel.cache_clear()
        changed = runner_wheel.wheel()
        assert changed.version != wheel.version
        assert changed.name != wheel.name
        assert changed.sha256 != wheel.sha256
    finally:
        runner_wheel.wheel.cache_clear()


def test_nothing_in_it_is_compressed(tmp_path: Path) -> None:
    wheel = runner_wheel.wheel()
    (tmp_path / wheel.name).write_bytes(wheel.content)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.testzip() is None


def test_it_brings_the_hashes_of_all_that_it_needs() -> None:
    made = runner_wheel.wheel()
    with zipfile.ZipFile(io.BytesIO(made.content)) as archive:
        [name] = [each for each in archive.namelist() if each.endswith(".dist-info/requirements.txt")]
        text = archive.read(name).decode()
    found = {need: re.findall(r"sha256:([0-9a-f]{64})", rest) for need, rest in re.findall(NEED, text)}
    installed = {f"{name}=={metadata.version(name)}" for name in runner_requirements.closure()}
    assert set(found) == installed, "run python -m tools.runner_requirements"
    assert all(found.values())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives this machine other versions of packages; None stands for none."""

    def have(**versions: str | None) -> None:
        ours = runner_wheel.version_of.__wrapped__
        monkeypatch.setattr(runner_wheel, "version_of", lambda name: versions[name] if name in versions else ours(name))
        runner_wheel.wheel.cache_clear()

    yield have
    monkeypatch.undo()
    runner_wheel.wheel.cache_clear()


def test_whatever_the_client_has_nodes_get_versions_and_hashes_of_the_release(client: Callable[..., None]) -> None:
    """Of a client with newer packages the wheel had brought no hashes, and nodes checked none."""
    before, pins = runner_wheel.wheel(), steps.pins()
    client(cloudpickle="3.1.3", distributed="2026.8.1", dask="2026.8.1", msgpack=None, cryptography="99.0")
    assert runner_wheel.wheel() == before and steps.pins() == pins
    with zipfile.ZipFile(io.BytesIO(before.content)) as archive:
        [about] = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        needs = re.findall(r"Requires-Dist: (.*)", archive.read(about).decode())
        text = archive.read(about.replace("METADATA", "requirements.txt")).decode()
    hashed = {need for need, _ in re.findall(NEED, text)}
    assert needs and {*needs, *pins} <= hashed


def test_a_client_that_differs_says_so(client: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    release = runner_wheel.release()
    assert runner_wheel.differing() == {}
    show_differing()
    assert capsys.readouterr() == ("", "")
    runner_wheel.check_client()
    client(cloudpickle="3.1.3", msgpack=None)
    assert runner_wheel.differing() == {
        "cloudpickle": ("3.1.3", release["cloudpickle"]),
        "msgpack": (None, release["msgpack"]),
    }
    runner_wheel.check_client()  # pickles of the one are read by the other
    show_differing()
    said = capsys.readouterr().err
    assert f"cloudpickle {release['cloudpickle']}, here 3.1.3; msgpack {release['msgpack']}, here none" in said
    assert f"pip install cloudpickle=={release['cloudpickle']} msgpack=={release['msgpack']}" in said


def test_a_block_that_could_run_no_task_buys_nothing(
    client: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    client(distributed="2026.7.0")
    pool = sky.ComputePool(provider=sky.AWS(region="us-east-1"), accelerator="L4")
    with pytest.raises(sky.VersionMismatch, match=r"2026\.7\.0\n.*pip install 'distributed=="), pool:
        pass
    assert not list(tmp_path.iterdir())
