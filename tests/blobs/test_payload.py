"""Calls and results as bytes: what is a part of its own, and is sent once however many calls have it."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest

from skyinfra.blobs import payload
from skyinfra.blobs.payload import Payload

LARGE, OTHER = os.urandom(6 * 2**20), os.urandom(5 * 2**20)


def unpacked(packed: Payload) -> Any:
    return pickle.loads(packed.joined(), buffers=[memoryview(bytes(each)) for each in packed.buffers])


@pytest.mark.parametrize(
    "value",
    [
        LARGE,
        (LARGE, 1, OTHER, LARGE),
        {"a": [LARGE, {"b": OTHER}], "text": "x" * 2**20},
        (bytearray(LARGE), LARGE, bytearray(OTHER)),
        (LARGE, b"small", "\x8e" * 2**19, b"\x8e" * 2**19),
    ],
    ids=["alone", "again", "nested", "arrays", "like opcodes"],
)
def test_large_byte_strings_are_parts_and_come_back(value: Any) -> None:
    packed = payload.pack(value)
    found = unpacked(packed)
    assert found == value and type(found) is type(value)
    assert [bytes(each) for each in packed.buffers][:1] == [LARGE]
    # In one piece, too.
    whole = payload.pack(value, whole=True)
    assert whole.buffers == [] and pickle.loads(whole.joined()) == value


def test_the_same_object_stays_the_same_and_arrays_keep_their_order() -> None:
    first, second = unpacked(payload.pack([LARGE, LARGE]))
    assert first is second
    array = np.arange(2**20)
    found = unpacked(payload.pack((array, LARGE, array + 1, OTHER)))
    assert (found[0] == array).all() and (found[2] == array + 1).all() and found[1::2] == (LARGE, OTHER)


def test_calls_that_have_the_same_byte_string_share_its_part() -> None:
    first, second = payload.pack((1, LARGE)).parts, payload.pack((2, LARGE)).parts
    assert first[1] == second[1] and first[0] != second[0]
    assert first[1].size == len(LARGE) and first[0].size < 100


def test_what_is_small_is_in_one_piece() -> None:
    value = (b"x" * 2**20, 3)
    packed = payload.pack(value)
    assert packed.small and packed.buffers == [] and pickle.loads(packed.joined()) == value


def test_digests_are_those_of_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload, "_digests", {})
    monkeypatch.setattr(payload, "_REMEMBERED_BYTES", 11 * 2**20)
    digests = [
        payload.pack(each, again=True).parts[1].digest for each in (LARGE, OTHER, LARGE, bytes(bytearray(LARGE)))
    ]
    assert digests[0] == digests[2] == digests[3] != digests[1]
    # No more of them stay in memory than that.
    assert sum(len(each) for each, _ in payload._digests.values()) <= 11 * 2**20
    changed = bytearray(LARGE)
    changed[0] ^= 1
    assert payload.pack(bytes(changed)).parts[1].digest != digests[0]
