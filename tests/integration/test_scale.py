"""`skyinfra scale`: another number of nodes by an apply, which later deploys keep, at a cloud of the mock bed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import gcp_answers, of_project
from mock_provider.bed import Bed, served
from terraform_projects.commands import skyinfra

pytestmark = pytest.mark.slow

POOL = 'sky.ComputePool(name="t", nodes={}, accelerator="A100-40GB:8", provider=sky.GCP(project="p"))'


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    with served(tmp_path, "google") as made:
        gcp_answers(made.world)
        of_project(made.world, "p")
        for name in ("TF_CLI_CONFIG_FILE", "TF_REATTACH_PROVIDERS"):
            monkeypatch.setenv(name, made.environment[name])
        project = tmp_path / "project"
        skyinfra(tmp_path, "init", str(project), "--stack", "s")
        made.folder = project
        main = project / "main.py"
        text = main.read_text()
        begin = text.index("pools=[")
        main.write_text(text[:begin] + f"pools=[{POOL.format('sky.Range(1, 4)')}])\n\napp.synth()\n")
        yield made


def run(bed: Bed, *words: str, code: int = 0) -> str:
    done = skyinfra(bed.folder, *words, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def machines(bed: Bed) -> set[str]:
    return set(bed.world.existing("google_compute_instance"))


def chosen(bed: Bed) -> Any:
    file = bed.folder / "skyinfra.places.json"
    return json.loads(file.read_text())["fleets"]["s/t"] if file.exists() else None


def unchanged(bed: Bed) -> bool:
    return "no changes" in run(bed, "plan") and "no changes" in run(bed, "deploy", "--auto-approve")


def test_the_number_of_the_file_is_kept_by_every_later_deploy(bed: Bed) -> None:
    run(bed, "deploy", "--auto-approve", "--no-wait")
    first = machines(bed)
    assert len(first) == 1 and unchanged(bed)
    # What must not be: https://github.com/n8n-io/terraform-aws-n8n/issues/50, a later apply that sets the number back.
    for nodes in (3, 4, 2):
        said = run(bed, "scale", "s/t", str(nodes), "--auto-approve", "--no-wait")
        assert f"s/t has {nodes} nodes: skyinfra.places.json says so" in said and f"{nodes} (of 1 to 4)" in said
        assert len(machines(bed)) == nodes and first <= machines(bed), "those that stay are those that there were"
        assert chosen(bed) == {"nodes": nodes} and unchanged(bed)
    # A reviewed change of the file by hand is the same, without this command: for `cdktf deploy`.
    file = bed.folder / "skyinfra.places.json"
    file.write_text(file.read_text().replace('"nodes": 2', '"nodes": 3'))
    run(bed, "deploy", "--auto-approve", "--no-wait")
    assert len(machines(bed)) == 3
    run(bed, "destroy", "--auto-approve")
    assert chosen(bed) is None and not machines(bed)


def test_what_cannot_be_is_said_and_leaves_the_file_as_it_was(bed: Bed) -> None:
    run(bed, "scale", "s/t", "2", "--auto-approve", "--no-wait")
    before = chosen(bed), machines(bed)
    assert (
        "sky.Range(1, 4)" in (said := run(bed, "scale", "s/t", "9", "--auto-approve", code=2)) and "from 1 to 4" in said
    )
    assert "nobody can be asked here" in run(bed, "scale", "s/t", "3", code=2)
    assert "no such pool" in run(bed, "scale", "s/other", "3", "--auto-approve", code=2)
    run(bed, "scale", "s/t", "0", code=2)
    assert (chosen(bed), machines(bed)) == before
    # A range that leaves the number out is said by its name, and the command itself mends it.
    main = bed.folder / "main.py"
    text = main.read_text()
    main.write_text(text.replace("sky.Range(1, 4)", "sky.Range(3, 4)"))
    assert "skyinfra scale s/t N, from 3 to 4" in run(bed, "plan", code=2)
    run(bed, "scale", "s/t", "3", "--auto-approve", "--no-wait")
    assert len(machines(bed)) == 3
    main.write_text(text.replace("sky.Range(1, 4)", "3"))
    assert "s/t declares nodes=3" in run(bed, "scale", "s/t", "4", "--auto-approve", code=2) and unchanged(bed)
