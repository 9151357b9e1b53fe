"""The operations of a first boot, each with the real programs where this machine has them."""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ctypes.util import find_library
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_nvml.fake_machine import FakeMachine
from first_boots.boots import FirstBoot, program, step
from first_boots.runners import wheel
from servers import metadata_service
from support import missing

from skyinfra.first_boot import programs
from skyinfra.first_boot.conditions import Clock
from skyinfra.first_boot.fetch import metadata_time
from skyinfra.first_boot.operations import Driver, Packages, Trust, Units, User
from skyinfra.first_boot.programs import Failed, numbers


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def only(folder: Path, *names: str) -> str:
    """A search path with these programs of the machine, and those of *folder*."""
    folder.mkdir(exist_ok=True)
    for name in names:
        found = next(p for p in (Path(d, name) for d in os.environ["PATH"].split(":")) if p.exists())
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(found)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_python_and_runner_without_uv_and_without_an_index(packed: bool, tmp_path: Path) -> None:
    made = wheel(tmp_path / "served")
    if packed:
        plain, made = made, made.with_name(f"{made.name}.bz2")
        made.write_bytes(bz2.compress(plain.read_bytes()))
        plain.unlink()
    boot = FirstBoot(tmp_path / "node")
    venv, tools = tmp_path / "opt" / "venv", tmp_path / "opt" / "tools"
    version = ".".join(map(str, sys.version_info[:2]))
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    with served(made.parent) as url:
        # What the fleet was made with, fetched from its bucket.
        wheel_of = {"name": made.name, "sha256": sha256}
        document = {"version": 1, "python": version, "requirements": ["no==1"], "wheel": wheel_of}
        (made.parent / "versions.json").write_text(json.dumps(document))
        versions = str(tmp_path / "opt" / "versions.json")
        common = {"venv": str(venv), "tools": str(tools), "versions": versions}
        steps = [
            step("file", url=f"{url}/versions.json", path=versions),
            step("python", timeout_s=120, version=None, **common),
            step("runner", timeout_s=120, requirements=[], bucket=url, **common),
        ]
        boot.write(*steps, environment={"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
        path = only(tmp_path / "bin", "sh")
        assert boot.run(path=path).returncode == 0, boot.log.read_text()
        done = subprocess.run([venv / "bin" / "skyinfra-runner"], capture_output=True, text=True, check=True)
        assert done.stdout == "hello\n"
        before = {file: file.stat().st_mtime_ns for file in venv.rglob("*") if "__pycache__" not in file.parts}
    # Nothing is served any more, and nothing is needed.
    assert boot.run(path=path).returncode == 0
    assert [state for _, state in boot.states()] == ["started", "done"] * 3 + ["started", "skipped"] * 3
    assert before == {file: file.stat().st_mtime_ns for file in venv.rglob("*") if "__pycache__" not in file.parts}


def test_a_python_that_is_not_there_fails_by_its_version(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path / "node")
    boot.write(
        step("python", timeout_s=60, version="3.99", venv=str(tmp_path / "v"), tools=str(tmp_path / "t"), versions=""),
        environment={"PIP_NO_INDEX": "1"},
    )
    assert boot.run(path=only(tmp_path / "bin", "sh")).returncode == 1
    assert boot.lines()[-1]["error"].startswith("Python 3.99 is not on this machine, and uv")


def test_uv_is_taken_where_the_machine_has_it(tmp_path: Path) -> None:
    boot = FirstBoot(tmp_path / "node")
    venv, tools = tmp_path / "v", tmp_path / "t"
    boot.write(step("python", version="3.12", venv=str(venv), tools=str(tools), versions=""))
    program(
        tmp_path / "bin",
        "uv",
        f'echo "$@" >>{tmp_path}/calls; mkdir -p {venv}.d/bin; '
        f"printf '#!/bin/sh\\necho 3.12.7\\n' >{venv}.d/bin/python; chmod +x {venv}.d/bin/python",
    )
    path = only(tmp_path / "bin", "sh", "mkdir", "chmod", "printf")
    assert boot.run(path=path).returncode == 0
    assert boot.run(path=path).returncode == 0
    assert (tmp_path / "calls").read_text() == f"venv -q --python 3.12 {venv}.d\n"
    # The runner's user finds it there.
    assert os.access(tools / "bin" / "uv", os.X_OK)


def test_a_runner_of_another_hash_is_not_installed(tmp_path: Path) -> None:
    made = wheel(tmp_path / "served")
    boot = FirstBoot(tmp_path / "node")
    with served(made.parent) as url:
        venv = str(tmp_path / "opt" / "venv")
        (tmp_path / "opt").mkdir()
        versions = tmp_path / "versions.json"
        places = {"venv": venv, "tools": str(tmp_path / "t"), "versions": str(versions), "bucket": url}
        boot.write(step("runner", requirements=[], **places))
        for wheel_of, message in (
            ({"name": made.name, "sha256": "0" * 64}, "is not the fleet's runner"),
            (None, "names no runner: give the module runner_file, or declare image.runner"),
        ):
            versions.write_text(json.dumps({"requirements": [], "wheel": wheel_of}))
            assert boot.run().returncode == 1
            assert message in boot.lines()[-1]["error"]
    assert not list((tmp_path / "opt").iterdir())


@pytest.mark.slow
def test_what_the_runner_needs_is_installed_by_its_hash_alone(tmp_path: Path) -> None:
    needed = wheel(tmp_path / "index", "needed")
    right = hashlib.sha256(needed.read_bytes()).hexdigest()
    for name, digest in (("wrong", "0" * 64), ("right", right)):
        made = wheel(tmp_path / name, requirements=f"needed==0.1 \\\n    --hash=sha256:{digest}\n")
        boot, opt = FirstBoot(tmp_path / f"{name}-node"), tmp_path / f"{name}-opt"
        places = {"venv": str(opt / "venv"), "tools": str(opt / "tools"), "versions": str(tmp_path / "versions.json")}
        wheel_of = {"name": made.name, "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}
        version = ".".join(map(str, sys.version_info[:2]))
        Path(places["versions"]).write_text(json.dumps({"python": version, "requirements": [], "wheel": wheel_of}))
        with served(made.parent) as url:
            python = step("python", timeout_s=120, version=None, **places)
            boot.write(
                python,
                step("runner", timeout_s=120, requirements=[], bucket=url, **places),
                environment={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(needed.parent)},
            )
            done = boot.run(path=only(tmp_path / "bin", "sh"))
        installed = list((opt / "venv").glob("lib/python*/site-packages/*.dist-info"))
        names = {each.name.partition("-")[0] for each in installed}
        if name == "wrong":
            assert done.returncode == 1
            assert "DO NOT MATCH THE HASHES" in json.dumps(boot.lines()), boot.log.read_text()
            assert not names & {"skyinfra", "needed"}
        else:
            assert done.returncode == 0, boot.log.read_text()
            assert names >= {"skyinfra", "needed"}


def test_a_declared_runner_goes_with_the_versions_of_the_fleet(tmp_path: Path) -> None:
    boot, versions = FirstBoot(tmp_path / "node"), tmp_path / "versions.json"
    document = {"requirements": ["cloudpickle==1", "distributed==2"], "wheel": {"name": "x.whl", "sha256": "0" * 64}}
    versions.write_text(json.dumps(document))
    venv, tools = tmp_path / "v", tmp_path / "t"
    (venv / "bin").mkdir(parents=True)
    tools.mkdir()
    program(tools / "bin", "uv", f'echo "$@" >>{tmp_path}/calls; touch {venv}/bin/skyinfra-runner')
    places = {"venv": str(venv), "tools": str(tools), "versions": str(versions), "bucket": "s3://none"}
    boot.write(step("runner", requirements=["skyinfra==9"], **places))
    for _ in range(2):
        assert boot.run().returncode == 0, boot.log.read_text()
    wanted = f"pip install --python {venv}/bin/python -q skyinfra==9 cloudpickle==1 distributed==2\n"
    assert (tmp_path / "calls").read_text() == wanted


def test_a_certificate_is_trusted_beside_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    node, bundle = tmp_path / "node.json", tmp_path / "opt" / "ca.pem"
    node.write_text(json.dumps({"packages": {"ca_certificate": "THE CERTIFICATE\n"}}))
    trust = Trust(str(node), str(bundle))
    assert not trust.done()
    trust.do()
    assert trust.done()
    text = bundle.read_text()
    assert text.endswith("\nTHE CERTIFICATE\n")
    node.write_text(json.dumps({"packages": {"ca_certificate": "ANOTHER\n"}}))
    assert not trust.done()
    trust.do()
    assert trust.done() and bundle.read_text() == text.replace("THE CERTIFICATE", "ANOTHER")


def test_packages_where_there_is_no_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failed, match="this machine has no apt-get"):
        Packages(["git"], str(tmp_path / "stamp")).do()


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("seconds", [1.0, 60.0])
def test_the_lock_of_the_package_lists_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seconds: float
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    monkeypatch.setattr(programs, "LISTS", str(lock))
    monkeypatch.setattr(programs, "LOCK_S", 2.0 if seconds > 2 else 60.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "apt-get", 'echo "apt-get $*"')
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(lock), str(seconds)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        if seconds > 2:
            with pytest.raises(Failed, match=rf"lock is held for more than 2 s by process {other.pid}: .*python"):
                programs.apt_get("update")
            # dpkg's lock is its own affair.
            programs.apt_get("install", "update")
        else:
            programs.apt_get("update")
        other.kill()
    said = capfd.readouterr().out
    assert f"waiting for {lock}, which process {other.pid} holds" in said
    assert f"DPkg::Lock::Timeout={programs.LOCK_S:g} " in said


def test_a_wrong_clock_is_said_and_a_time_service_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    program(tmp_path / "bin", "timedatectl", f'echo "$@" >>{asked}')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    now = int(time.time())
    assert Clock(now - 1, 30).done()
    soon = Clock(now + 2, 30)
    assert not soon.done()
    soon.do()
    assert asked.read_text() == "set-ntp true\n"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    boot = FirstBoot(tmp_path / "node")
    boot.write(step("clock", made=4_000_000_000, wait_s=0.1))
    assert boot.run().returncode == 1
    told = json.loads(boot.failure.read_text())["error"]
    assert re.match(r"the clock of this machine is wrong: it says 20\d\d-.* was made after 2096-10-02 07:06;", told)


def test_a_clock_is_set_by_the_metadata_service_where_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_480_000_000.0]  # 2016
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "clock_settime", lambda which, now: clock.insert(0, now))
    date = "Mon, 23 Nov 2026 12:00:00 GMT"
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: date)
    with metadata_service.serving() as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
        # It wants a token, and says the time all the same.
        assert metadata_time() == 1_795_435_200
        Clock(1_767_225_600, 0.1).do()
        assert clock[0] == 1_795_435_200
        with pytest.raises(Failed, match="it says 2026-11-23 12:00"):
            Clock(4_000_000_000, 0.1).do()


