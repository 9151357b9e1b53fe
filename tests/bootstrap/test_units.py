"""The units of systemd that a node is given, and those that its runner brings."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from first_boots.user_data import aws, files, steps
from support import missing

from skyinfra.bootstrap import places, user_data
from skyinfra.node import code


def units_of(text: str) -> dict[str, str]:
    """The units of a node by name: those of its user data, and those that its runner brings."""
    folder = f"{places.UNITS}/"
    given = {path.removeprefix(folder): unit for path, unit in files(text).items() if path.startswith(folder)}
    inside = "skyinfra/node/units/"
    brought = {name.removeprefix(inside): data.decode() for name, data in code.sources() if name.startswith(inside)}
    assert set(given) == {"skyinfra-boot.service", "skyinfra-report.service"}
    assert not set(given) & set(brought)
    return {**given, **brought}


def test_the_runner_brings_every_unit_that_is_started() -> None:
    data = user_data(aws(nodes=2, spot=True))
    for text in (data.head, data.worker):
        arguments = steps(text)["services"]["arguments"]
        assert set(arguments["units"]) <= set(units_of(text))
        assert (arguments["venv"], arguments["folder"]) == (places.VENV, places.UNITS)


def test_units_name_the_places_of_a_node() -> None:
    """Those that travel with the runner are plain text, which nothing fills."""
    known = [value for value in vars(places).values() if isinstance(value, str) and value.startswith("/")]
    known += [
        f"{places.FOLDER}/{name}" for name in ("desired-layout.json", "upgrade.request", "end.request", "pycache")
    ]
    known += [f"{places.VENV}/bin/skyinfra-runner", f"{places.VENV}/bin/python", f"{places.VENV}/bin"]
    known += [f"{places.TOOLS}/bin", f"{places.OPT}/upgrade.json", f"{places.RUN}-runner/end.request"]
    for name, unit in units_of(user_data(aws()).head).items():
        for path in re.findall(r"(?<![\w.])/[\w./-]+", re.sub("^#.*", "", unit, flags=re.MULTILINE)):
            assert path in known or path.startswith(
                ("/usr/", "/sbin", "/bin", "/sys/fs/cgroup/system.slice/skyinfra-runner.service", "/etc/needrestart/")
            ), (name, path)


def test_units_are_good(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        missing("systemd-analyze")
    for name, content in units_of(user_data(aws()).head).items():
        # What they start is not on this machine.
        (tmp_path / name).write_text(re.sub("ExecStart=.*", "ExecStart=/bin/true", content))
    units = sorted(str(path) for path in tmp_path.iterdir())
    assert len(units) == 12
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_update_of_a_library_restarts_no_runner(tmp_path: Path) -> None:
    """Ubuntu 24.04's needrestart would, and its tasks would end."""
    unit = units_of(user_data(aws()).head)["skyinfra-runner.service"]
    [line] = re.findall("^ExecStartPre=(.*)$", unit, flags=re.MULTILINE)
    # As root, and without it the runner starts as well.
    assert line.startswith("-+/bin/sh -c ")
    folder = tmp_path / "conf.d"
    command = [part.replace("$$", "$").replace("/etc/needrestart", str(tmp_path)) for part in shlex.split(line[2:])]
    subprocess.run(command, check=True)
    assert not folder.exists()
    folder.mkdir()
    subprocess.run(command, check=True)
    [said] = folder.iterdir()
    assert said.name == "skyinfra.conf" and said.stat().st_mode & 0o777 == 0o644
    assert said.read_text() == "$nrconf{override_rc}->{qr(^skyinfra-)} = 0;\n"
    if shutil.which("perl"):
        # As needrestart reads it.
        read = "our %nrconf; do $ARGV[0]; print grep { 'skyinfra-runner.service' =~ $_ } keys %{$nrconf{override_rc}}"
        done = subprocess.run(["perl", "-e", read, str(said)], capture_output=True, text=True, check=True)
        assert done.stdout == "(?^:^skyinfra-)", done.stderr


def test_the_runner_is_unprivileged_watched_and_comes_back() -> None:
    found = units_of(user_data(aws()).head)
    unit = found["skyinfra-runner.service"].splitlines()
    for line in (
        "Type=notify",
        "User=skyinfra",
        "Restart=always",
        "StartLimitIntervalSec=0",
        "LoadCredential=secret:/etc/skyinfra/secret",
        "IPAddressDeny=169.254.169.254 fd00:ec2::254",
        "NoNewPrivileges=yes",
        "OOMPolicy=continue",
        "UMask=0077",
        "TasksMax=50%",
    ):
        assert line in unit
    # These would close the GPUs' devices.
    assert not [line for line in unit if line.startswith(("PrivateDevices", "ProtectClock", "DevicePolicy"))]
    # What reads the provider's notices and layouts needs its metadata service; what serves metrics does not.
    for name, closed in (("runner", True), ("metrics", True), ("interrupt", False), ("watch", False)):
        text = found[f"skyinfra-{name}.service"]
        assert ("\nIPAddressDeny=169.254.169.254 fd00:ec2::254\n" in text) is closed
        assert name == "runner" or "\nSystemCallFilter=~@debug " in text
        # Tasks can neither signal nor read what has another user than they.
        assert (("\nDynamicUser=yes\n" in text), ("User=skyinfra\n" in text)) == (name != "runner", name == "runner")
    partition = found["skyinfra-partition.service"]
    assert "User=" not in partition and "Type=oneshot" in partition
    for path, text in found.items():
        if path.endswith(".service"):
            assert "\nTasksMax=" in text
            # What these make is for the runner's user as well: folders of the first boot, device files of the driver.
            of_root = path.endswith(tuple(f"skyinfra-{name}.service" for name in ("boot", "partition", "upgrade")))
            assert ("\nUMask=0077\n" in text) is not of_root
    # Nothing runs before all of the first boot is done.
    for name in ("partition", "runner", "upgrade", "watch"):
        assert "ConditionPathExists=/run/skyinfra/booted\n" in found[f"skyinfra-{name}.service"]
