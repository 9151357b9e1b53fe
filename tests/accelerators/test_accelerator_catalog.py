from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra import mig
from skyinfra.accelerators import catalog

FILE = Path(catalog.__file__).with_name("catalog.json")
DATA = json.loads(FILE.read_text())
ROWS = [row for name in catalog.names() for row in catalog.variants(name)]

# Names that users of other tools know.
KNOWN_ELSEWHERE = """
K80|P4|P40|P100|GTX 1050|GTX 1050 Ti|GTX 1060|GTX 1070|GTX 1070 Ti|GTX 1080|GTX 1080 Ti|Titan Xp|Quadro P2000
Quadro P4000|V100|Titan V|T4|T4G|GTX 1650|GTX 1660|GTX 1660 Super|GTX 1660 Ti|RTX 2060|RTX 2060 Super|RTX 2070
RTX 2070 Super|RTX 2080|RTX 2080 Super|RTX 2080 Ti|Titan RTX|CMP 50HX|Quadro RTX 4000|Quadro RTX 5000|Quadro RTX 6000
Quadro RTX 8000|A2|A10|A10G|A16|A30|A40|A100|A100X|A800|RTX 3050|RTX 3060|RTX 3060 Ti|RTX 3060 Laptop|RTX 3070
RTX 3070 Ti|RTX 3080|RTX 3080 Ti|RTX 3090|RTX 3090 Ti|RTX A2000|RTX A4000|RTX A4500|RTX A5000|RTX A5000 Pro|RTX A6000
L4|L40|L40S|RTX 4060|RTX 4060 Ti|RTX 4070|RTX 4070 Super|RTX 4070 Ti|RTX 4070 Ti Super|RTX 4080|RTX 4080 Super|RTX 4090
RTX 4090D|RTX 2000 Ada|RTX 4000 Ada|RTX 4500 Ada|RTX 5000 Ada|RTX 5880 Ada|RTX 6000 Ada|H100|H100-NVL|H200|H200-NVL
GH200|B100|B200|B300|GB200|GB300|RTX 5060|RTX 5060 Ti|RTX 5070|RTX 5070 Ti|RTX 5080|RTX 5090|RTX PRO 4000|RTX PRO 4500
RTX PRO 5000|RTX PRO 6000|RTX PRO 6000 MaxQ|RTX PRO 6000 S|RTX PRO 6000 WK|RTX PRO 6000 WS|RTX PRO Server 6000|MI50
MI100|MI210|MI250|MI250X|MI300A|MI300B|MI300X|Radeon Pro V520|RadeonPro-V520|RadeonPro-V710|Instinct-MI25|Gaudi|Gaudi2
Gaudi3|Trainium1|Trainium2|Trainium3|Inferentia1|Inferentia2|TPUv2|TPUv3|TPUv4|TPUv5e|TPUv5p|TPUv6|TPUv2-8|TPUv3-8|TPUv3-32
TPUv4-64|TPUv5e-4|TPUv5p-8
"""
NAMES = [name for line in KNOWN_ELSEWHERE.split("\n") for name in line.split("|") if name]


def test_rows_are_one_line_each_so_that_a_change_can_be_reviewed() -> None:
    lines = FILE.read_text().split('"accelerators": [\n')[1].splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[: len(ROWS)]] == DATA["accelerators"]


def test_rows_are_unique() -> None:
    keys = [(row.name, row.memory_gb, row.form_factor) for row in ROWS]
    assert len(set(keys)) == len(keys) == len(DATA["accelerators"])


def test_one_row_of_a_name_is_what_the_bare_name_means() -> None:
    for name in catalog.names():
        assert [row.default for row in catalog.variants(name)].count(True) == 1, name
        assert len({row.vendor for row in catalog.variants(name)}) == 1, name
        assert len({row.chips for row in catalog.variants(name)}) == 1, name


