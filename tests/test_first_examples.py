"""The examples of the documents that this project began with, in our spelling: each compiles, or is refused rightly.

They were written for other libraries, and some of their facts were wrong; what is expected here is what is so. An
example for a provider that this version does not deploy to yet compiles as soon as it does.
"""

from __future__ import annotations

from typing import Any

import pytest

import skyinfra as sky
from skyinfra import accelerators, providers
from skyinfra.compiler import Deployment, compile_pool

IMAGE = 'image=sky.Image(pip=["torch-neuronx"])'


def compiled(arguments: str) -> Deployment:
    """The deployment of ``sky.ComputePool(ARGUMENTS)``."""
    return compile_pool(eval(f"sky.ComputePool({arguments})", {"sky": sky}), "examples")


# On AWS: the declaration, the machine that it means, and the slots of a node.
ON_AWS = [
    ('accelerator="T4"', "g4dn.xlarge", 1),
    ('accelerator="A100"', "p4de.24xlarge", 8),  # AWS sells eight together
    ('accelerator="H100"', "p5.4xlarge", 1),
    ('accelerator="L4"', "g6.xlarge", 1),
    ('accelerator="L40S"', "g6e.xlarge", 1),
    ('accelerator="A10G"', "g5.xlarge", 1),
    ('accelerator="A100-80GB"', "p4de.24xlarge", 8),
    ('accelerator="A100-40GB"', "p4d.24xlarge", 8),
    ('accelerator="H100:8"', "p5.48xlarge", 8),
    ('accelerator="H100!"', "p5.4xlarge", 1),
    ('accelerator="H200"', "p5en.48xlarge", 8),
    ('accelerator="B200"', "p6-b200.48xlarge", 8),
    ('accelerator=["H100", "A100-80GB"]', "p5.4xlarge", 1),
    ('accelerator=["H100", "A100-80GB", "A100-40GB:2"]', "p5.4xlarge", 1),
    ('accelerator="H100", vcpus=8, memory_gb=64', "p5.4xlarge", 1),
    ('accelerator="A100-40GB", spot=True', "p4d.24xlarge", 8),
    ('accelerator="L4", spot=True', "g6.xlarge", 1),
    ('accelerator="T4", spot=True', "g4dn.xlarge", 1),
    ('accelerator="A10G", spot=True', "g5.xlarge", 1),
    ("accelerator=sky.AcceleratorSpec.NVIDIA.T4()", "g4dn.xlarge", 1),
    ("accelerator=sky.AcceleratorSpec.NVIDIA.A100()", "p4de.24xlarge", 8),
    ("accelerator=sky.AcceleratorSpec.NVIDIA.H100()", "p5.4xlarge", 1),
    ("accelerator=sky.AcceleratorSpec.NVIDIA.A100(count=8)", "p4de.24xlarge", 8),
    ('accelerator=sky.AcceleratorSpec.NVIDIA.A100(memory="40GB")', "p4d.24xlarge", 8),
    ('accelerator=sky.AcceleratorSpec.NVIDIA.H100(form_factor="SXM")', "p5.4xlarge", 1),
    ("accelerator=sky.NVIDIA.A100", "p4de.24xlarge", 8),
    ("accelerator=sky.accelerators.A100()", "p4de.24xlarge", 8),
    ('accelerator=sky.accelerators.A100(memory="40GB")', "p4d.24xlarge", 8),
    ("accelerator=sky.accelerators.H100(count=8)", "p5.48xlarge", 8),
    ("accelerator=sky.accelerators.T4G()", "g5g.xlarge", 1),
    # Two partitions of one GPU; on eight GPUs two of each.
    ('accelerator=sky.AcceleratorSpec.NVIDIA.H100(mig="3g.40gb")', "p5.4xlarge", 2),
    ('accelerator=sky.AcceleratorSpec.NVIDIA.A100(mig=["3g.40gb", "3g.40gb"])', "p4de.24xlarge", 16),
    (f"accelerator=sky.AcceleratorSpec.AWS.Inferentia(version=2), {IMAGE}", "inf2.xlarge", 1),
    (f"accelerator=sky.accelerators.Inferentia2(), {IMAGE}", "inf2.xlarge", 1),
    ("accelerator=sky.accelerators.Inferentia1()", "inf1.xlarge", 1),
    ("accelerator=sky.accelerators.Trainium1()", "trn1.2xlarge", 1),
]


@pytest.mark.parametrize(("arguments", "machine", "slots"), ON_AWS)
def test_on_aws(arguments: str, machine: str, slots: int) -> None:
    made = compiled(f"provider=sky.AWS(), {arguments}")
    assert (made.selection.machine_types[0], len(made.slots)) == (machine, slots)


