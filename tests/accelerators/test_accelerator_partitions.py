"""AMD partition modes: what goes together, how it is written, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra import Accelerator, ConcurrencyMismatch, InvalidPartition, MigNotSupported, PartitionNotSupported
from skyinfra.accelerators import catalog, partitions
from skyinfra.compiler import compile_pool

PAIRS = [(p.name, mode, memory) for p in partitions.parts() for mode, known in p.modes.items() for memory in known]


@pytest.mark.parametrize(
    ("name", "mode", "count", "size"),
    [
        ("MI300X", "SPX", 1, 8),
        ("MI300X", "DPX", 2, 4),
        ("MI300X", "QPX", 4, 2),
        ("MI300X", "CPX", 8, 1),
        ("MI325X", "CPX", 8, 1),
        ("MI300A", "TPX", 3, 2),
        ("MI300A", "CPX", 6, 1),
        ("MI355X", "QPX", 4, 2),
    ],
)
def test_a_mode_divides_the_gpu_into_equal_partitions_of_whole_xcds(
    name: str, mode: str, count: int, size: int
) -> None:
    (layout,) = Accelerator(name, partition=mode).layouts()
    assert [(p.profile, p.start, p.size) for p in layout] == [(mode, i * size, size) for i in range(count)]


def test_every_gpu_of_a_node_is_divided_alike() -> None:
    found = sky.accelerators.MI300X(count=8, partition="CPX", memory_mode="NPS4")
    assert (found.partition, found.memory_mode, found.mig) == ("CPX", "NPS4", None)
    assert [len(layout) for layout in found.layouts()] == [8] * 8
    assert len(set(found.layouts())) == 1
    assert found == sky.AcceleratorSpec.AMD.MI300X(count=8, partition="cpx", memory_mode=" nps4 ")


def test_whole_gpus_have_no_modes() -> None:
    found = sky.accelerators.MI300X(count=8)
    assert (found.partition, found.memory_mode, found.layouts()) == (None, None, ())


@pytest.mark.parametrize(("name", "mode", "memory"), PAIRS)
def test_every_pair_of_the_table_goes_together(name: str, mode: str, memory: str) -> None:
    found = Accelerator(name, partition=mode, memory_mode=memory)
    layout = found.layouts()[0]
    part = partitions.part(name)
    assert sum(p.size for p in layout) == part.xcds
    assert part.xcds % len(layout) == 0
    assert len(layout) >= int(memory[3:]), "there are no more memory domains than partitions"


def test_the_table_is_whole() -> None:
    for part in partitions.parts():
        assert catalog.variants(part.name)[0].vendor == "amd"
        assert set(part.source) <= set(partitions.sources())
        for memory in part.modes.values():
            assert memory[0] == partitions.UNIFORM
        pairs = {f"{mode}+{memory}" for mode, known in part.modes.items() for memory in known}
        assert set(part.validated) <= pairs
    data = json.loads(Path(partitions.__file__).with_name("partitions.json").read_text())
    assert set(data["unknown"]) <= set(catalog.names())
    assert {"SPX", "CPX"} <= set(data["modes"])


@pytest.mark.parametrize(
    ("text", "canonical", "memory"),
    [
        ("MI300X:8/CPX", "MI300X:8/CPX", "NPS1"),
        ("MI300X:8/CPX+NPS1", "MI300X:8/CPX", "NPS1"),
        ("MI300X:8/CPX+NPS4", "MI300X:8/CPX+NPS4", "NPS4"),
        (" amd mi300x : 8 / cpx + nps4 ", "MI300X:8/CPX+NPS4", "NPS4"),
        ("MI355X!/dpx+nps2", "MI355X!/DPX+NPS2", "NPS2"),
        ("MI300X/SPX", "MI300X/SPX", "NPS1"),
    ],
)
def test_strings(text: str, canonical: str, memory: str) -> None:
    found = Accelerator.parse(text)
    assert str(found) == canonical
    assert found.memory_mode == memory
    assert Accelerator.parse(canonical) == found
    assert sky.is_amd(text)


@pytest.mark.parametrize(
    ("text", "error", "field", "parts"),
    [
        ("MI300X/CPZ", InvalidPartition, "partition", ["Did you mean CPX?", "QPX (4), CPX (8)"]),
        ("MI300X/TPX", InvalidPartition, "partition", ["MI300X, with 8 XCDs, has no TPX", "With TPX: MI300A."]),
        ("MI300A/DPX", InvalidPartition, "partition", ["MI300A, with 6 XCDs, has no DPX", "TPX (3)"]),
        ("MI300X/DPX+NPS4", InvalidPartition, "memory_mode", ["With DPX: NPS1, NPS2. With NPS4: QPX, CPX."]),
        ("MI300X/SPX+NPS4", InvalidPartition, "memory_mode", ["With SPX: NPS1."]),
        ("MI355X/CPX+NPS4", InvalidPartition, "memory_mode", ["no memory mode of that name", "has NPS1, NPS2"]),
        ("MI300X/CPX+NPS9", InvalidPartition, "memory_mode", ["MI300X has NPS1, NPS2, NPS4"]),
        ("MI300X:8/CPX|SPX", InvalidPartition, "partition", ["every GPU of a node has the same modes"]),
        ("MI300X/", InvalidPartition, "partition", ["''", "MI300X:8/CPX+NPS4"]),
        ("MI300X/CPX*8", InvalidPartition, "partition", ["'CPX*8'", "MI300X:8/CPX"]),
        ("MI250X/CPX", PartitionNotSupported, "partition", ["MI250X has no partition modes", "MI300X, MI325X"]),
        ("MI300B/CPX", PartitionNotSupported, "partition", ["not known: no documentation of AMD"]),
        ("H100:8/CPX", PartitionNotSupported, "partition", ["H100 has no partition modes", 'mig="1g.10gb"']),
        ("Trainium2/CPX", PartitionNotSupported, "partition", ["Trainium2 has no partition modes"]),
        ("MI300X/1g.24gb", MigNotSupported, "mig", ["MI300X has no MIG", 'partition="SPX" or "DPX"']),
    ],
)
def test_what_is_refused_says_what_there_is(
    text: str, error: type[sky.SkyinfraError], field: str, parts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        Accelerator.parse(text)
    assert caught.value.field == field
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "field", "part"),
    [
        ({"memory_mode": "NPS4"}, "memory_mode", "partition= as well: QPX or CPX"),
        ({"memory_mode": "NPS9"}, "memory_mode", "SPX or DPX or QPX or CPX"),
        ({"partition": "CPX+NPS4"}, "partition", 'partition="CPX", memory_mode="NPS4"'),
        ({"partition": 8}, "partition", "given: 8"),
        ({"partition": "CPX", "memory_mode": 4}, "memory_mode", "given: 4"),
        ({"partition": "CPX", "mig": "1g.5gb"}, "partition", "one way only"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], field: str, part: str) -> None:
    with pytest.raises(InvalidPartition) as caught:
        Accelerator("MI300X", **options)
    assert caught.value.field == field
    assert part in str(caught.value)


def test_modes_of_what_is_no_amd_gpu() -> None:
    with pytest.raises(PartitionNotSupported, match="memory_mode: H100 has no partition modes"):
        Accelerator("H100", memory_mode="NPS4")
    with pytest.raises(PartitionNotSupported, match="partition: a custom accelerator has no partition modes"):
        sky.accelerators.Custom("Mine", memory="192GB", vendor="amd", partition="CPX")


def test_changes() -> None:
    found = sky.accelerators.MI300X(count=8, partition="CPX", memory_mode="NPS4")
    assert str(found.with_(count=4)) == "MI300X:4/CPX+NPS4"
    assert str(found.with_(partition="SPX")) == "MI300X:8/SPX"
    assert str(found.with_(partition=None)) == "MI300X:8"
    assert str(found.with_(name="MI325X")) == "MI325X:8/CPX+NPS4"
    with pytest.raises(InvalidPartition):
        found.with_(name="MI355X")
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


@given(st.sampled_from(PAIRS), st.none() | st.integers(1, 16), st.booleans())
def test_the_string_with_modes_parses_back(pair: tuple[str, str, str], count: int | None, exact: bool) -> None:
    name, mode, memory = pair
    found = Accelerator(name, partition=mode, memory_mode=memory, count=count, exact=exact)
    assert Accelerator.parse(str(found)) == found


@given(st.sampled_from(["MI300X", "MI300A", "MI355X", "MI300B", "H100"]), st.text("CPXSDTQN1248+/|*: ", max_size=12))
def test_no_modes_fail_in_another_way(name: str, text: str) -> None:
    try:
        found = Accelerator.parse(f"{name}/{text}")
    except sky.DeclarationError:
        return
    assert Accelerator.parse(str(found)) == found


def test_the_modes_reach_node_and_manifest() -> None:
    pool = sky.ComputePool(provider=sky.Local(simulate=True), accelerator="MI300X:8/CPX+NPS4")
    made = compile_pool(pool, "s")
    node = made.head.accelerator
    assert node is not None
    assert (node.vendor, node.count, node.memory_gb, node.memory_mode) == ("amd", 8, 192, "NPS4")
    assert [len(layout) for layout in node.layouts] == [8] * 8
    assert [(s.index, s.kind, s.profile, s.gpu) for s in made.slots] == [
        (i, "partition", "CPX", i // 8) for i in range(64)
    ]


def test_the_concurrency_is_that_of_the_partitions() -> None:
    def declare(concurrency: int) -> sky.ComputePool:
        worker = sky.Worker(concurrency=concurrency)
        return sky.ComputePool(provider=sky.Local(), accelerator="MI300X:8/CPX", worker=worker)

    assert len(compile_pool(declare(64), "s").slots) == 64
    with pytest.raises(ConcurrencyMismatch, match="gives 64 slots on each node"):
        declare(8)


def test_a_declaration_says_where() -> None:
    with pytest.raises(InvalidPartition, match=r"ComputePool\('p'\)\.accelerator\.partition: "):
        sky.ComputePool(name="p", provider=sky.Local(), accelerator="MI300X/CPZ")
    with pytest.raises(MigNotSupported, match="MI300X has no MIG"):
        sky.ComputePool(provider=sky.Local(), accelerator="MI300X", plugins=[sky.plugins.mig("1g.10gb")])
