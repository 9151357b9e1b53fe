"""How GPUs were found comes back, whatever stood there since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from devices.partitioning import profiles, run
from fake_nvml.fake_machine import FakeMachine

Machine = Callable[..., FakeMachine]


@pytest.mark.parametrize("first", ["off", "1g.10gb*2", "2g.20gb+1g.10gb"])
def test_a_layout_comes_back(fake_machine: Machine, tmp_path: Path, first: str) -> None:
    machine = fake_machine("h100_80gb")
    file = str(tmp_path / "found.json")
    run(machine, "--layout", first)
    before = machine.show()[0]
    assert run(machine, "--save", file).returncode == 0
    assert run(machine, "--layout", "3g.40gb*2").returncode == 0
    # What is noted already stays.
    run(machine, "--save", file)
    done = run(machine, "--restore", file)
    assert done.returncode == 0, done.stderr
    after = machine.show()[0]
    assert sorted((i["profile"], i["start"]) for i in after["instances"]) == sorted(
        (i["profile"], i["start"]) for i in before["instances"]
    )
    assert after["current"] == before["current"]


@pytest.mark.parametrize("now", ["1g.10gb*7", "off"])
def test_mig_without_partitions_comes_back(fake_machine: Machine, tmp_path: Path, now: str) -> None:
    machine = fake_machine("h100_80gb")
    file = tmp_path / "found.json"
    file.write_text('{"version": 1, "gpus": [{"gpu": 0, "mig": true, "partitions": []}]}')
    run(machine, "--layout", "1g.10gb*7")
    mode = machine.show()[0]["current"]
    run(machine, "--layout", now)
    assert run(machine, "--restore", str(file)).returncode == 0
    assert profiles(machine) == [[]] and machine.show()[0]["current"] == mode


def test_a_file_that_says_nothing_changes_nothing(fake_machine: Machine, tmp_path: Path) -> None:
    machine = fake_machine("h100_80gb")
    file = tmp_path / "found.json"
    for text in ("", "{}", '{"gpus": [{"gpu": 0}]}'):
        file.write_text(text)
        done = run(machine, "--restore", str(file))
        assert done.returncode == 2 and str(file) in done.stderr


def test_without_a_driver_there_is_nothing_to_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyinfra.errors import AcceleratorMissing
    from skyinfra.gpu import snapshot
    from skyinfra.gpu.hardware import session
    from skyinfra.gpu.nvml import Nvml
    from skyinfra.gpu.partitioner import ApplyOptions

    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    with pytest.raises(AcceleratorMissing), session(Nvml()):
        pytest.skip("this machine has a driver")
    file = tmp_path / "found.json"
    snapshot.save(file, Nvml())
    snapshot.restore(file, Nvml(), emit=lambda event: None, options=ApplyOptions())
    assert file.read_text() == '{"version": 1, "gpus": []}\n'
