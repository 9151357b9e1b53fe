"""Booted nodes go over to another runner of the bucket, with jobs queued and running, and back from one that fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from booted_nodes.fleet import Fleet
from tasks_on_nodes.booted import work
from terraform_projects.commands import until

from skyinfra.bootstrap import runner_wheel
from skyinfra.client import Questions, open_questions
from skyinfra.deploy.upgrade import Upgrade, running
from skyinfra.node import code
from skyinfra.protocol.manifest import Manifest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("booted-upgrade")]

_sources = code.sources
METRICS = "skyinfra/node/units/skyinfra-metrics.service"


def carry(three: Fleet, monkeypatch: pytest.MonkeyPatch, **changed: str) -> str:
    """Puts a wheel with other files into the bucket, as a deploy does; returns its version."""

    def sources() -> Iterator[tuple[str, bytes]]:
        files = dict(_sources())
        files.update({f"skyinfra/{name.replace('__', '/')}.py": text.encode() for name, text in changed.items()})
        # Its units are others as well.
        files[METRICS] += f"# {sorted(changed)}\n".encode() if changed else b""
        yield from sorted(files.items())

    with monkeypatch.context() as inside:
        inside.setattr(code, "sources", sources)
        wheel = runner_wheel.wheel.__wrapped__()
    (three.bucket.folder / wheel.name).write_bytes(wheel.content)
    versions = json.loads((three.bucket.folder / "versions.json").read_text())
    three.bucket.put_versions({**versions, "wheel": {"name": wheel.name, "sha256": wheel.sha256}})
    return wheel.version


def upgraded(three: Fleet, pool: Questions, said: Callable[[str], object] = print) -> dict[str, str]:
    names = pool.node_names()
    upgrade = Upgrade(None, pool.manifest, pool, names, 60.0, said)  # type: ignore[arg-type]
    return upgrade.run()


def units(three: Fleet) -> set[str]:
    """The last line of a unit of every node, which systemd has read and started."""
    for machine in three.nodes:
        assert machine.show("skyinfra-metrics", "NeedDaemonReload") == "no"
        assert machine.show("skyinfra-metrics", "ActiveState") == "active"
    return {machine.read("/etc/systemd/system/skyinfra-metrics.service").splitlines()[-1] for machine in three.nodes}


def test_nodes_go_over_to_another_runner_and_back_from_one_that_fails(
    three: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What Terraform does, is done here by `carry`.
    monkeypatch.setattr(Upgrade, "_publish", lambda self: None)
    manifest = Manifest.read(three.manifest())
    with three.connect() as pool, open_questions(manifest) as asked:
        until(lambda: len(pool.slots()) == 12, seconds=120)
        first = carry(three, monkeypatch)
        assert {each.version for each in running(asked, asked.node_names()).values()} == {first}
        version = carry(three, monkeypatch, runner__added='"""Another version."""\n')
        jobs = [pool.submit(work, number, 5.0, detach=f"job-{number}") for number in range(16)]
        assert upgraded(three, asked) == {}
        assert {each.version for each in running(asked, asked.node_names()).values()} == {version}
        assert len({job.result(timeout=120) for job in jobs}) > 1
        assert [job.info().attempts for job in jobs] == [1] * 16
        assert units(three) == {"# ['runner__added']"}

        carry(three, monkeypatch, runner__serve="raise SystemExit('not built')\n")
        failed = upgraded(three, asked)
        assert set(failed) == {machine.name for machine in three.nodes}
        assert all("the new runner did not come up" in why for why in failed.values()), failed
        assert {each.version for each in running(asked, asked.node_names()).values()} == {version}
    assert units(three) == {"# ['runner__added']"}
    with three.connect() as pool:
        until(lambda: len(pool.slots()) == 12, seconds=120)
        assert pool.submit(work, 99, 0.0).result(timeout=60)
    # For a node that boots later.
    for machine in three.nodes:
        found = json.loads(machine.read("/opt/skyinfra/versions.json"))
        assert found["wheel"]["name"] == f"skyinfra-{version}-py3-none-any.whl"
