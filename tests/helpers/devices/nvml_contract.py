"""The two worlds that keep the contract of NVML, as a fixture, and what its tests have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml.fake_machine import FakeMachine

from devices.nvml_worlds import SETTINGS, Fake, Simulated, World

Make = Callable[..., World]
AMPERE, HOPPER = "a100_40gb", "h100_80gb"
BOTH = pytest.mark.parametrize("model", [AMPERE, HOPPER])

# The hostile one does all that the other does.
WORLDS = ["simulated", "fake-hostile", pytest.param("fake", marks=pytest.mark.slow)]


@pytest.fixture(params=WORLDS)
def world(
    request: pytest.FixtureRequest, memory_path: Path, fake_machine: Callable[..., FakeMachine]
) -> Iterator[Make]:
    """``world("h100_80gb", count=2)``: a machine with these GPUs, NVML open; None is a GPU without MIG."""
    with contextlib.ExitStack() as stack:

        def make(model: str | None = HOPPER, count: int = 1) -> World:
            if request.param == "simulated":
                return Simulated(model, count, memory_path)
            # Built only where it is asked for.
            machine = fake_machine(",".join([model or "t4"] * count), **SETTINGS[request.param])
            stack.enter_context(machine.loaded())
            return Fake(machine)

        yield make


def refused(code: int, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    with pytest.raises(pynvml.NVMLError) as caught:
        function(*arguments, **keywords)
    assert caught.value.value == code
