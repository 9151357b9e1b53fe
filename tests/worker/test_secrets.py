"""Secrets on a slot: masked however they come out, and gone when the task is."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyinfra.protocol import failures
from skyinfra.worker import secrets
from skyinfra.worker.secrets import Funnel, Masker

KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIJ+/=\n-----END PRIVATE KEY-----"
SECRETS = ["abab", "abababc", "pass/w0rd \"'\\", "schlüssel", KEY]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([*SECRETS, "ab", "a", "bab", "-----BEGIN", " ", "\n", "x"]), max_size=12),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_a_secret_that_comes_in_pieces_is_masked_as_a_whole_one_is(words: list[str], cuts: list[int]) -> None:
    text = "".join(words).encode()
    masker = Masker(SECRETS)
    whole = masker.stream().feed(text, final=True)
    stream, at = masker.stream(), 0
    pieces = []
    for cut in sorted(min(cut, len(text)) for cut in cuts):
        pieces.append(stream.feed(text[at:cut]))
        at = cut
    assert b"".join([*pieces, stream.feed(text[at:], final=True)]) == whole
    assert not any(secret.encode() in whole for secret in SECRETS)


def test_what_is_no_beginning_of_a_secret_is_not_held_back() -> None:
    stream = Masker(["token-1234"]).stream()
    assert stream.feed(b"50 % tok") == b"50 % "
    assert stream.feed(b"yo") == b"tokyo"
    assert stream.feed(b" token-123") == b" "
    assert stream.feed(b"", final=True) == b"token-123"


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_in_json_in_python_and_in_an_address_is_masked(secret: str) -> None:
    from urllib.parse import quote

    masker = Masker([secret])
    for shown in (secret, repr([secret]), json.dumps({"a": secret}), f"https://u:{quote(secret, safe='')}@host/"):
        assert max(secret.splitlines(), key=len) not in masker.text(shown)
        assert "***" in masker.text(shown)


def test_each_line_of_a_secret_is_masked_by_itself_unless_it_is_short() -> None:
    masker = Masker(['{\n  "key": "0123456789"\n}'])
    assert masker.text('"key": "0123456789"') == "***"
    assert masker.text("{}") == "{}"


def test_text_that_is_no_utf_8_is_masked() -> None:
    masker = Masker(["s3cret-value", "schlüssel"])
    assert masker.text("s3cret-value \ud83d caf\udce9 schl\udcc3\udcbcssel") == "*** \ufffd caf\udce9 ***"
    failure = masker.failure(failures.of(ValueError("s3cret-value \ud83d"), below=__file__))
    assert failure.summary == "ValueError: *** \ufffd"


def test_an_exception_without_the_secret_is_still_that_exception() -> None:
    try:
        try:
            raise KeyError("s3cret-value")
        except KeyError as error:
            raise ValueError("no such token: s3cret-value", {"token": ["s3cret-value"]}) from error
    except ValueError as error:
        failure = Masker(["s3cret-value"]).failure(failures.of(error, below=__file__))
    assert b"s3cret" not in pickle.dumps(failure)
    assert failure.error is not None and failure.cause is not None
    error = pickle.loads(failure.error)
    assert isinstance(error, ValueError)
    assert error.args == ("no such token: ************", {"token": ["************"]})
    assert failure.summary == "ValueError: ('no such token: ***', {'token': ['***']})"
    assert "('no such token: ***'" in failure.text and "KeyError: '***'" in failure.cause.text


def test_an_exception_of_which_a_secret_is_a_part_arrives_as_text() -> None:
    failure = Masker(["ValueError"]).failure(failures.of(ValueError("x"), below=__file__))
    assert b"ValueError" not in pickle.dumps(failure) and failure.text.endswith("***: x\n")


@pytest.fixture
def target(tmp_path: Path):
    file = tmp_path / "output"
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield file, handle
    os.close(handle)


def test_output_reaches_the_file_masked_while_it_is_written(target) -> None:
    file, handle = target
    funnel = Funnel(Masker(["s3cret-value"]), handle)
    os.write(funnel.handle, b"one s3cret-")
    deadline = time.monotonic() + 30
    while file.read_bytes() != b"one ":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.write(funnel.handle, b"value two")
    funnel.close()
    assert file.read_bytes() == b"one *** two"


def test_memory_has_no_more_than_what_waits(target) -> None:
    file, handle = target
    funnel = Funnel(Masker(["s3cret-value"]), handle)
    for _ in range(64):
        os.write(funnel.handle, b"x" * 2**20)
    deadline = time.monotonic() + 60
    while os.fstat(funnel.handle).st_blocks > 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    funnel.close()
    assert file.stat().st_size == 64 * 2**20


def test_variables_are_as_before_when_the_task_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEFORE", "as it was")
    values = {"BEFORE": "s3cret-value", "NEW": "another-one"}
    with secrets.given(values, Masker(values.values())):
        seen = subprocess.run(["/bin/sh", "-c", "printf %s $BEFORE$NEW"], capture_output=True, text=True, check=True)
        assert seen.stdout == "s3cret-valueanother-one"
        assert not {"BEFORE", "NEW"} & secrets.without(os.environ).keys()
        assert secrets.of_process().text("s3cret-value another-one") == "*** ***"
    assert os.environ["BEFORE"] == "as it was"
    assert "NEW" not in os.environ and secrets.VARIABLE not in os.environ
    assert not secrets.of_process()
