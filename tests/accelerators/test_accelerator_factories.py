from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra import Accelerator, MigNotSupported, UnknownAccelerator

ROOT = Path(__file__).parents[2]
make = sky.accelerators


@pytest.mark.parametrize("name", sorted({*make.names(), *make.aliases()}))
def test_every_name_and_alias_has_a_factory(name: str) -> None:
    identifier = "".join(c if c.isalnum() else "_" for c in name)
    assert identifier.isidentifier()
    assert identifier in dir(make)
    factory = getattr(make, identifier)
    assert factory() == Accelerator.parse(name)
    assert factory(count=2).count == 2
    assert factory.__name__ == identifier


def test_public_names_do_not_hide_a_factory() -> None:
    assert not set(make.__all__) & set(make.factories.identifiers())


# What the documents this began with show, in our spelling, with the facts as they are.
@pytest.mark.parametrize(
    ("found", "text", "memory_gb"),
    [
        (sky.AcceleratorSpec.NVIDIA.H100(), "H100", 80),
        (sky.AcceleratorSpec.NVIDIA.T4(), "T4", 16),
        (sky.AcceleratorSpec.NVIDIA.A100(count=4), "A100:4", 80),
        (sky.AcceleratorSpec.NVIDIA.A100(count=8), "A100:8", 80),
        (sky.AcceleratorSpec.NVIDIA.A100(memory="40GB"), "A100-40GB", 40),
        (sky.AcceleratorSpec.NVIDIA.V100(memory="32GB"), "V100-32GB", 32),
        (sky.AcceleratorSpec.NVIDIA.H100(form_factor="SXM"), "H100-SXM", 80),
        (sky.AcceleratorSpec.NVIDIA.H100(form_factor="PCIe"), "H100-PCIe", 80),
        (sky.AcceleratorSpec.NVIDIA.H100(form_factor="NVL"), "H100-NVL", 94),
        (sky.AcceleratorSpec.NVIDIA.H100(mig="3g.40gb"), "H100/3g.40gb", 80),
        (sky.AcceleratorSpec.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"]), "A100/3g.40gb*2", 80),
        (sky.AcceleratorSpec.AWS.Trainium(version=2), "Trainium2", 96),
        (sky.AcceleratorSpec.AWS.Inferentia(version=2), "Inferentia2", 32),
        (sky.AcceleratorSpec.AMD.MI300X(), "MI300X", 192),
        (sky.AcceleratorSpec.Google.TPU("v5p", slice=8), "TPUv5p-8", 95),
        (sky.AcceleratorSpec.Google.TPU("v6"), "TPUv6e", 32),
        (sky.AcceleratorSpec.Google.TPUv4_64(), "TPUv4-64", 32),
        (sky.AcceleratorSpec.Intel.Gaudi3(), "Gaudi3", 128),
        (sky.NVIDIA.A100, "A100", 80),
        (sky.NVIDIA.H100, "H100", 80),
        (make.A100(), "A100", 80),
        (make.H100(count=4), "H100:4", 80),
        (make.H200(), "H200", 141),
        (make.GH200(), "GH200", 96),
        (make.B100(), "B100", 192),
        (make.B200(), "B200", 180),
        (make.GB200(), "GB200", 186),
        (make.A800(), "A800", 80),
        (make.A40(), "A40", 48),
        (make.A10G(), "A10G", 24),
        (make.L4(), "L4", 24),
        (make.L40S(), "L40S", 48),
        (make.T4G(), "T4G", 16),
        (make.V100(), "V100", 16),
        (make.P100(), "P100", 16),
        (make.RTX_5090(), "RTX 5090", 32),
        (make.RTX_5080(), "RTX 5080", 16),
        (make.RTX_4090(), "RTX 4090", 24),
        (make.RTX_4080(), "RTX 4080", 16),
        (make.RTX_4070_Ti(), "RTX 4070 Ti", 12),
        (make.RTX_3090(), "RTX 3090", 24),
        (make.RTX_3080(), "RTX 3080", 10),
        (make.RTX_A6000(), "RTX A6000", 48),
        (make.RTX_6000_Ada(), "RTX 6000 Ada", 48),
        (make.RTX_PRO_6000(), "RTX PRO 6000", 96),
        (make.MI300A(), "MI300A", 128),
        (make.MI250X(), "MI250X", 128),
        (make.MI250(), "MI250", 128),
        (make.MI210(), "MI210", 64),
        (make.MI100(), "MI100", 32),
        (make.Trainium1(), "Trainium1", 32),
        (make.Trainium2(), "Trainium2", 96),
        (make.Trainium3(), "Trainium3", 144),
        (make.Inferentia1(), "Inferentia1", 8),
        (make.Inferentia2(), "Inferentia2", 32),
        (make.TPUv5p(), "TPUv5p", 95),
        (make.TPUv5p_8(), "TPUv5p-8", 95),
        (make.TPUv4_64(), "TPUv4-64", 32),
        (make.TPUv3_32(), "TPUv3-32", 32),
        (make.TPUv6(), "TPUv6e", 32),
        (make.TPUv5e(), "TPUv5e", 16),
        (make.Gaudi3(), "Gaudi3", 128),
        (make.Gaudi2(), "Gaudi2", 96),
        (make.Gaudi(), "Gaudi", 32),
    ],
)
def test_examples(found: Accelerator, text: str, memory_gb: int) -> None:
    assert (str(found), found.memory_gb) == (text, memory_gb)
    assert Accelerator.parse(text) == found


@pytest.mark.parametrize(
    ("owner", "name", "near"),
    [
        (make, "H10", "H100"),
        (make, "RTX_409", "RTX_4090"),
        (sky.NVIDIA, "H1000", "H100"),
        (sky.NVIDIA, "MI300X", "NVIDIA has no accelerator 'MI300X'"),
        (sky.AcceleratorSpec.AMD, "MI300", "MI300X"),
        (sky.AcceleratorSpec.AMD, "H100", "AcceleratorSpec.AMD has no accelerator 'H100'"),
    ],
)
def test_wrong_names(owner: object, name: str, near: str) -> None:
    with pytest.raises(AttributeError, match=near):
        getattr(owner, name)


def test_dir_of_a_vendor() -> None:
    assert {"H100", "RTX_4090"} <= set(dir(sky.NVIDIA)) and "MI300X" not in dir(sky.NVIDIA)
    assert {"Trainium", "Trainium2", "Inferentia"} <= set(dir(sky.AcceleratorSpec.AWS))
    assert "H100" not in dir(sky.AcceleratorSpec.AWS)


def test_generations_that_do_not_exist() -> None:
    with pytest.raises(UnknownAccelerator, match="Trainium3"):
        sky.AcceleratorSpec.AWS.Trainium(version=33)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        make.H100(colour="green")  # type: ignore[call-arg]


def test_custom() -> None:
    found = make.Custom("H100-Custom", memory="80GB", count=8, cuda_min="12.0")
    assert (found.name, found.memory_gb, found.count, found.vendor) == ("H100-Custom", 80, 8, "custom")
    assert found.metadata == {"cuda_min": "12.0"}
    assert str(found) == "H100-Custom-80GB:8"
    assert not found.mig_capable
    assert found.with_(count=2).metadata == found.metadata
    assert hash(found) == hash(make.Custom("H100-Custom", memory=80, count=8, cuda_min="12.0"))
    with pytest.raises(sky.InvalidAccelerator):
        make.Custom(" ", memory=80)


def test_custom_with_mig() -> None:
    found = make.Custom("Cut-H100", memory=80, vendor="nvidia", mig="3g.40gb", mig_model="h100_80gb")
    assert [len(layout) for layout in found.layouts()] == [2]
    assert found.with_(count=2).mig_model == "h100_80gb"
    with pytest.raises(MigNotSupported, match="mig_model="):
        make.Custom("Cut-H100", memory=80, vendor="nvidia", mig="3g.40gb")
    with pytest.raises(MigNotSupported, match='vendor="nvidia"') as error:
        make.Custom("Cut-H100", memory=80, count=2, mig="3g.40gb", mig_model="h100_80gb")
    assert (error.value.field, error.value.given) == ("vendor", "custom")
    with pytest.raises(MigNotSupported, match="Did you mean h100_80gb"):
        make.Custom("Cut-H100", memory=80, mig_model="h100_80")


@pytest.mark.parametrize(
    ("value", "nvidia", "amd", "trainium", "tpu"),
    [
        ("H100", True, False, False, False),
        ("h100-sxm:8/3g.40gb", True, False, False, False),
        ("H100!", True, False, False, False),
        ("MI300X", False, True, False, False),
        ("Trainium2", False, False, True, False),
        ("Inferentia2", False, False, False, False),
        ("TPUv5p-8", False, False, False, True),
        ("Gaudi3", False, False, False, False),
        ("no such thing", False, False, False, False),
        ("H100-FOO", False, False, False, False),
        ("", False, False, False, False),
        (make.H100(), True, False, False, False),
        (make.Custom("X", memory=1, vendor="amd"), False, True, False, False),
    ],
)
def test_vendor_questions(value: str | Accelerator, nvidia: bool, amd: bool, trainium: bool, tpu: bool) -> None:
    assert (sky.is_nvidia(value), sky.is_amd(value)) == (nvidia, amd)
    assert (sky.is_trainium(value), sky.is_tpu(value)) == (trainium, tpu)


def test_the_stub_is_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "build_stubs.py", "--check"], check=True)


@pytest.mark.slow
def test_importing_costs_no_heavy_library() -> None:
    heavy = "pydantic distributed dask cdktf cdktn boto3 jinja2 cryptography"
    code = f"import sys, skyinfra.accelerators; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