@pytest.mark.parametrize(
    ("place", "arguments", "machine"),
    [
        # Trainium2 is not in us-east-1, which sky.AWS() means.
        (
            'region="us-east-2"',
            f"accelerator=sky.AcceleratorSpec.AWS.Trainium(version=2, count=16), {IMAGE}",
            "trn2.48xlarge",
        ),
        ('region="us-east-2"', f"accelerator=sky.accelerators.Trainium2(count=16), {IMAGE}", "trn2.48xlarge"),
        # No image with their drivers is known: one of one's own.
        ('ami="ami-0123456789abcdef0"', "accelerator=sky.accelerators.Gaudi()", "dl1.24xlarge"),
        ('ami="ami-0123456789abcdef0"', 'accelerator=sky.AcceleratorSpec.NVIDIA.V100(memory="32GB")', "p3dn.24xlarge"),
    ],
)
def test_on_aws_elsewhere_or_with_an_image(place: str, arguments: str, machine: str) -> None:
    assert compiled(f"provider=sky.AWS({place}), {arguments}").selection.machine_types == (machine,)


@pytest.mark.parametrize(
    ("accelerator", "error", "hint"),
    [
        # AWS has A100 in eights, H100 in ones and eights, all of them SXM.
        ("sky.AcceleratorSpec.NVIDIA.A100(count=4)", sky.NotOffered, "p4de.24xlarge (A100:8)"),
        ("sky.accelerators.H100(count=4)", sky.NotOffered, "p5.4xlarge (H100:1)"),
        ('"H100:2"', sky.NotOffered, "p5.48xlarge (H100:8)"),
        ('"A100-40GB:4"', sky.NotOffered, "p4d.24xlarge (A100-40GB:8)"),
        ('sky.AcceleratorSpec.NVIDIA.H100(form_factor="PCIe")', sky.NotOffered, "Elsewhere"),
        ('sky.AcceleratorSpec.NVIDIA.H100(form_factor="NVL")', sky.NotOffered, "Elsewhere"),
        ("sky.AcceleratorSpec.AWS.Trainium(version=2)", sky.NotOffered, "Without region"),
        # trn3 is in none of the lists that the offers are made of.
        ("sky.accelerators.Trainium3()", sky.NotOffered, "skyinfra offers"),
        ("sky.accelerators.V100()", sky.NotOffered, "Elsewhere"),
    ],
)
def test_what_aws_does_not_sell_is_refused_with_what_comes_nearest(
    accelerator: str, error: type[sky.SkyinfraError], hint: str
) -> None:
    with pytest.raises(error) as caught:
        compiled(f"provider=sky.AWS(), accelerator={accelerator}")
    assert hint in str(caught.value)


# Factory, memory of one in GB, chips of one. Where a document had another number, the comment has it.
FACTORIES = [
    ("H100()", 80, 1),  # 40/80
    ('H100(form_factor="SXM")', 80, 1),
    ('H100(form_factor="NVL")', 94, 1),
    ("H200()", 141, 1),
    ("GH200()", 96, 1),
    ("B100()", 192, 1),
    ("B200()", 180, 1),  # 192
    ("GB200()", 186, 1),  # 384, of two
    ("A100()", 80, 1),
    ('A100(memory="40GB")', 40, 1),
    ("A100(count=8)", 80, 1),
    ("A800()", 80, 1),
    ("A40()", 48, 1),
    ("A10G()", 24, 1),
    ("L4()", 24, 1),
    ("L40S()", 48, 1),
    ("T4()", 16, 1),
    ("T4G()", 16, 1),
    ("V100()", 16, 1),
    ('V100(memory="32GB")', 32, 1),
    ("P100()", 16, 1),
    ("RTX_5090()", 32, 1),
    ("RTX_5080()", 16, 1),
    ("RTX_4090()", 24, 1),
    ("RTX_4080()", 16, 1),
    ("RTX_4070_Ti()", 12, 1),
    ("RTX_3090()", 24, 1),
    ("RTX_3080()", 10, 1),
    ("RTX_A6000()", 48, 1),
    ("RTX_6000_Ada()", 48, 1),
    ("RTX_PRO_6000()", 96, 1),
    ("MI300X()", 192, 1),
    ("MI300A()", 128, 1),
    ("MI250X()", 128, 1),
    ("MI250()", 128, 1),
    ("MI210()", 64, 1),
    ("MI100()", 32, 1),
    ("Trainium1()", 32, 1),
    ("Trainium2()", 96, 1),  # 64
    ("Trainium3()", 144, 1),  # 128
    ("Inferentia1()", 8, 1),
    ("Inferentia2()", 32, 1),
    ("TPUv6()", 32, 1),
    ("TPUv5p()", 95, 1),
    ("TPUv5p_8()", 95, 4),  # the number counts TensorCores
    ("TPUv5e()", 16, 1),
    ("TPUv4()", 32, 1),
    ("TPUv4_64()", 32, 32),
    ("TPUv3()", 32, 1),
    ("TPUv3_32()", 32, 16),
    ("TPUv2()", 16, 1),
    ("Gaudi3()", 128, 1),
    ("Gaudi2()", 96, 1),
    ("Gaudi()", 32, 1),
    ('Custom("My-GPU", memory="48GB")', 48, 1),
    ('Custom("H100-Custom", memory="80GB", count=8, cuda_min="12.0")', 80, 1),
]


