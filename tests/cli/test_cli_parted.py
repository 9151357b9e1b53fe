from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from checks.parted import ODD_PARTED_CONFIGS
from typer.testing import CliRunner

from skyinfra import InvalidField, InvalidLayout, LayoutDoesNotFit, mig
from skyinfra.cli.app import app
from skyinfra.terminal.layouts import read_gpu

FILE = (
    """\
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  half:
    - device-filter: ["0x233010DE", "0x233110DE"]
      devices: [0, 1]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  mixed:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"1g.10gb": 7}
    - devices: [1]
      mig-enabled: true
      mig-devices: {"2g.20gb": 1, "3g.40gb": 1}
"""
    + ODD_PARTED_CONFIGS
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "config.yaml"
    made.write_text(FILE)
    return made


def run(*arguments: str) -> tuple[str, str]:
    """Standard output and error of `skyinfra mig ARGUMENTS`; errors of ours are raised."""
    result = CliRunner().invoke(app, ["mig", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize(
    ("label", "accelerator", "out"),
    [
        ("half", "H100:2", "H100:2/3g.40gb*2\n"),
        ("half", "H100:3", "GPU 0: 3g.40gb*2\nGPU 1: 3g.40gb*2\n"),
        ("mixed", "H100:2", "H100:2/1g.10gb*7|3g.40gb+2g.20gb\n"),
        ("all-disabled", "H100:2", "H100:2\n"),
        ("empty", "H100", "GPU 0: MIG without partitions\n"),
    ],
)
def test_import(file: Path, label: str, accelerator: str, out: str) -> None:
    assert run("import", str(file), "--config", label, "--accelerator", accelerator)[0] == out


def test_import_warns_of_gpus_that_no_entry_names(file: Path) -> None:
    out, err = run("import", str(file), "--config", "half", "--accelerator", "H100:3", "--json")
    assert "warning: GPU 2: no entry names it" in err
    assert json.loads(out) == {
        "schema_version": 1,
        "accelerator": None,
        "layouts": {"0": "3g.40gb*2", "1": "3g.40gb*2"},
        "warnings": ["GPU 2: no entry names it: it stays as it is"],
    }


def test_import_without_an_accelerator_prints_what_the_file_says(file: Path) -> None:
    assert run("import", str(file), "--config", "half")[0] == "GPU 0, 1 of 0x233010DE, 0x233110DE: 3g.40gb*2\n"
    assert run("import", str(file), "--config", "all-disabled")[0] == "every GPU: no MIG\n"
    shown = json.loads(run("import", str(file), "--config", "mixed", "--json")[0])
    assert shown["entries"] == yaml.safe_load(FILE)["mig-configs"]["mixed"]


@pytest.mark.parametrize(
    "accelerator",
    ["H100:8/3g.40gb*2", "H100:2/7g.80gb*1|1g.10gb*7", "H100:2/off|1g.10gb*7", "A30/2g.12gb*2"],
)
def test_export_and_import_give_the_accelerator_back(accelerator: str, tmp_path: Path) -> None:
    out, err = run("export", accelerator, "--label", "mine")
    assert err == ""
    file = tmp_path / "out.yaml"
    file.write_text(out)
    name = accelerator.partition("/")[0]
    back = run("import", str(file), "--config", "mine", "--accelerator", name)[0]
    assert back == (accelerator if ":" in name else accelerator.replace("/", ":1/")) + "\n"


def test_export_for_mig_manager(tmp_path: Path) -> None:
    out, _ = run("export", "H100:2/off|1g.10gb*7", "--format", "mig-manager", "--label", "mine")
    assert "nvidia.com/mig.config=mine" in out
    file = tmp_path / "out.yaml"
    file.write_text(out)
    back = run("import", str(file), "--config", "mine", "--accelerator", "H100:2", "--json")[0]
    assert json.loads(back)["layouts"] == {"0": None, "1": "1g.10gb*7"}
    assert set(yaml.safe_load(out)["mig-configs"]) == {"all-disabled", "mine"}


def test_export_says_where_placements_are_lost() -> None:
    out, err = run("export", "H100/3g.40gb*1")
    assert yaml.safe_load(out)["mig-configs"]["skyinfra"][0]["mig-devices"] == {"3g.40gb": 1}
    assert "warning: GPU 0: mig-parted's format has no placements" in err
    with pytest.raises(InvalidLayout, match="no layout"):
        run("export", "H100")


def test_import_names_what_is_wrong(file: Path) -> None:
    with pytest.raises(InvalidLayout, match="Did you mean half"):
        run("import", str(file), "--config", "halv")
    with pytest.raises(LayoutDoesNotFit, match=r"mig-configs\.wrong\[0\]\.mig-devices: "):
        run("import", str(file), "--config", "wrong", "--accelerator", "H100")
    with pytest.raises(InvalidLayout, match="comes from the file"):
        run("import", str(file), "--config", "half", "--accelerator", "H100/3g.40gb")
    with pytest.raises(InvalidField, match="No such file"):
        run("import", str(file.parent / "none.yaml"), "--config", "half")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("version: v1\nmig-configs: {\n", "line 3"),
        ("version: v1\nversion: v1\n", "line 2: not YAML: version is there twice"),
        ("version: v1\nmig-configs:\n  a:\n    - devices: all\n      devices: all\n", "line 5"),
        ("", "a mapping"),
        ("version: \x00", "not YAML"),
    ],
)
def test_malformed_files(text: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InvalidLayout) as caught:
        run("import", str(file), "--config", "a")
    assert part in str(caught.value)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidField, match="UTF-8"):
        run("import", str(file), "--config", "a")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [
        ("devices: [0, 1]", "devices: 7", r"config\.yaml, line 8, mig-configs\.half\[0\]\.devices: all, or a list"),
        ('{"1g.10gb": 7}', '{"1g.10gb": -7}', r"line 14, mig-configs\.mixed\[0\]\.mig-devices\.1g\.10gb: "),
        ("mig-enabled: false", "mig-enable: false", r"line 5, mig-configs\.all-disabled\[0\]\.mig-enable: an unknown"),
        ("version: v1", "version: v2", r"line 1, version: the version is v1"),
        ("version: v1\n", "", r"config\.yaml, version: the version is v1"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, old: str, new: str, where: str) -> None:
    file.write_text(FILE.replace(old, new, 1))
    with pytest.raises(InvalidLayout, match=where):
        run("import", str(file), "--config", "half")


def test_a_layout_of_another_gpu_is_named_with_its_line(file: Path) -> None:
    with pytest.raises(LayoutDoesNotFit, match=r"config\.yaml, line 25, mig-configs\.wrong\[0\]\.mig-devices: "):
        run("import", str(file), "--config", "wrong", "--accelerator", "H100:2")
    with pytest.raises(InvalidLayout, match=r"line 15, mig-configs\.mixed\[1\]\.devices: the node has 1 GPU"):
        run("import", str(file), "--config", "mixed", "--accelerator", "H100:1")


# Listings, and what clusters take ---------------------------------------------------------------------------------

LISTING = """\
|   0  MIG 1g.10gb           19        9          2:1     |
|   0  MIG 3g.40gb            9        1          4:4     |
"""


@pytest.mark.parametrize(
    ("accelerator", "out"),
    [
        (None, "GPU 0: 1g.10gb@2+3g.40gb@4\n"),
        ("H100", "H100:1/1g.10gb@2+3g.40gb@4\n"),
        ("H100:2", "H100:2/1g.10gb@2+3g.40gb@4|off\n"),
    ],
)
def test_a_listing_keeps_every_partition_in_place(tmp_path: Path, accelerator: str | None, out: str) -> None:
    file = tmp_path / "lgi.txt"
    file.write_text(LISTING)
    options = () if accelerator is None else ("--accelerator", accelerator)
    found, err = run("import", str(file), *options)
    assert found == out
    assert ("GPU 1: nothing is listed on it" in err) == (accelerator == "H100:2")
    if accelerator is not None:
        # It is an accelerator string, which gives those very places.
        named = read_gpu(out.strip())
        assert named.declared is not None
        assert mig.resolve(named.declared, named.geometry, named.count or 0)[0] == (
            mig.Placement("1g.10gb", 2, 1),
            mig.Placement("3g.40gb", 4, 4),
        )
        assert json.loads(run("import", str(file), *options, "--json")[0])["accelerator"] == out.strip()


def test_listings_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "lgi.txt"
    file.write_text("nothing of that kind")
    with pytest.raises(InvalidLayout, match="no GPU instance is listed") as error:
        run("import", str(file))
    assert error.value.field == str(file)
    file.write_text(LISTING.replace("0  MIG 3g", "3  MIG 3g"))
    with pytest.raises(InvalidLayout, match="the node has 2 GPUs"):
        run("import", str(file), "--accelerator", "H100:2")
    file.write_text(LISTING.replace("4:4", "2:4"))
    with pytest.raises(InvalidLayout, match=r"has no 3g\.40gb there"):
        run("import", str(file), "--accelerator", "H100:1")
    with pytest.raises(InvalidLayout, match="the layout comes from the file"):
        run("import", str(file), "--accelerator", "H100/3g.40gb")


def test_nothing_listed_is_a_whole_gpu(tmp_path: Path) -> None:
    file = tmp_path / "lgi.txt"
    file.write_text("No GPU instances found: Not Found\n")
    assert run("import", str(file), "--accelerator", "H100:2")[0] == "H100:2\n"


def test_export_for_slurm_and_kubernetes() -> None:
    gres = run("export", "H100:2/3g.40gb+1g.10gb|off", "--format", "gres")[0]
    assert "Gres=gpu:1g.10gb:1,gpu:3g.40gb:1,gpu:h100:1\n" in gres
    assert gres.endswith("AutoDetect=nvml\n")
    plugin = run("export", "H100:8/1g.10gb", "--format", "device-plugin")[0]
    assert "#   nvidia.com/gpu: 56\n" in plugin
    assert yaml.safe_load(plugin)["flags"] == {"migStrategy": "single"}
    assert run("export", "H100:2/3g.40gb", "--format", "mig-parted") == run("export", "H100:2/3g.40gb")


@pytest.mark.parametrize(
    ("accelerator", "profile", "detected"),
    [
        ("A100-40GB", "3g.20gb", "NVIDIA A100-SXM4-40GB"),
        ("A100-40GB-PCIe", "3g.20gb", "NVIDIA A100-PCIE-40GB"),
        ("a100_40gb", "3g.20gb", "NVIDIA A100-SXM4-40GB"),
        ("H100-NVL", "3g.47gb", "NVIDIA H100 NVL"),
        ("h100_pcie_80gb", "3g.40gb", "NVIDIA H100 PCIe"),
        ("GH200-144GB-Superchip", "3g.72gb", "NVIDIA GH200 144G HBM3e"),
        ("RTX PRO 6000-Max-Q", "2g.48gb", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
    ],
)
def test_slurm_finds_the_type_of_a_whole_gpu(accelerator: str, profile: str, detected: str) -> None:
    text = run("export", f"{accelerator}/off|{profile}", "--format", "gres")[0]
    whole = text.partition("Gres=gpu:")[2].partition(":1,")[0]
    assert whole and whole in mig.gres_type(detected)


def test_a_whole_gpu_of_several_is_exported_without_mig() -> None:
    text = run("export", "H100:2/3g.40gb*2|off")[0]
    entries = yaml.safe_load(text)["mig-configs"]["skyinfra"]
    assert [(each["devices"], each["mig-enabled"]) for each in entries] == [([0], True), ([1], False)]
