"""The pages: pictures and reference are made of what stands, links lead somewhere, and what a tutorial says happens."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from fake_nvml.fake_machine import FakeMachine
from support import ROOT, debian_torch, missing
from terraform_projects.commands import environment, skyinfra

import skyinfra as sky
from skyinfra.compiler import compile_pool
from skyinfra.mig import palette
from tools import pictures, recording, site

DOCS = ROOT / "docs"


def test_no_picture_is_stale() -> None:
    assert not pictures.stale()


def test_a_picture_is_made_of_the_text(tmp_path: Path) -> None:
    text = pictures.ARCHITECTURE.read_text(encoding="utf-8")
    changed = text.replace("The outcome, a result or an exception", "The outcome, a number")
    assert changed != text
    assert "a number" in pictures.life("task", changed)
    for name, section in pictures.SECTIONS.items():
        drawn = re.findall(r">(\d+)\. ", pictures.life(name, text))
        assert drawn == [str(number + 1) for number in range(len(pictures.steps(section, text)))]
    assert pictures.stale(tmp_path) == list(pictures.pictures())


def test_the_picture_of_the_terminal_is_that_of_the_recording() -> None:
    cast = recording.CAST.read_text(encoding="utf-8")
    assert recording.CAST.with_suffix(".svg").read_text(encoding="utf-8") == recording.svg(cast)
    shown = "\n".join(recording.screen(cast))
    assert [line[2:] for line in shown.splitlines() if line.startswith("$ ")] == list(recording.COMMANDS)
    assert "quickstart: destroyed" in shown and "quickstart/mig" in shown
    assert os.fspath(ROOT) not in cast and "/home/" not in cast and "/tmp/" not in cast
    # With another palette the recording is stale.
    profiles = re.findall(r"48;2;(\d+);(\d+);(\d+)m(\d+g\.\w+)", shown)
    assert len(profiles) == shown.count("48;2;") > 0
    for *colour, profile in profiles:
        assert "#{:02x}{:02x}{:02x}".format(*map(int, colour)) == palette.tone(profile).colour


def test_the_picture_of_the_terminal_plays_the_recording() -> None:
    cast = recording.CAST.read_text(encoding="utf-8")
    times = [json.loads(event)[0] for event in cast.splitlines()[1:]]
    assert times == sorted(times) and len(set(times)) > len(times) / 2, "each piece has the time at which it came"
    shown = recording.delays(cast)
    assert shown == sorted(shown) and shown[0] == 0 and 3 < shown[-1] <= 12
    assert len(shown) == len(recording.screen(cast))
    assert max(later - delay for delay, later in itertools.pairwise(shown)) <= 1.01

    style, _, drawn = recording.svg(cast).partition("</style>")
    # What cannot play it, a printer, and who wants no motion have all lines at once.
    still, condition, plays = style.partition("@media screen and (prefers-reduced-motion: no-preference) {")
    assert condition and "animation" not in still and "opacity" not in still
    assert plays.count("}") == plays.count("{") + 1 and plays.endswith("}\n}\n    "), "the condition is about all of it"
    line = re.compile(r'line-(\d+)\)"\], \[shape-rendering\]\[y="([\d.]+)"\] \{ animation-delay: ([\d.]+)s \}')
    numbers, heights, delays = zip(*line.findall(plays), strict=True)
    assert list(map(float, delays)) == shown
    assert set(re.findall(r'<text [^>]*clip-path="url\(#quickstart-line-(\d+)\)"', drawn)) == set(numbers)
    backgrounds = re.findall(r'<rect fill="#\w+" [^>]* y="([\d.]+)" [^>]*shape-rendering', drawn)
    assert backgrounds and set(backgrounds) <= set(heights)


def test_what_was_taken_back_and_long_pauses_are_not_played() -> None:
    def cast(*events: tuple[float, str]) -> str:
        return "\n".join(["{}", *(json.dumps([when, "o", text]) for when, text in events)])

    some = cast(
        (0, "$ a\r\n"), (30, "\r\x1b[2Kwork\r"), (31, "\n\x1b[1A\x1b["), (31.2, "2Kdo"), (31.5, "ne\r\n"), (31.7, "b")
    )
    assert recording.screen(some) == ["$ a", "done", "b"]
    assert recording.delays(some) == [0, 1, 1.2]
    many = recording.delays(cast(*((float(number), "line\r\n") for number in range(40))))
    assert many[-1] == 12 and many == sorted(many)


WRITTEN = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "modules").glob("*/README.md")),
]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the pages of the site make them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(page: Path, text: str) -> list[str]:
    """The links of *text* that lead nowhere from the place of *page*; those to other hosts are read for their form."""
    text = re.sub(r"^( *)```.*?^\1```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            alive = bool(re.fullmatch(r"https://[\w.-]+\.[a-z]+(:\d+)?(/\S*)?", link))
        else:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            alive = target.exists() and (not anchor or (target.suffix == ".md" and anchor in anchors(target)))
        if not alive:
            found.append(link)
    return found


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead(page, page.read_text())


def test_a_link_that_leads_nowhere_is_seen() -> None:
    text = "[a](mig.md) [b](no.md) [c](places.md#hosts-over-ssh) [d](places.md#no) [e](#no) [f](http:/x) `[g](no)`"
    assert dead(DOCS / "index.md", text) == ["no.md", "places.md#no", "#no", "http:/x"]


def test_the_forms_of_issues_that_pages_name_are_there() -> None:
    forms = {
        form.name: yaml.safe_load(form.read_text()) for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    }
    del forms["config.yml"]
    for form in forms.values():
        assert form["name"] and form["description"] and form["labels"]
        assert all(each["id"] and each["attributes"]["label"] for each in form["body"])
    named = {found for page in WRITTEN for found in re.findall(r"issues/new\?template=([\w.]+)", page.read_text())}
    assert {"gpu.yml"} <= named <= set(forms)


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_the_pages_are_built_without_a_warning(tmp_path: Path) -> None:
    tools = ROOT / "build" / "docs-tools"
    if not tools.is_dir():
        missing("what `make docs` builds with, in build/docs-tools,")
    source = tmp_path / "site-source"
    site.prepare(source)
    (tmp_path / "zensical.toml").write_text(site.configuration(source))
    site.build(tmp_path / "zensical.toml")
    pages = {page.relative_to(tmp_path / "site").as_posix() for page in (tmp_path / "site").rglob("*.html")}
    assert {
        "index.html",
        "mig.html",
        "reference/commands.html",
        "reference/pool.html",
        "modules/aws.html",
        "tutorials/lab.html",
    } <= pages
    assert {f"reference/{name}.html" for name in ("benchmarks", "json", "traits")} <= pages
    shown = (tmp_path / "site" / "reference" / "declare.html").read_text()
    assert "sky.ComputePool" in shown and "hourly" in shown and "skyinfra.pool.ComputePool</span>" not in shown
    ids = {page: set(re.findall(r"""\bid=["']?([^"' >]+)""", (tmp_path / "site" / page).read_text())) for page in pages}
    # The page of what is not there is served at any path, so its links begin at the root.
    for name in pages - {"404.html"}:
        for link in re.findall(r"""<a[^>]+href=["']?([^"' >]+)""", (tmp_path / "site" / name).read_text()):
            path, _, anchor = link.partition("#")
            if ":" in link or not (path or anchor):
                continue
            place = os.path.normpath(Path(name).parent / path) if path else name
            assert (tmp_path / "site" / place).exists() or place.startswith("gallery"), f"{name}: {link}"
            assert not anchor or place not in ids or unquote(anchor) in ids[place], f"{name}: {link}"
    # Nothing is fetched from another host by whoever reads the pages.
    for page in (tmp_path / "site").rglob("*.html"):
        found = re.findall(r"""<(?:script|link|img)[^>]+(?:src|href)=["']?(https?://[^"' >]+)""", page.read_text())
        assert not [each for each in found if not each.startswith("https://skyinfra")], page


def written(document: Path, folder: Path) -> None:
    """Writes the files of a tutorial, whose blocks have titles."""
    for name, text in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', document.read_text(), re.DOTALL):
        (folder / name).write_text(text)


@pytest.mark.slow
def test_the_sweep_is_as_it_is_written(tmp_path: Path) -> None:
    written(DOCS / "tutorials" / "sweep.md", tmp_path)
    skyinfra(tmp_path, "deploy", "--auto-approve")
    try:
        done = subprocess.run(
            [sys.executable, "sweep.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.stdout.splitlines()[-1] == "best: 0.3", done.stderr
        assert len(done.stdout.splitlines()) == 8
    finally:
        skyinfra(tmp_path, "destroy", "--auto-approve")


@pytest.mark.slow
def test_fine_tuning_goes_on_as_it_is_written(tmp_path: Path) -> None:
    if not debian_torch.there():
        missing("PyTorch, which `make torch` unpacks,")
    (tmp_path / "torch").mkdir()
    project = tmp_path / "project"
    project.mkdir()
    written(DOCS / "tutorials" / "fine-tune.md", project)
    more = debian_torch.variables(tmp_path / "torch")
    skyinfra(project, "deploy", "--auto-approve", **more)
    try:
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=project, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.stdout == "4 ranks went on at step 10 of 20\n", done.stderr
    finally:
        skyinfra(project, "destroy", "--auto-approve")


@pytest.mark.slow
def test_ci_is_as_it_is_written(tmp_path: Path) -> None:
    written(DOCS / "tutorials" / "ci.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "gpu_tests.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == "pool-0/0: 3g.40gb is there\npool-0/1: 3g.40gb is there\n", done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["gpu_tests.py"]


@pytest.mark.slow
def test_plain_hcl_is_as_it_is_written(tmp_path: Path, terraform_program: str) -> None:
    written(DOCS / "tutorials" / "plain-hcl.md", tmp_path)
    (tmp_path / "modules").symlink_to(ROOT / "modules")

    def terraform(*arguments: str) -> str:
        return subprocess.run(
            [terraform_program, *arguments], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
        ).stdout

    terraform("init")
    terraform("apply", "-auto-approve")
    try:
        manifest = tmp_path / "fleet.json"
        manifest.write_text(terraform("output", "-json", "fleet_cpu"))
        manifest.chmod(0o600)
        done = subprocess.run(
            [sys.executable, "task.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["cpu-0/0", "cpu-0/1", "cpu-1/0", "cpu-1/1"], done.stderr
    finally:
        terraform("destroy", "-auto-approve")


def example(page: Path) -> tuple[str, str]:
    """The first program of a page, and what it prints."""
    found: tuple[str, str] = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page.read_text(), re.DOTALL)[0]
    return found


def test_the_landing_page_begins_with_what_one_needs() -> None:
    """The program of the README with what it prints, the installation, the recording and two ways on, in that room."""
    text = (DOCS / "index.md").read_text()
    first = text.partition('<div class="grid cards"')[0]
    assert example(DOCS / "index.md") == example(ROOT / "README.md")
    assert max(map(len, example(DOCS / "index.md")[0].splitlines())) <= 50, "wider lines are cut on a telephone"
    assert 'pip install "skyinfra[cdktf,toolchain]"' in first and "(pictures/quickstart.svg)" in first
    doors = re.findall(r"\]\(([\w/-]+\.md)\)\{ \.md-button", first)
    assert doors == ["laptop.md", "tutorials/plain-hcl.md"]
    assert site.PAGES["Start"][0] == "laptop", "the page after it"


def program(page: Path, name: str) -> tuple[str, str]:
    """A program of a page, and what the page says that ``python NAME`` prints."""
    text = page.read_text()
    printed = re.search(rf"```\n\$ python {re.escape(name)}\n(.*?)```", text, re.DOTALL)
    found = re.search(rf'```python title="{re.escape(name)}"\n(.*?)```', text, re.DOTALL)
    assert found
    return found[1], printed[1] if printed else ""


@pytest.mark.slow
def test_the_first_fleet_on_a_laptop_is_as_it_is_written(tmp_path: Path) -> None:
    text, printed = program(DOCS / "laptop.md", "where.py")
    assert (text, printed) == example(ROOT / "README.md")
    (tmp_path / "where.py").write_text(text.replace("1g.10gb*2", "4g.40gb"))
    done = run_program(tmp_path, "where.py")
    assert done.returncode == 1 and "has no placement" in done.stderr


@pytest.mark.slow
def test_the_fleet_on_a_gpu_that_one_has_is_as_it_is_written(
    tmp_path: Path, fake_machine: Callable[..., FakeMachine]
) -> None:
    text, printed = program(DOCS / "laptop.md", "gpu.py")
    (tmp_path / "gpu.py").write_text(text)
    machine = fake_machine("l4")
    done = run_program(tmp_path, "gpu.py", **machine.environment())
    assert done.stdout == printed, done.stderr
    assert machine.asked_of_systemd() == [] and not any("Set" in call or "Create" in call for call in machine.calls())
    other = fake_machine("t4")
    done = run_program(tmp_path, "gpu.py", **other.environment(STATE=str(tmp_path / "other")))
    assert done.returncode == 1 and "L4" in done.stderr and "T4" in done.stderr


class Declared(Exception):
    """The pool of a program, in place of the block that would make it."""


def test_the_pool_over_ssh_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = program(DOCS / "laptop.md", "over_ssh.py")
    here, _ = program(DOCS / "laptop.md", "gpu.py")
    assert text.replace('sky.SSH(hosts=["ubuntu@10.0.0.7"])', "sky.Local()") == here, "the same program elsewhere"

    def declared(pool: sky.ComputePool) -> None:
        raise Declared(pool)

    monkeypatch.setattr(sky.ComputePool, "__enter__", declared)
    with pytest.raises(Declared) as found:
        exec(text, {"__name__": "over_ssh"})
    assert compile_pool(found.value.args[0], "pages").fleet == "pages/pool"


def run_program(folder: Path, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, name], cwd=folder, env=environment(**variables), capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_example_of_the_readme_prints_what_stands_there(tmp_path: Path) -> None:
    program, printed = example(ROOT / "README.md")
    (tmp_path / "example.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout == printed, done.stderr
