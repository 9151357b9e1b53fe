from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra import (
    Accelerator,
    InvalidAccelerator,
    InvalidLayout,
    LayoutDoesNotFit,
    MigNotSupported,
    UnknownAccelerator,
    UnknownProfile,
    mig,
)
from skyinfra.accelerators import catalog

PLACEABLE = [
    row
    for name in catalog.names()
    for row in catalog.variants(name)
    if row.mig_model and any(profile.starts for profile in mig.geometry(row.mig_model).profiles)
]


@pytest.mark.parametrize(
    ("text", "name", "memory_gb", "count", "form_factor", "exact"),
    [
        ("H100", "H100", 80, None, None, False),
        ("H100:8", "H100", 80, 8, None, False),
        ("A100", "A100", 80, None, None, False),
        ("A100-80GB", "A100", 80, None, None, False),
        ("A100-40GB:4", "A100", 40, 4, None, False),
        ("A100 40 GB", "A100", 40, None, None, False),
        ("H100!", "H100", 80, None, None, True),
        ("H100!:8", "H100", 80, 8, None, True),
        ("H100:8!", "H100", 80, 8, None, True),
        (" h100 : 8 ", "H100", 80, 8, None, False),
        ("H100-SXM", "H100", 80, None, "SXM", False),
        ("H100-SXM5", "H100", 80, None, "SXM", False),
        ("H100-NVL", "H100", 94, None, "NVL", False),
        ("H100 NVL:2", "H100", 94, 2, "NVL", False),
        ("NVIDIA H100 PCIe", "H100", 80, None, "PCIe", False),
        ("H100-94GB", "H100", 94, None, None, False),
        ("A100-PCIe-40GB", "A100", 40, None, "PCIe", False),
        ("A100-40GB-PCIe", "A100", 40, None, "PCIe", False),
        ("Tesla V100 NVLink", "V100", 16, None, "SXM", False),
        ("V100-32GB", "V100", 32, None, None, False),
        ("RTX 4090", "RTX 4090", 24, None, None, False),
        ("RTX_4090", "RTX 4090", 24, None, None, False),
        ("rtx-4090", "RTX 4090", 24, None, None, False),
        ("RTX4090", "RTX 4090", 24, None, None, False),
        ("RTX 6000 Ada", "RTX 6000 Ada", 48, None, None, False),
        ("RTX PRO 6000 Max-Q", "RTX PRO 6000", 96, None, "Max-Q", False),
        ("RTXPRO6000WS", "RTX PRO 6000", 96, None, "Workstation", False),
        ("H20-3e", "H20", 141, None, None, False),
        ("AMD Instinct MI300X:8", "MI300X", 192, 8, None, False),
        ("TPU v5p-8", "TPUv5p-8", 95, None, None, False),
        ("v5litepod-4", "TPUv5e-4", 16, None, None, False),
        ("TPUv6", "TPUv6e", 32, None, None, False),
        ("Trainium", "Trainium1", 32, None, None, False),
    ],
)
def test_parse(text: str, name: str, memory_gb: int, count: int | None, form_factor: str | None, exact: bool) -> None:
    found = Accelerator.parse(text)
    assert (found.name, found.memory_gb, found.count) == (name, memory_gb, count)
    assert (found.form_factor, found.exact) == (form_factor, exact)


