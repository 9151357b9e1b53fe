from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyinfra import InvalidLayout, LayoutDoesNotFit, UnknownProfile, accelerators, mig

H100 = mig.geometry("h100_80gb")
WITH_PROFILES = [model for model in mig.models() if mig.geometry(model).profiles]
PLACEABLE = [model for model in WITH_PROFILES if any(p.starts for p in mig.geometry(model).profiles)]


@pytest.mark.parametrize(
    ("model", "declared", "names"),
    [
        ("h100_80gb", "2x>=20GB", ("1g.20gb", "1g.20gb")),
        ("h100_80gb", "1x>=11GB", ("1g.20gb",)),
        ("h100_80gb", "1x>=21GB", ("3g.40gb",)),
        ("h100_80gb", ">=20GB*2", ("1g.20gb", "1g.20gb")),
        ("h100_80gb", "3g.40gb+2x>=10GB", ("3g.40gb", "1g.10gb", "1g.10gb")),
        ("h100_80gb", "2 x >= 10 gb + 3g.40gb", ("3g.40gb", "1g.10gb", "1g.10gb")),
        ("h100_80gb", "1g.10gb+me+>=40GB", ("3g.40gb", "1g.10gb+me")),
        ("h100_80gb", {">=20GB": 1, "1g.20gb": 1}, ("1g.20gb", "1g.20gb")),
        ("h100_80gb", [">=20GB", ">=40GB"], ("3g.40gb", "1g.20gb")),
        ("a100_40gb", "1x>=20GB", ("3g.20gb",)),
        ("rtx_pro_6000_96gb", "3x>=1GB", ("1g.24gb",) * 3),
    ],
)
def test_a_size_is_the_smallest_profile_that_has_it(model: str, declared: mig.Declared, names: tuple[str, ...]) -> None:
    assert mig.parse(declared, mig.geometry(model)) == names


def test_a_size_alone_fills_the_gpu() -> None:
    assert [p.profile for p in mig.resolve(">=20GB", H100, 1)[0]] == ["1g.20gb"] * 4
    assert [p.profile for p in mig.resolve("1x>=20GB", H100, 1)[0]] == ["1g.20gb"]
    with pytest.raises(LayoutDoesNotFit, match=r"5x>=20GB"):
        mig.resolve("5x>=20GB", H100, 1)


@pytest.mark.parametrize(
    "declared", ["x>=20GB", "2x3g.40gb", "2x>=20GB*2", ">=20", ">20GB", "0x>=20GB", "-1x>=20GB", "2x>=GB", ["2x>=20GB"]]
)
def test_what_is_no_size_is_refused(declared: mig.Declared) -> None:
    with pytest.raises(InvalidLayout):
        mig.parse(declared, H100)


def test_more_than_the_gpu_has() -> None:
    with pytest.raises(UnknownProfile, match=r"largest is 7g\.80gb") as caught:
        mig.parse("1x>=81GB", H100)
    assert caught.value.given == ">=81GB"


@pytest.mark.parametrize(
    ("declared", "written", "resolved"),
    [
        ("2X>=020gb", "2x>=20GB", "1g.20gb*2"),
        (">= 20GB", ">=20GB", "1g.20gb"),
        ([">=20GB"], "1x>=20GB", "1g.20gb*1"),
        ("3g.40gb+>=10GB*2", "3g.40gb+2x>=10GB", "3g.40gb+1g.10gb*2"),
        ("1g.20gb+>=20GB", "1g.20gb+1x>=20GB", "1g.20gb*2"),
        ("3g.39gb", "3g.39gb", "3g.40gb"),
    ],
)
def test_text_with_and_without_the_geometry(declared: mig.Declared, written: str, resolved: str) -> None:
    assert mig.text(declared) == written
    assert mig.text(declared, H100) == resolved


SIZES = st.integers(1, 40).map(lambda memory: f">={memory}GB")


@given(
    st.sampled_from(WITH_PROFILES).flatmap(
        lambda model: st.tuples(
            st.just(mig.geometry(model)),
            st.dictionaries(
                st.one_of(st.sampled_from([p.name for p in mig.geometry(model).profiles]), SIZES),
                st.integers(1, 2),
                min_size=1,
                max_size=4,
            ),
        )
    )
)
def test_the_written_form_means_the_same(case: tuple[mig.Geometry, dict[str, int]]) -> None:
    geometry, counts = case
    written = mig.text(counts)
    assert mig.text(written) == written
    largest = max(p.memory_gb for p in geometry.profiles)
    if any(name.startswith(">") and int(name[2:-2]) > largest for name in counts):
        with pytest.raises(UnknownProfile):
            mig.text(counts, geometry)
        return
    resolved = mig.text(counts, geometry)
    assert ">" not in resolved
    assert mig.text(resolved, geometry) == mig.text(written, geometry) == resolved
    assert sorted(_expanded(resolved, geometry)) == sorted(_expanded(counts, geometry))


def _expanded(declared: mig.Declared, geometry: mig.Geometry) -> list[str]:
    """The profiles by name, through the layout reader only."""
    try:
        return list(mig.parse(declared, geometry))
    except LayoutDoesNotFit as error:
        return [error.message]


@given(st.sampled_from(PLACEABLE), SIZES)
def test_the_profile_for_a_size_has_it_and_none_smaller_does(model: str, size: str) -> None:
    geometry = mig.geometry(model)
    memory = int(size[2:-2])
    plain = [p for p in geometry.profiles if not p.attributes]
    enough = [p for p in plain if p.memory_gb >= memory]
    if not enough:
        with pytest.raises(UnknownProfile):
            mig.parse([size], geometry)
        return
    selected = geometry.profile(mig.parse([size], geometry)[0])
    assert selected in enough
    assert not any((p.memory_gb, p.compute_slices) < (selected.memory_gb, selected.compute_slices) for p in enough)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("H100:8/2x>=20GB", "H100:8/1g.20gb*2"),
        ("A100-40GB/>=20GB", "A100-40GB/3g.20gb"),
        ("H100:2/>=40GB|2x>=20GB", "H100:2/3g.40gb|1g.20gb*2"),
        ("H100/3g.40gb+2x>=10GB", "H100/3g.40gb+1g.10gb*2"),
    ],
)
def test_in_the_string_of_an_accelerator(written: str, canonical: str) -> None:
    accelerator = accelerators.parse(written)
    assert str(accelerator) == canonical
    assert accelerators.parse(canonical) == accelerator
