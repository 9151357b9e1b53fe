"""``skyinfra-runner doctor`` on a machine with the fake driver, and packages for it to examine."""

from __future__ import annotations

import json
from pathlib import Path

from fake_nvml.fake_machine import FakeMachine

from skyinfra.protocol.findings import Finding


def doctor(machine: FakeMachine, *arguments: str, **settings: str) -> tuple[int, dict[str, Finding]]:
    done = machine.python("-m", "skyinfra.runner", "doctor", "--json", *arguments, **settings)
    assert not done.stderr, done.stderr
    found = [Finding.read(each) for each in json.loads(done.stdout)["findings"]]
    return done.returncode, {finding.what: finding for finding in found}


def install(folder: Path, name: str, version: str, /, **files: str) -> None:
    """A package as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for module, text in files.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{module}.py").write_text(text)