@pytest.mark.parametrize(
    ("text", "error", "field", "part"),
    [
        ("", InvalidAccelerator, None, "''"),
        ("/3g.40gb", InvalidAccelerator, None, "''"),
        ("H101", UnknownAccelerator, None, "Did you mean H100"),
        ("H100é", UnknownAccelerator, None, "H100é"),
        ("nvidia", UnknownAccelerator, None, "nvidia"),
        ("H100-40GB", InvalidAccelerator, "memory", "64GB, 80GB, 94GB, 96GB"),
        ("H100-94GB-PCIe", InvalidAccelerator, "memory", "It exists with 80GB."),
        ("H100-80GB-94GB", InvalidAccelerator, "memory", "80GB and 94GB"),
        ("H20-3e-96GB", InvalidAccelerator, "memory", "96GB and 141GB"),
        ("H100-NVL-PCIe", InvalidAccelerator, "form_factor", "NVL and PCIe"),
        ("H100-OAM", InvalidAccelerator, None, "SXM, PCIe, NVL"),
        ("H100-FOO:8", InvalidAccelerator, None, "'FOO'"),
        ("TPUv4-12", InvalidAccelerator, None, "TPUv4-128"),
        ("H100:0", InvalidAccelerator, "count", "'0'"),
        ("H100:-1", InvalidAccelerator, "count", "'-1'"),
        ("H100:", InvalidAccelerator, "count", "''"),
        ("H100:eight", InvalidAccelerator, "count", "'eight'"),
        ("H100:1.5", InvalidAccelerator, "count", "'1.5'"),
        ("H100:٣", InvalidAccelerator, "count", "'٣'"),
        ("H100:9999999", InvalidAccelerator, "count", "'9999999'"),
        ("A100:40GB:2", InvalidAccelerator, None, "A100-40GB:4"),
        ("H100!!", InvalidAccelerator, None, "H100!!"),
        ("H100!:8!", InvalidAccelerator, None, "H100!:8!"),
        ("H100:8/", InvalidLayout, "mig", "''"),
        ("H100:8/junk", InvalidLayout, "mig", "'junk'"),
        ("H100:2/3g.40gb|junk", InvalidLayout, "mig[1]", "'junk'"),
        ("H100:8/3g.40gb|7g.80gb", InvalidLayout, "mig", "2 layouts for 8 GPUs"),
        ("H100/4g.40gb*2", LayoutDoesNotFit, "mig", "|4g.40gb"),
        ("H100/3g.47gb", UnknownProfile, "mig", "H100-94GB has it"),
        ("A100/3g.20gb", UnknownProfile, "mig", "A100-40GB has it"),
        ("T4/1g.5gb", MigNotSupported, "mig", "A100"),
        ("B100/1g.24gb", MigNotSupported, "mig", "not known"),
        ("RTX PRO 5000/1g.24gb", MigNotSupported, "mig", "not known"),
        ("RTX PRO 5000-72GB/1g.24gb", MigNotSupported, "mig", "cannot be partitioned"),
        ("MI300X/1g.24gb", MigNotSupported, "mig", "MI300X"),
    ],
)
def test_what_is_wrong_with_a_string_is_named(
    text: str, error: type[sky.SkyinfraError], field: str | None, part: str
) -> None:
    with pytest.raises(error) as caught:
        Accelerator.parse(text)
    assert type(caught.value) is error
    assert caught.value.field == field
    assert part in str(caught.value)


def test_gpus_that_cannot_be_partitioned_are_not_offered_as_such() -> None:
    with pytest.raises(MigNotSupported) as caught:
        Accelerator("T4", mig="1g.5gb")
    offered = (caught.value.hint or "").removeprefix("With MIG: ").removesuffix(".").split(", ")
    assert "A30" in offered and "B100" not in offered and "T4" not in offered


@pytest.mark.parametrize("memory", [40, "40", "40GB", "40 GB", "40gb", "40G"])
def test_memory_spellings(memory: str | int) -> None:
    assert Accelerator("A100", memory=memory) == Accelerator.parse("A100-40GB")


@pytest.mark.parametrize("memory", [0, -40, True, 40.0, "", "GB", "40TB", "forty"])
def test_what_is_no_memory(memory: object) -> None:
    with pytest.raises(InvalidAccelerator, match="memory: "):
        Accelerator("A100", memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "8"])
def test_what_is_no_count(count: object) -> None:
    with pytest.raises(InvalidAccelerator, match="count: "):
        Accelerator("A100", count=count)  # type: ignore[arg-type]


def test_counts_of_known_machines_are_advice() -> None:
    assert Accelerator("H100", count=3).count == 3


def test_form_factors_that_do_not_exist() -> None:
    with pytest.raises(InvalidAccelerator, match="form_factor: ") as caught:
        Accelerator("H100", form_factor="OAM")
    assert "SXM, PCIe, NVL" in str(caught.value)
    with pytest.raises(InvalidAccelerator, match="form_factor: "):
        Accelerator("H100", form_factor=5)  # type: ignore[arg-type]


def test_name_and_arguments_agree() -> None:
    assert Accelerator("A100-40GB", memory=40) == Accelerator("A100", memory=40)
    with pytest.raises(InvalidAccelerator, match="memory: "):
        Accelerator("A100-40GB", memory=80)
    with pytest.raises(InvalidAccelerator, match="form_factor: "):
        Accelerator("H100-NVL", form_factor="PCIe")


def test_the_geometry_follows_memory_and_form_factor() -> None:
    assert Accelerator("H100").mig_model == "h100_80gb"
    assert Accelerator("H100", form_factor="PCIe").mig_model == "h100_pcie_80gb"
    assert Accelerator("H100", memory=94).mig_model == "h100_nvl_94gb"
    assert Accelerator("A100", memory=40).mig_model == "a100_40gb"


