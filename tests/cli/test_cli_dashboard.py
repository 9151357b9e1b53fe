"""``skyinfra dashboard`` of a fleet that is gone: the page of what was kept of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path

import pytest
from front_ends.still_fleet import job_of

from skyinfra.cli import nodes


def kept(folder: Path, number: int, log: str | None) -> None:
    """Leaves the record of a job in the store of *folder*, as the version before did."""
    job = job_of(number, state="failed", slot="n1/0", problem="ValueError: no")
    place = folder / ".skyinfra" / ".jobs" / "demo" / "mig" / job.key
    place.mkdir(parents=True)
    record = {"version": 1, "kept": 7.0, "job": job.to_json(), "logged": log is not None, "note": None}
    (place / "record.json").write_text(json.dumps(record))
    if log is not None:
        (place / "output.log").write_text(log)


def test_the_page_of_a_fleet_that_is_gone(tmp_path: Path) -> None:
    kept(tmp_path, 1, "first\n")
    kept(tmp_path, 2, None)
    run = {"node": "mig-0", "machine": "m-0", "began": 0.0, "seconds": 7200.0}
    hours = {"version": 1, "ledger": "l1", "at": 7200.0, "runs": [run], "uses": []}
    price = {"usd_per_hour": 55.04, "region": "us-east-1", "date": "2026-07-20", "basis": "listed"}
    machine = {"machine_type": "p5.48xlarge", "price": price, "source": "", "free": False, "assumed": False}
    ledgers = [{"hours": hours, "machines": {"mig-0/m-0": machine}}]
    spent = tmp_path / ".skyinfra" / ".jobs" / "demo" / "mig" / "spent.json"
    spent.write_text(json.dumps({"version": 1, "ledgers": ledgers}))
    command = [sys.executable, "-m", "skyinfra.cli", "dashboard", "demo/mig", "--no-browser"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as program,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(program.kill)
        assert program.stdout is not None and program.stderr is not None
        url = re.search(r"http://\S+", program.stdout.readline())
        assert url, program.stderr.read()
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with visitor.open(url[0], timeout=60) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        here = url[0].partition("?")[0]
        with visitor.open(f"{here}/state", timeout=60) as answer:
            found = json.load(answer)
        assert [each["name"] for each in found["jobs"]] == ["job-2", "job-1"]
        assert found["kept"]["why"] == "the fleet is gone"
        cost = {"at": 7200.0, "hours": 2.0, "usd": 110.08, "estimated": False, "unknown": []}
        assert found["spent"] == {"where": os.fspath(spent.parent.parent), **cost}
        with visitor.open(f"{here}/log?node=n1&task={found['jobs'][1]['key']}", timeout=60) as answer:
            assert json.load(answer)["text"] == "first\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            visitor.open(here.replace("/fleet", "/status"), timeout=60)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(here, timeout=60)
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=60)
    assert "the fleet is gone: the page shows its 2 jobs kept in " in said
    assert "Traceback" not in said


def test_the_jobs_are_shown_where_what_the_fleet_has_cost_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, 1, None)
    (tmp_path / ".skyinfra" / ".jobs" / "demo" / "mig" / "spent.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    assert nodes._spent_of_gone("demo/mig") is None
    assert "mig/spent.json: cannot be read" in capsys.readouterr().err


def test_a_fleet_of_which_nothing_is_kept_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyinfra.cli", "dashboard", "demo/mig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr and done.stdout == ""