@pytest.mark.parametrize(("there", "state"), [(["/dev/null"], True), ([], False)])
def test_the_driver_of_other_vendors(there: list[str], state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Driver.DEVICES, "aws", there[0] if there else "/dev/no-such*")
    driver = Driver("aws", "Trainium1", None)
    assert driver.done() is state
    if not state:
        with pytest.raises(Failed, match="the driver of Trainium1 is missing: no /dev/no-such"):
            driver.do()


def test_versions_are_compared_as_numbers() -> None:
    assert numbers("535.9.1") < numbers("535.104.05") < numbers("1000")
    assert numbers("525") <= numbers("525.60.13")


def test_nvidias_driver(tmp_path: Path, fake_machine: Callable[..., FakeMachine]) -> None:
    """The real operation with a fake library; without one, the driver is missing."""
    machine = fake_machine("h100_80gb")
    boot = FirstBoot(tmp_path)
    good = step("driver", name="new enough", vendor="nvidia", accelerator="H100", minimum="525")
    old = step("driver", name="too old", vendor="nvidia", accelerator="H100", minimum="100000.1")
    boot.write(good, old)
    assert boot.run(**machine.environment()).returncode == 1
    assert boot.states()[1::2] == [("new enough", "skipped"), ("too old", "failed")]
    error = boot.lines()[-1]["error"]
    assert error.startswith("the driver is ") and "H100 needs 100000.1 or later. Choose an image" in error
    # A driver that does not work is not called missing.
    for code, said in (
        (18, "driver updated: reboot"),
        (9, "driver not loaded"),
        (15, "driver 15"),
    ):
        boot.write(good)
        assert boot.run(**fake_machine("h100_80gb").environment(FAIL=f"nvmlInit_v2:{code}")).returncode == 1
        error = boot.lines()[-1]["error"]
        assert said in error and "missing" not in error
    if not find_library("nvidia-ml"):
        boot.write(good)
        assert boot.run().returncode == 1
        assert boot.lines()[-1]["error"].startswith("the driver of H100 is missing: libnvidia-ml.so.1")


