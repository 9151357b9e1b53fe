"""CDI specifications list what stands after each change, where the machine has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from skyinfra.node import cdi


class Commands:
    """systemctl and nvidia-ctk, by what they answer: None, or why they fail."""

    def __init__(self, service: bool = False, restarts: str | None = None, generates: str | None = None) -> None:
        self.service, self.restarts, self.generates = service, restarts, generates
        self.run: list[str] = []

    def systemctl(self, *arguments: str) -> str | None:
        if arguments[0] == "cat":
            return None if self.service else "no such unit"
        self.run.append(" ".join(arguments))
        return self.restarts

    def execute(self, command: Sequence[str], seconds: float) -> str | None:
        self.run.append(" ".join([Path(command[0]).name, *command[1:]]))
        return self.generates


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def there(is_there: bool) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        if is_there:
            (folder / "nvidia-ctk").write_text("#!/bin/sh\n")
            (folder / "nvidia-ctk").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return there


@pytest.mark.parametrize(
    ("commands", "files", "has_toolkit", "run", "answer"),
    [
        (Commands(), [], True, [], None),
        (Commands(service=True), [], True, ["--no-block restart nvidia-cdi-refresh.service"], ""),
        # The service writes the one below /run itself.
        (Commands(service=True), ["run/cdi/nvidia.yaml"], True, ["--no-block restart nvidia-cdi-refresh.service"], ""),
        (
            Commands(),
            ["run/cdi/nvidia.yaml"],
            True,
            ["nvidia-ctk cdi generate --output={root}/run/cdi/nvidia.yaml"],
            "",
        ),
        (
            Commands(service=True),
            ["etc/cdi/nvidia.yaml"],
            True,
            [
                "--no-block restart nvidia-cdi-refresh.service",
                "nvidia-ctk cdi generate --output={root}/etc/cdi/nvidia.yaml",
            ],
            "",
        ),
        (
            Commands(),
            ["etc/cdi/nvidia.yaml"],
            False,
            [],
            "{root}/etc/cdi/nvidia.yaml may list devices that have gone: there is no nvidia-ctk to write it anew",
        ),
        (
            Commands(generates="no driver"),
            ["etc/cdi/nvidia.yaml"],
            True,
            ["nvidia-ctk cdi generate --output={root}/etc/cdi/nvidia.yaml"],
            "no driver",
        ),
        (
            Commands(service=True, restarts="masked"),
            [],
            True,
            ["--no-block restart nvidia-cdi-refresh.service"],
            "masked",
        ),
        # Somebody else's specification is no matter of ours.
        (Commands(), ["etc/cdi/amd.json"], True, [], None),
    ],
)
def test_refresh(
    tmp_path: Path,
    toolkit: Callable[[bool], None],
    commands: Commands,
    files: list[str],
    has_toolkit: bool,
    run: list[str],
    answer: str | None,
) -> None:
    toolkit(has_toolkit)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("old")
    told = cdi.refresh(commands.systemctl, commands.execute, tmp_path)
    assert told == (None if answer is None else answer.format(root=tmp_path))
    assert commands.run == [line.format(root=tmp_path) for line in run]