@pytest.mark.parametrize(("factory", "memory_gb", "chips"), FACTORIES)
def test_every_factory(factory: str, memory_gb: int, chips: int) -> None:
    made: Any = eval(f"sky.accelerators.{factory}", {"sky": sky})
    assert (made.memory_gb, made.chips // (made.count or 1)) == (memory_gb, chips)
    # Any of them can be declared and simulated, so that a program is tried before it has its machines.
    local = compiled(f"provider=sky.Local(simulate=True), accelerator=sky.accelerators.{factory}")
    assert len(local.slots) >= (made.count or 1)


@pytest.mark.parametrize(
    "accelerator",
    ["H100", "A100-80GB", "H100:2", "A100-40GB:4", "H100:8", "H100:4", "L40S", "H100!", "T4", "A100-80GB:4", "H200:8"],
)
def test_every_string_means_the_same_anywhere(accelerator: str) -> None:
    declared = accelerators.parse(accelerator)
    made = compiled(f"provider=sky.Local(simulate=True), accelerator={accelerator!r}")
    assert made.selection.count == len(made.slots) == (declared.count or 1)


def test_the_mig_plugin() -> None:
    told = 'image=sky.Image(pip=["torch"]), plugins=[sky.plugins.mig(profile="3g.40gb")]'
    made = compiled(
        f'provider=sky.AWS(), accelerator="H100", {told}, worker=sky.Worker(concurrency=2, executor="process")'
    )
    assert [(slot.kind, slot.profile) for slot in made.slots] == [("partition", "3g.40gb")] * 2
    with pytest.raises(sky.ConcurrencyMismatch, match="2 slots"):
        compiled(f'provider=sky.AWS(), accelerator="H100", {told}, worker=sky.Worker(concurrency=3)')
    # On an A100 AWS has eight of them: two on each.
    with pytest.raises(sky.ConcurrencyMismatch, match="16 slots"):
        compiled(f'provider=sky.AWS(), accelerator="A100", {told}, worker=sky.Worker(concurrency=2)')


@pytest.mark.parametrize(
    ("gpu", "profile", "slots"),
    [
        ("H100", "1g.10gb", 7),
        ("H100", "1g.20gb", 4),
        ("H100", "2g.20gb", 3),
        ("H100", "3g.40gb", 2),
        ("H100", "4g.40gb", 1),
        ("H100", "7g.80gb", 1),
        ("A100-40GB", "1g.5gb", 7),
        ("A100-40GB", "1g.10gb", 4),
        ("A100-40GB", "2g.10gb", 3),
        ("A100-40GB", "3g.20gb", 2),
        ("A100-40GB", "4g.20gb", 1),
        ("A100-40GB", "7g.40gb", 1),
    ],
)
def test_how_many_partitions_a_profile_gives(gpu: str, profile: str, slots: int) -> None:
    assert len(compiled(f'provider=sky.Local(simulate=True), accelerator="{gpu}:1/{profile}"').slots) == slots


def test_the_profiles_of_a_gpu_may_differ() -> None:
    made = compiled('provider=sky.AWS(), accelerator="H100/4g.40gb+2g.20gb+1g.10gb"')
    assert sorted(slot.profile or "" for slot in made.slots) == ["1g.10gb", "2g.20gb", "4g.40gb"]


def test_questions_about_accelerators() -> None:
    assert sky.is_nvidia("H100") and not sky.is_nvidia("MI300X") and sky.is_trainium("Trainium2")


@pytest.mark.parametrize("accelerator", ["MI300X()", "RTX_4090()", "RTX_3090()"])
def test_on_a_marketplace(accelerator: str) -> None:
    arguments = f"provider=sky.VastAI(), accelerator=sky.accelerators.{accelerator}"
    if "vastai" in providers.deployable():
        assert compiled(arguments).slots
        return
    # Until it is there, a declaration of it is refused, and not ignored.
    with pytest.raises(sky.NotSupported, match="Vast"):
        compiled(arguments)


@pytest.mark.parametrize(
    ("slice_", "kind", "slots"),
    [
        ("TPUv5e()", "chip", 1),
        ("TPUv5p_8()", "chip", 4),
        ("TPUv2_8()", "chip", 4),
        ("TPUv6(count=8)", "chip", 8),
        # A slot for each host.
        ("TPUv4_64()", "host", 8),
        ("TPUv3_32()", "host", 4),
    ],
)
def test_tpu_slices_on_google_cloud(slice_: str, kind: str, slots: int) -> None:
    found = sky.offers.find(eval(f"sky.accelerators.{slice_}", {"sky": sky}), provider="gcp")
    region = found[0].regions[0]
    made = compiled(f"provider=sky.GCP(project='p', region={region!r}), accelerator=sky.accelerators.{slice_}")
    assert {slot.kind for slot in made.slots} == {kind} and len(made.slots) * made.selection.hosts == slots
    assert made.selection.machine_types[0] == found[0].machine_type
