"""Tables: they fit from 60 columns on, in a fixed order, and lose nothing where no terminal is."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import cast

import pytest
from front_ends.on_terminal import on_terminal, plain
from rich.console import Console

from skyinfra import mig
from skyinfra.cli import stacks
from skyinfra.mig.drawing import boxes, compute_bar, strip
from skyinfra.terminal import screen, tables
from skyinfra.terraform.synthesized import SynthesizedStack

UUID = "MIG-1e3aad85-2ff9-58a0-bdb2-2300d6fd86d0"


def shown(width: int, *, tasks: str = "fit") -> list[str]:
    table = tables.table(
        *("NODE", "SLOT", "KIND", "UUID", "STATE", "TASK"),
        leave_out=("KIND", "UUID", "STATE"),
        ids=("UUID",),
        sentences=("TASK",),
    )
    table.add_row("mig-0", "0", "partition", UUID, "[green]ready[/]", tasks)
    out = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    out.print(table)
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def test_columns_go_in_their_order_and_ids_are_cut_in_the_middle() -> None:
    assert shown(100) == [
        f"NODE   SLOT  KIND       {'UUID':<40}  STATE  TASK",
        f"mig-0  0     partition  {UUID}  ready  fit",
    ]
    assert shown(64) == [
        f"NODE   SLOT  KIND       {'UUID':<17}  STATE  TASK",
        f"mig-0  0     partition  {screen.cut(UUID, 17)}  ready  fit",
        "Left out or cut to fit: UUID. --wide shows all.",
    ]
    assert shown(50)[0].split() == ["NODE", "SLOT", "UUID", "STATE", "TASK"]
    assert shown(50)[2].startswith("Left out or cut to fit: UUID, KIND.")
    assert shown(30)[0].split() == ["NODE", "SLOT", "STATE", "TASK"]
    assert shown(50, tasks="")[0].split() == ["NODE", "SLOT", "KIND", "UUID", "STATE"]


def test_sentences_are_folded_before_a_column_goes_for_them() -> None:
    lines = shown(80, tasks="a task with a long name, and another one that has begun before it")
    assert lines[0].split() == ["NODE", "SLOT", "KIND", "UUID", "STATE", "TASK"]
    task = " ".join(line[lines[0].index("TASK") :] for line in lines[1:-1])
    assert task == "a task with a long name, and another one that has begun before it"


def test_empty_columns_go_first_and_are_not_mentioned() -> None:
    table = tables.table("NAME", "STATE", "PROBLEM", leave_out=("STATE", "PROBLEM"))
    table.add_row("x" * 10, "running", "")
    out = Console(width=20, color_system=None, file=io.StringIO())
    out.print(table)
    assert [line.rstrip() for line in out.file.getvalue().splitlines()] == ["NAME        STATE", "xxxxxxxxxx  running"]  # type: ignore[attr-defined]


def test_a_cut_text_keeps_both_ends() -> None:
    assert screen.cut("abcdef", 6) == "abcdef"
    assert [screen.cut("abcdefghij", width) for width in (5, 4, 2, 1)] == ["ab…ij", "ab…j", "a…", "…"]


@pytest.mark.parametrize("model", ["h100_80gb", "a30_24gb"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_pictures_fit(model: str, width: int) -> None:
    geometry = mig.geometry(model)
    for layout in mig.maximal_layouts(geometry, tuple(profile.name for profile in geometry.profiles)):
        drawn = mig.picture(layout, geometry)
        for line in [*boxes(drawn, width), *compute_bar(drawn, width)]:
            assert len("".join(text for text, _ in line)) <= width
        assert len("".join(text for text, _ in strip(layout, geometry.placement_units or 0, 30))) <= 30
    assert boxes(drawn, 500) == boxes(drawn)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_offers_fit_a_terminal(columns: int) -> None:
    code, text = on_terminal("offers", "H100:8", columns=columns)
    # Below the table are sentences, which the terminal folds and which can be copied.
    table = plain(text).partition("Not deployable")[0].splitlines()
    assert code == 0 and len(table) > 5
    assert max(map(len, table)) <= columns
    assert ("PARTITIONED BY" in table[0]) == (columns == 200)


def test_wide_and_pipes_show_all() -> None:
    code, text = on_terminal("offers", "H100:8", "--wide", columns=60)
    assert code == 0 and "Left out" not in text
    assert {"PARTITIONED", "VCPUS", "DEPLOYABLE"} <= set(plain(text).splitlines()[0].split())


def test_no_color_and_ascii() -> None:
    _, coloured = on_terminal("mig", "show", "H100", "3g.40gb")
    assert re.search(r"\x1b\[[\d;]*4[0-8][\d;]*m", coloured)
    _, text = on_terminal("mig", "show", "H100", "3g.40gb", NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*[34]\d", text)
    assert plain(text).splitlines() == plain(coloured).splitlines()
    code, text = on_terminal("offers", "H100:8", columns=60, PYTHONIOENCODING="ascii")
    assert code == 0 and text.isascii()


def test_what_an_encoding_lacks_is_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    screen.print_on(stream)
    print("MIG…d0 ± │ é", file=stream, flush=True)
    assert raw.getvalue() == b"MIG~d0 +- | ?\n"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_pools_of_a_plan_keep_what_one_needs(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = {
        **{"name": "mig", "provider": "aws", "nodes": 2, "machine_types": ["p5.48xlarge"], "simulated": False},
        **{"accelerator": "H100:8/3g.40gb+2g.20gb+1g.10gb*2", "slots_per_node": 32, "hourly_cost": 55.04},
        "price_note": "us-east-1, 2026-07-20",
    }
    stack = SimpleNamespace(name="inference", pools=(pool,))
    out = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(tables, "console", lambda **_: out)
    stacks.show_choices([cast(SynthesizedStack, stack)])
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert {"POOL", "NODES", "MACHINE", "ACCELERATOR", "SLOTS/NODE", "PRICE"} <= set(lines[0].split())
    assert " 32 " in lines[1] and "$110.08/h" in lines[1] and ("p5.48xlarge" in lines[1] or width == 60)