def test_layouts() -> None:
    assert Accelerator("H100").layouts() == ()
    filled = Accelerator("H100", count=2, mig="3g.40gb").layouts()
    assert [len(layout) for layout in filled] == [2, 2]
    mixed = Accelerator("H100", mig={"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 2})
    assert [len(layout) for layout in mixed.layouts()] == [4]
    assert [len(layout) for layout in mixed.layouts(8)] == [4] * 8
    assert [len(layout) for layout in Accelerator("H100", mig=["3g.40gb"]).layouts()] == [1]


def test_a_layout_for_each_gpu_says_how_many_there_are() -> None:
    found = Accelerator("H100", mig=mig.per_gpu("3g.40gb", "7g.80gb"))
    assert found.count == 2
    assert [[p.profile for p in layout] for layout in found.layouts()] == [["3g.40gb"] * 2, ["7g.80gb"]]
    assert Accelerator("H100", mig=mig.per_gpu("3g.40gb")) == Accelerator("H100", count=1, mig="3g.40gb")
    with pytest.raises(InvalidLayout, match="mig: "):
        Accelerator("H100", count=8, mig=mig.per_gpu("3g.40gb", "7g.80gb"))
    with pytest.raises(InvalidLayout):
        found.layouts(8)


def test_the_same_declaration_is_equal_however_it_is_written() -> None:
    one = Accelerator("H100", count=8, mig={"3g.40gb": 1, "1g.10gb": 2})
    assert one == Accelerator.parse("h100:8/3g.40gb + 1g.10gb*2") == Accelerator("H100-80GB", count=8, mig=one.mig)
    assert len({one, Accelerator.parse(str(one))}) == 1
    assert one != Accelerator("H100", count=8, mig={"3g.40gb": 1, "1g.10gb": 1})


def test_immutable_and_portable() -> None:
    found = Accelerator("H100", count=2, mig=mig.per_gpu("3g.40gb", "7g.80gb"))
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.count = 4  # type: ignore[misc]
    found.metadata["cuda_min"] = "1.0"
    assert found.metadata["cuda_min"] == "11.8"


def test_with() -> None:
    found = Accelerator.parse("A100-40GB:4/3g.20gb")
    assert str(found.with_(count=8)) == "A100-40GB:8/3g.20gb"
    assert str(found.with_(memory="80GB", mig=None)) == "A100:4"
    assert str(found.with_(name="H100", mig="3g.40gb", exact=True)) == "H100!:4/3g.40gb"
    with pytest.raises(UnknownProfile):
        found.with_(memory="80GB")
    with pytest.raises(TypeError):
        found.with_(colour="green")  # type: ignore[call-arg]


def test_parse_takes_what_is_parsed() -> None:
    found = Accelerator("H100")
    assert sky.accelerators.parse(found) is found
    assert sky.accelerators.parse("H100") == found
    with pytest.raises(InvalidAccelerator):
        sky.accelerators.parse(8)  # type: ignore[arg-type]


def test_preferences() -> None:
    parse = sky.accelerators.parse_preferences
    assert parse(None) == ()
    assert parse("H100") == parse(Accelerator("H100")) == (Accelerator("H100"),)
    found = parse(["H100", Accelerator("A100"), "A100-40GB:2"])
    assert [str(each) for each in found] == ["H100", "A100", "A100-40GB:2"]
    with pytest.raises(UnknownAccelerator, match=r"^\[1\]: "):
        parse(["H100", "H101"])
    with pytest.raises(InvalidLayout, match=r"^\[0\]\.mig: "):
        parse(["H100/junk"])
    for wrong in ([], 8, [8]):
        with pytest.raises(InvalidAccelerator):
            parse(wrong)  # type: ignore[arg-type]


@st.composite
def accelerators(draw: st.DrawFn) -> Accelerator:
    name = draw(st.sampled_from(catalog.names()))
    row = draw(st.sampled_from(catalog.variants(name)))
    form = draw(st.sampled_from([None, row.form_factor]))
    count = draw(st.none() | st.integers(1, 16))
    return Accelerator(name, memory=row.memory_gb, form_factor=form, count=count, exact=draw(st.booleans()))


@given(accelerators())
def test_the_string_parses_back(found: Accelerator) -> None:
    assert Accelerator.parse(str(found)) == found


@given(st.sampled_from(PLACEABLE), st.data())
def test_the_string_with_a_layout_parses_back(row: catalog.Variant, data: st.DataObject) -> None:
    names = st.sampled_from([profile.name for profile in mig.geometry(row.mig_model or "").profiles])
    one = names | names.map(lambda name: {name: 1}) | names.map(lambda name: [name])
    each = data.draw(st.lists(one, min_size=2, max_size=4))
    declared = data.draw(st.just(mig.per_gpu(*each)) | one)
    found = Accelerator(row.name, memory=row.memory_gb, form_factor=row.form_factor, mig=declared)
    assert Accelerator.parse(str(found)) == found
    assert len(found.layouts()) == (found.count or 1)


@given(st.text(alphabet="H10A-:!/+*|3g.40b GB", max_size=24))
def test_no_string_fails_in_another_way(text: str) -> None:
    try:
        found = Accelerator.parse(text)
    except sky.DeclarationError:
        return
    assert Accelerator.parse(str(found)) == found
