"""Many runs of ``skyinfra-runner`` on the fake driver, each in a process that is forked after the imports.

A program: reads jobs as JSON from stdin and writes their results as JSON to stdout. Every job begins with the machine
that stands in the file ``start``; a run is a command line with its environment, or a command of fake-nvml-ctl.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Loaded before the first fork; the driver is not: that happens with nvmlInit.
import skyinfra.gpu.exports
import skyinfra.gpu.hardware
import skyinfra.gpu.targets
import skyinfra.runner.partition_cli  # noqa: F401
from skyinfra.runner import cli


def main() -> None:
    jobs = json.load(sys.stdin)
    json.dump(_all(jobs), sys.stdout)


def _all(jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of the jobs. What follows on the same machine, byte by byte, is run once."""
    state = Path(os.environ["FAKE_NVML_STATE"])
    known: dict[tuple[bytes, str], list[dict[str, Any]]] = {}
    results = []
    for job in jobs:
        shutil.copy(job["start"], state)
        first, *rest = job["runs"]
        done = _run(first)
        left = (state.read_bytes(), json.dumps(rest))
        if left not in known:
            known[left] = [_run(run) for run in rest]
        results.append([done, *known[left]])
    return results


def _run(run: dict[str, Any]) -> dict[str, Any]:
    if "control" in run:
        done = subprocess.run(["fake-nvml-ctl", run["control"]], capture_output=True, text=True, check=True)
        return {"code": 0, "out": done.stdout}
    with os.fdopen(os.memfd_create("out"), "r+b") as out, os.fdopen(os.memfd_create("err"), "r+b") as err:
        child = os.fork()
        if child == 0:
            _become(run, out.fileno(), err.fileno())
        status = os.waitpid(child, 0)[1]
        return {"code": os.waitstatus_to_exitcode(status), "out": _text(out), "err": _text(err)}


def _become(run: dict[str, Any], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(run.get("environment", {}))
    code = 70
    try:
        code = cli.main(run["arguments"])
    except SystemExit as error:
        code = int(str(error.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _text(file: io.BufferedRandom) -> str:
    """The text that was written, but for the line that says that a run beside it is waited for."""
    file.seek(0)
    return "".join(line for line in file.read().decode().splitlines(True) if not line.startswith("another process"))


if __name__ == "__main__":
    main()
