from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyinfra import DriverTooOld, InvalidField, InvalidLayout, MigNotSupported, UnknownProfile, mig
from skyinfra.cli.app import app
from skyinfra.terminal.layouts import gpu_names, read_gpu


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and standard output of `skyinfra mig ARGUMENTS`; errors of ours are raised."""
    result = CliRunner().invoke(app, ["mig", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_show_draws_the_layout() -> None:
    code, out = run("show", "H100", "3g.40gb+2g.20gb+1g.10gb*2")
    assert code == 0
    assert "|2g.20gb        |1g.10gb|1g.10gb|3g.40gb                        |" in out
    assert "compute  7 of 7 slices" in out


@pytest.mark.parametrize(("accelerator", "gpus"), [("H100", 1), ("h100_80gb", 1), ("H100:8/3g.40gb*1", 8)])
def test_show_as_json(accelerator: str, gpus: int) -> None:
    layout = [] if "/" in accelerator else ["3g.40gb*1"]
    code, out = run("show", accelerator, *layout, "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["model"], shown["declared"], shown["fits"]) == ("h100_80gb", "3g.40gb*1", True)
    assert len(shown["gpus"]) == gpus
    gpu = shown["gpus"][-1]
    assert [(p["profile"], p["start"], p["size"], p["sm"]) for p in gpu["partitions"]] == [("3g.40gb", 4, 4, 60)]
    assert gpu["free"] == [{"start": 0, "size": 4}]
    assert gpu["compute_slices"] == {"used": 3, "total": 7}


def test_a_gpu_without_mig_is_refused_before_its_layout_is_read() -> None:
    """What divides it is not what the grammar of layouts asks for."""
    with pytest.raises(MigNotSupported, match="MI300X has no MIG"):
        run("show", "MI300X", "CPX")


def test_show_without_a_layout_draws_the_empty_gpu() -> None:
    code, out = run("show", "A30")
    assert code == 0
    assert "|free" in out


def test_an_impossible_layout_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "gpu.svg"
    code, out = run("show", "H100", "3g.40gb*2+2g.20gb", "--svg", str(file))
    assert code == 2
    assert out.count("|3g.40gb  ") == 4, "in the bar of the memory, and in that of the compute slices"
    assert "missing  2g.20gb: compute slices: 8 of 7" in out
    assert "instead  3g.40gb*2 or 3g.40gb+2g.20gb*2" in out
    texts = [e.text for e in ET.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert "2g.20gb: compute slices: 8 of 7" in texts
    code, out = run("show", "H100", "3g.40gb*2+2g.20gb", "--json")
    assert code == 2
    assert json.loads(out)["gpus"][0]["missing"] == {"2g.20gb": 1}
    assert json.loads(out)["gpus"][0]["instead"][0] == "3g.40gb*2"


def test_show_says_what_fits_when_all_is_placed_anew() -> None:
    code, out = run("show", "H100", "3g.40gb@0+2g.20gb+1g.10gb")
    assert code == 0
    assert "fits     nothing more" in out
    assert "or       1g.10gb, 1g.10gb+me, when all partitions are placed anew" in out


@pytest.mark.parametrize(
    ("arguments", "numbers"),
    [
        (["A100-40GB"], (19, 37, 12)),
        (["A100-80GB"], (19, 37, 12)),
        (["H100"], (19, 37, 12)),
        (["A30"], (5, 9, 4)),
        (["A100-40GB", "--all-profiles"], (239, 127, 44)),
        (["A100-40GB", "--driver", "R470"], (18, 36, 11)),
    ],
)
def test_layouts(arguments: list[str], numbers: tuple[int, int, int]) -> None:
    code, out = run("layouts", *arguments, "--json")
    listed = json.loads(out)
    assert code == 0
    assert tuple(len(listed[key]) for key in ("placements", "multisets", "maximal")) == numbers
    code, out = run("layouts", *arguments)
    rows = [line for line in out.splitlines() if re.match(r"\d+g\.", line)]
    assert f"{numbers[0]} layouts of " in out and f"{len(rows)} combinations of profiles (the rows)" in out
    assert f"{numbers[2]} maximal combinations" in out
    # The number before the driver; the sum is what is called so.
    assert sum(int(line.split()[-2]) for line in rows) == numbers[0]
    assert sum("more fits" not in line for line in rows) == numbers[2]


def test_check_knows_the_driver() -> None:
    assert run("check", "A100-40GB", "4g.20gb+3g.20gb", "--driver", "510.47.03")[0] == 0
    with pytest.raises(DriverTooOld, match="510 or later"):
        run("check", "A100-40GB", "4g.20gb+3g.20gb", "--driver", "470.57.02")


def test_each_gpu_is_drawn_where_each_has_its_own_layout() -> None:
    code, out = run("show", "H100:2/3g.40gb|7g.80gb")
    assert code == 0
    assert "H100, GPU 0: 3g.40gb" in out and "H100, GPU 1: 7g.80gb" in out
    with pytest.raises(InvalidLayout, match="own layout"):
        run("show", "H100:3/3g.40gb|7g.80gb")
    code, out = run("show", "H100:2/off|7g.80gb")
    assert code == 0
    assert "H100, GPU 0: a whole GPU, without partitions" in out and "H100, GPU 1: 7g.80gb" in out
    gpus = json.loads(run("show", "H100:2/off|7g.80gb", "--json")[1])["gpus"]
    assert [len(gpu["partitions"]) for gpu in gpus] == [0, 1]


def test_every_gpu_of_a_count_is_drawn_and_of_a_huge_one_one_for_all() -> None:
    code, out = run("show", "H100:2", "3g.40gb+1g.10gb")
    assert code == 0
    assert "H100, GPU 0: 3g.40gb+1g.10gb\n" in out and "H100, GPU 1: 3g.40gb+1g.10gb\n" in out
    assert out.count("|3g.40gb ") == 2 * 2, "in the bar of the memory, and in that of the compute slices"
    out = run("show", "H100:100000", "3g.40gb+1g.10gb")[1]
    assert out.startswith("H100, each of 100000 GPUs: 3g.40gb+1g.10gb\n") and out.count("|3g.40gb ") == 2


@pytest.mark.parametrize(
    ("accelerator", "layout"),
    [
        ("H100", "3g.40gb, 2g.20gb,1g.10gb*2"),
        ("H100", "3g.40gb+2g.20gb ,1g.10gb*2"),
        ("H100/3g.40gb,2g.20gb,1g.10gb*2", None),
    ],
)
def test_commas_join_profiles_as_pluses_do(accelerator: str, layout: str | None) -> None:
    arguments = [accelerator] if layout is None else [accelerator, layout]
    assert run("show", *arguments) == run("show", "H100", "3g.40gb+2g.20gb+1g.10gb*2")
    code, out = run("check", "H100:2/3g.40gb,1g.10gb|7g.80gb")
    assert code == 0
    assert [len(gpu["partitions"]) for gpu in json.loads(out)["gpus"]] == [2, 1]


def test_what_is_left_out_is_crossed_out(tmp_path: Path) -> None:
    file = tmp_path / "gpu.svg"
    _, out = run("show", "H100", "3g.40gb*2+2g.20gb+1g.10gb*3", "--svg", str(file))
    assert "left out|x 2g.20gb xxxxx" in out and "|x 1g.10gb*3 x|" in out
    tree = ET.parse(file)
    crossed = [e for e in tree.iter() if e.get("class") == "crossed"]
    assert [float(e.get("width") or 0) for e in crossed if e.tag.endswith("rect")] == [180.0, 90.0]
    assert sum(e.tag.endswith("line") for e in crossed) == 2
    assert "1g.10gb, 3 of them" in [e.text for e in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "left out" not in run("show", "H100", "3g.40gb*2")[1]


def test_gallery_draws_every_complete_layout(tmp_path: Path) -> None:
    code, out = run("gallery", "--out", str(tmp_path / "new" / "pages"))
    assert code == 0
    pages = {file.name: file.read_text() for file in (tmp_path / "new" / "pages").iterdir()}
    seen = {p for p in mig.models() if mig.geometry(p).profiles and not _guessed(p)}
    assert set(pages) == {"index.html", *(f"{model}.html" for model in seen)}
    assert f"{len(seen)} pages" in out
    for model in seen:
        geometry = mig.geometry(model)
        layouts = mig.maximal_layouts(geometry, mig.plain_profiles(geometry))
        page = pages[f"{model}.html"]
        drawn = re.findall(r'<svg[^>]* aria-label="([^"]*)"', page.partition("<details")[0])
        assert sorted(drawn) == sorted("+".join(p.profile for p in layout) for layout in layouts)
        for profile in geometry.profiles:
            assert re.search(rf'aria-label="([^"]*\+)?{re.escape(profile.name)}[+"]', page), "every profile is drawn"
            assert f"</span>{profile.name}</td>" in page, "and stands in the table"
        assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page
        # Nothing is fetched: no address but the name of the namespace, no script.
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|<script|<link|url\((?!#)|@import", page)
        assert f'href="{model}.html"' in pages["index.html"]
        words = re.sub(r"<style>.*?</style>|<[^>]*>", " ", page + pages["index.html"], flags=re.DOTALL)
        assert model not in words and not re.search(r"\b2[0-9A-F]{3}\b", words), "no key of ours, no PCI id"
    assert pages["index.html"].count("<svg") == len(seen) + 1, "a drawing of each, and the patterns"
    again = tmp_path / "again"
    run("gallery", "--out", str(again))
    assert pages == {file.name: file.read_text() for file in again.iterdir()}


def _guessed(model: str) -> bool:
    return any(profile.expected or not profile.starts for profile in mig.geometry(model).profiles)


def test_gallery_leads_back_and_calls_gpus_as_users_do(tmp_path: Path) -> None:
    run("gallery", "H100", "A100-40GB", "--out", str(tmp_path), "--home", "../index.html")
    pages = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert all('<a href="../index.html">Home</a>' in page for page in pages.values())
    assert "<h1>A100-40GB</h1>" in pages["a100_40gb.html"] and "mig show H100 LAYOUT" in pages["h100_80gb.html"]
    run("gallery", "H100", "--out", str(tmp_path))
    assert "Home</a>" not in (tmp_path / "h100_80gb.html").read_text()
    for model, name in gpu_names(map(mig.geometry, mig.models())).items():
        assert read_gpu(name).geometry.model == model


def test_gallery_of_named_gpus_and_of_all_profiles(tmp_path: Path) -> None:
    run("gallery", "A30", "H20", "--out", str(tmp_path), "--all-profiles")
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "a30_24gb.html", "h20_96gb.html"}
    page = (tmp_path / "a30_24gb.html").read_text()
    assert page.count("<article>") == 17 and ">+me</text>" in page and "<details" not in page
    assert "expected from the driver" not in page
    assert "expected from the driver" in (tmp_path / "h20_96gb.html").read_text()
    with pytest.raises(MigNotSupported, match="not known"):
        run("gallery", "RTX PRO 5000", "--out", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidField, match="--out"):
        run("gallery", "A30", "--out", str(tmp_path / "file"))


def test_gallery_with_expected_places_has_every_gpu_that_can_be_drawn(tmp_path: Path) -> None:
    run("gallery", "--out", str(tmp_path), "--expected")
    drawn = {f"{m}.html" for m in mig.models() if any(p.starts for p in mig.geometry(m).profiles)}
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", *drawn}


def test_check_prints_placements_or_the_drawing() -> None:
    code, out = run("check", "A100-40GB", "1g.5gb*5+2g.10gb")
    assert code == 0
    assert len(json.loads(out)["gpus"][0]["partitions"]) == 6
    code, out = run("check", "A100-40GB", "1g.10gb*4+1g.5gb*3")
    assert code == 1
    assert "no free place for 1g.5gb" in out
    with pytest.raises(InvalidLayout, match="no layout"):
        run("check", "A100-40GB")


def test_profiles() -> None:
    code, out = run("profiles", "H100")
    assert code == 0
    assert "3g.40gb" in out and "525.85.12" in out
    code, out = run("profiles", "H100", "--json")
    listed = json.loads(out)
    assert [p["name"] for p in listed["profiles"]] == [p.name for p in mig.geometry("h100_80gb").profiles]
    assert listed["profiles"][0]["sources"]["starts"] in mig.sources()
    code, out = run("profiles", "RTX PRO 5000")
    assert "unknown" in out


def test_bad_input_is_named() -> None:
    with pytest.raises(MigNotSupported, match=r"With MIG: .*H100"):
        run("show", "L4", "1g.10gb")
    with pytest.raises(UnknownProfile, match=r"Did you mean 1g\.10gb"):
        run("show", "H100", "1g.11gb")
    with pytest.raises(InvalidLayout, match="given twice"):
        run("show", "H100/3g.40gb", "3g.40gb")
    with pytest.raises(InvalidLayout, match="huge"):
        run("show", "H100", "huge")
    with pytest.raises(InvalidLayout, match="whose GPUs stay whole has no layout: leave it out"):
        run("show", "H100", "off")


def test_colour_only_where_a_person_watches() -> None:
    command = [sys.executable, "-m", "skyinfra.cli", "mig", "show", "H100", "3g.40gb"]
    plain = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "NO_COLOR")}
    piped = subprocess.run(command, env=plain, capture_output=True, text=True, check=True).stdout
    forced = subprocess.run(
        command, env={**plain, "FORCE_COLOR": "1", "TERM": "xterm-256color"}, capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b[" not in piped
    assert "\x1b[" in forced


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skyinfra.cli", "mig", "show", "H100", "--svg", str(tmp_path / "no" / "x.svg")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--svg" in done.stderr and "Traceback" not in done.stderr


def test_help_loads_no_table_and_no_geometry() -> None:
    code = "import sys, skyinfra.cli.app; print({'skyinfra.mig', 'skyinfra.accelerators', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_layouts_say_which_places_are_only_expected() -> None:
    code, out = run("layouts", "H20", "--json")
    assert code == 0
    assert all(p["expected"] is True for layout in json.loads(out)["placements"] for p in layout)
    assert "expected from the driver's source" in run("layouts", "H20")[1]
    known = json.loads(run("layouts", "H100", "--json")[1])
    assert all(p["expected"] is False for layout in known["placements"] for p in layout)
    assert "expected" not in run("layouts", "H100")[1]


def test_a_profile_of_another_gpu_says_which_have_it() -> None:
    with pytest.raises(UnknownProfile, match=r"3g\.20gb is a profile of a100_40gb"):
        run("check", "H100", "3g.20gb")


def test_a_gpu_whose_profiles_are_not_known_says_why() -> None:
    with pytest.raises(MigNotSupported) as caught:
        run("show", "B100", "1g.24gb")
    assert "the profiles of B100 are not known: " in str(caught.value)
    with pytest.raises(MigNotSupported, match="L4 cannot be partitioned"):
        run("show", "L4", "1g.10gb")


@pytest.mark.parametrize(
    ("arguments", "option"), [(["show", "H100", "1g.10gb", "--svg"], "--svg"), (["gallery", "A30", "--out"], "--out")]
)
def test_what_cannot_be_written_names_its_option(arguments: list[str], option: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["mig", *arguments, str(tmp_path / "file" / "x")])
    assert isinstance(done.exception, InvalidField)
    assert str(done.exception).startswith(f"{option}: cannot be written: Not a directory (given: ")