def test_units_are_enabled_once_and_started_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    program(
        tmp_path / "bin",
        "systemctl",
        f'echo "$@" >>{calls}; '
        f'case "$1" in is-enabled) [ -e {tmp_path}/on ] && shift && for u; do echo enabled; done;; '
        f"is-active) [ -e {tmp_path}/on ] && echo active;; enable) touch {tmp_path}/on;; esac; true",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    venv, folder = tmp_path / "venv", tmp_path / "system"
    marker = str(tmp_path / "run" / "booted")
    units = Units(["a.service", "b.path"], ["a.service"], marker, str(venv), str(folder))
    # A declared runner may be older than the declaration.
    with pytest.raises(Failed, match="brings no units"):
        units.do()
    assert not Path(marker).exists()
    brought = venv / "lib/python3.11/site-packages/skyinfra/node/units"
    brought.mkdir(parents=True)
    for name in ("a.service", "b.path", "c.service"):
        (brought / name).write_text(f"# {name}\n")
    assert not units.done()
    units.do()
    assert units.done()
    assert calls.read_text().splitlines()[-3] == "enable -q --now --no-block a.service b.path"
    assert {file.name: file.read_text() for file in folder.iterdir()} == {
        name: f"# {name}\n" for name in ("a.service", "b.path", "c.service")
    }
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    # What a power cut has left empty, and what is of another runner.
    (folder / "a.service").write_text("")
    (brought / "b.path").write_text("# another\n")
    assert not units.done()
    units.do()
    assert units.done()
    assert calls.read_text().splitlines()[-4:-2] == ["daemon-reload", "start --no-block a.service b.path"]
    assert [(folder / name).read_text() for name in ("a.service", "b.path")] == ["# a.service\n", "# another\n"]
    # After the next start of the machine it is to say again that all is set up.
    Path(units.marker).unlink()
    assert not units.done()
    units.do()
    assert units.done()
    assert calls.read_text().splitlines()[-3] == "start --no-block a.service b.path"


def test_the_user_is_there_once(tmp_path: Path) -> None:
    if os.getuid() != 0:
        missing("root")
    import grp
    import pwd

    me = pwd.getpwuid(0).pw_name
    user = User(me, ["no-such-group"], str(tmp_path / "folder"))
    assert not user.done()
    user.do()
    assert user.done()
    assert me in [found.pw_name for found in pwd.getpwall()] and grp.getgrgid(0)