def test_names_and_aliases_differ_by_more_than_case_and_separators() -> None:
    keys = [re.sub(r"[\s_-]", "", each).lower() for each in (*catalog.names(), *catalog.aliases())]
    assert len(set(keys)) == len(keys)


def test_values_are_of_known_kinds() -> None:
    for row in ROWS:
        assert row.vendor in {"nvidia", "amd", "aws", "google", "intel", "qualcomm"}
        assert row.memory_gb > 0 and row.chips > 0
        assert list(row.counts) == sorted(set(row.counts)) and all(count > 0 for count in row.counts)
        assert row.architecture
        assert row.mig_model is None or (row.mig_model in mig.models() and row.vendor == "nvidia")
        assert (row.cuda_min is not None) == (row.vendor == "nvidia")
        assert row.source in catalog.sources()


def test_every_source_is_used() -> None:
    assert {row.source for row in ROWS} == set(catalog.sources())


def test_mig_geometry_belongs_to_the_row() -> None:
    """The GPU's reported GiB are at most the nominal GB, and not much less."""
    for row in ROWS:
        if row.mig_model and (gib := mig.geometry(row.mig_model).memory_gib):
            assert 0.9 * row.memory_gb <= gib <= row.memory_gb, row


def test_every_model_with_known_profiles_has_a_row() -> None:
    used = {row.mig_model for row in ROWS}
    missing = {model for model in mig.models() if model not in used}
    assert missing == {"pg506_96gb", "thor_igpu"}  # not sold by name; no discrete GPU


@pytest.mark.parametrize("name", NAMES)
def test_names_known_elsewhere(name: str) -> None:
    assert sky.Accelerator.parse(name).memory_gb > 0


def test_there_are_136_names_known_elsewhere() -> None:
    assert len(NAMES) == len(set(NAMES)) == 136


@pytest.mark.parametrize(
    ("name", "memories"),
    [
        ("H100", {64, 80, 94, 96}),
        ("A100", {40, 64, 80}),
        ("V100", {16, 32}),
        ("H200", {141}),
        ("GH200", {96, 144}),
        ("B200", {180}),
        ("B300", {288}),
        ("GB200", {186}),
        ("GB300", {288}),
        ("H20", {96, 141}),
        ("A30", {24}),
        ("A10G", {24}),
        ("Trainium2", {96}),
        ("Trainium3", {144}),
        ("Gaudi", {32}),
        ("RTX PRO 6000", {96}),
        ("MI325X", {256}),
    ],
)
def test_memories_that_exist(name: str, memories: set[int]) -> None:
    assert {row.memory_gb for row in catalog.variants(name)} == memories


def test_a100_40gb_is_sxm_and_pcie() -> None:
    assert {row.form_factor for row in catalog.variants("A100") if row.memory_gb == 40} == {"SXM", "PCIe"}


@pytest.mark.parametrize(
    ("text", "chips"),
    [
        ("TPUv2-8", 4),
        ("TPUv3-32", 16),
        ("TPUv4-64", 32),
        ("TPUv5p-8", 4),
        ("TPUv5e-4", 4),
        ("TPUv6e-8", 8),
        ("TPUv5p", 1),
        ("TPUv4-64:2", 64),
    ],
)
def test_the_number_of_a_slice_counts_cores_or_chips(text: str, chips: int) -> None:
    assert sky.Accelerator.parse(text).chips == chips


def test_memory_of_a_slice_is_that_of_its_chips() -> None:
    slice_ = sky.Accelerator.parse("TPUv5p-8")
    assert (slice_.memory_gb, slice_.total_memory_gb) == (95, 380)


def test_which_gpus_can_be_partitioned() -> None:
    able = {name for name in catalog.names() if sky.Accelerator(name).mig_capable}
    assert able == {
        *("A30", "A100", "A800", "H20", "H100", "H200", "H800", "GH200", "B200", "B300", "GB200", "GB300"),
        *("RTX PRO 4500", "RTX PRO 5000", "RTX PRO 6000"),
    }
