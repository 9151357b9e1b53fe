"""Progress: what takes longer than a second says what it does and how long it took; on stderr, and nothing sooner."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from on_terminal import on_terminal, plain

from skyinfra.terminal import progress


def test_short_work_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.working("plan"):
        pass
    assert capsys.readouterr() == ("", "")


def test_long_work_is_said_while_it_lasts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT_S", 0.01)
    said = ""
    with progress.working("plan"):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
            said = capsys.readouterr().err
    assert said == "plan ...\n"
    found = capsys.readouterr()
    assert found.err.startswith("plan: ") and found.err.endswith(" s\n") and found.out == ""


def test_an_error_is_not_called_done(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SHORT_S", 0.0)
    with pytest.raises(ValueError, match="no"), progress.working("plan"):
        raise ValueError("no")
    assert "plan: " not in capsys.readouterr().err


def test_a_terminal_shows_it_at_once_and_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "cdktf.json").write_text('{"app": "sleep 0.5; exit 1"}')
    code, text = on_terminal("synth", folder=tmp_path)
    assert code == 1 and "synth: sleep 0.5; exit 1 0:00:0" in plain(text)
    # The line is erased, and the cursor shown again.
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h") and text.rindex("\x1b[2K") < text.rindex("error:")
