"""Every code block of the pages is held: Python runs, commands parse, HCL and data are read; or it says why not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from front_ends import page_blocks
from front_ends.page_blocks import Block, blocks
from support import ROOT, python_path
from terraform_projects.commands import environment, skyinfra

from skyinfra import accelerators
from skyinfra.cli.app import app
from skyinfra.errors import LayoutDoesNotFit
from skyinfra.runner import cli as runner_cli
from skyinfra.terraform.program import find_program

DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "modules").glob("*/README.md")),
]
ALL = [block for page in PAGES for block in blocks(page)]
# Pages whose Python declares, with what they take as given: it is compiled, nothing is made.
DECLARED = {
    "docs/buckets.md": "import skyinfra as sky",
    "docs/failover.md": "import skyinfra as sky",
    "docs/mig.md": "import skyinfra as sky",
    "docs/places.md": "import skyinfra as sky\nkey = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEq0 me'",
    "docs/recommend.md": "import skyinfra as sky",
    "docs/spending.md": "import skyinfra as sky",
}
_OPEN = "import skyinfra as sky\npool = sky.connect('inference', 'mig')\n"
_TRAIN = "@sky.compute\ndef train(seed: int) -> float:\n    return seed + 0.5\n"
# Pages whose Python synthesizes a stack.
SYNTHESIZED = {
    "docs/declaration.md": "",
    "docs/volumes.md": "",
    "docs/hcp-terraform.md": (
        "import skyinfra as sky\nfrom cdktf import App\napp = App()\n"
        "pools = [sky.ComputePool(provider=sky.AWS(region='us-east-1'), accelerator='H100:8')]"
    ),
}
# Pages whose Python runs, each in its turn on one fleet of simulated GPUs.
FLEET = {
    "docs/deploying.md": f"import skyinfra as sky\n{_TRAIN}",
    "docs/jobs.md": f"import skyinfra as sky\n{_TRAIN}",
    "docs/secrets.md": "import skyinfra as sky\ndef download(url: str, password: str) -> None:\n    assert password",
    "docs/slurm-and-kubernetes.md": f"import skyinfra as sky\n{_TRAIN}",
    "docs/tasks.md": (
        f"{_OPEN}import sys\nsys.path.insert(0, 'src')\nimport mylib\ninputs = [1.0, 2.0]\n"
        "def load(path: str):\n    return lambda x: 2 * x"
    ),
}
# Those whose blocks are held as they stand by tests of their own, in tests/integration/test_pages.py and boot/.
OWN_TESTS = {
    "README.md",
    "docs/index.md",
    "docs/laptop.md",
    "docs/tutorials/ci.md",
    "docs/tutorials/fine-tune.md",
    "docs/tutorials/lab.md",
}
OWN_TESTS |= {"docs/tutorials/plain-hcl.md", "docs/tutorials/sweep.md"}
# What stands in blocks of commands beside our programs.
OTHERS = "aws|bash|cd|cdktf|export|git|head|kubectl|make|nvidia-smi|pip|python|rsync|sbatch|ssh|sudo|terraform|umask"
NOT_RUN = 3


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def commands() -> Any:
    """The program, as typer makes it."""
    return typer.main.get_command(app)


def shells() -> Iterator[tuple[Block, str]]:
    for block in ALL:
        if block.language in ("", "sh", "bash", "console") and not block.reason and not prints(block):
            yield from ((block, line) for line in page_blocks.commands(block))


def prints(block: Block) -> bool:
    """Whether it is the output of the Python above it, which the test of the page compares."""
    return (
        name(block.page) in OWN_TESTS and block.language == "" and not re.search(r"skyinfra|pip |\$ |make ", block.text)
    )


def of_ours(line: str) -> Iterator[list[str]]:
    """The words of each call of a program of ours in a line of a shell."""
    line = re.sub(r"(?:^|\s)#.*", "", line)
    line = re.sub(r'"\$\((?!skyinfra).*\)"', "X", line)
    for part in re.split(r"&&|\||\$\(|;", line):
        words = shlex.split(part.partition(" > ")[0].rstrip(") ")) if re.match(r"\s*(sudo )?skyinfra", part) else []
        words = words[1:] if words[:1] == ["sudo"] else words
        if words and words[0] in ("skyinfra", "skyinfra-runner"):
            yield words


def parse(command: Any, words: list[str], path: str) -> None:
    """Parses the words as the program does, and runs nothing: an option such as --version acts while it is parsed."""
    if any(words[0] in parameter.opts for parameter in command.params if words and not parameter.expose_value):
        return
    context = command.make_context(path, list(words))
    rest = [*context._protected_args, *context.args]
    if rest and hasattr(command, "resolve_command"):
        found, each, below = command.resolve_command(context, rest)
        parse(each, below, f"{path} {found}")


def test_every_block_is_held() -> None:
    kinds = {"python", "hcl", "json", "yaml", "toml", "mermaid", "", "sh", "bash", "console"}
    assert not [block.place for block in ALL if block.language not in kinds]
    python = {name(block.page) for block in ALL if block.language == "python" and not block.reason}
    assert python == {*DECLARED, *SYNTHESIZED, *FLEET} | {page for page in OWN_TESTS if page in python}
    assert not [block.place for block in ALL if block.title and name(block.page) not in OWN_TESTS]


def test_those_that_do_not_run_are_few_and_say_why() -> None:
    skipped = [block for block in ALL if block.reason]
    assert len(skipped) == NOT_RUN, [(block.place, block.reason) for block in skipped]
    comments = sum(page.read_text().count("<!-- not run") for page in PAGES)
    assert comments == NOT_RUN, "a comment without its block"


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '# A\n\n- entry\n\n    of the entry\n\nText:\n\n    skyinfra plan\n\n```python title="a.py"\nx = 1\n```\n\n'
        "<!-- not run: why -->\n\n```\n    y\n```\n"
    )
    found = [(each.line, each.language, each.title, each.text, each.reason) for each in blocks(page)]
    assert found == [
        (9, "", None, "skyinfra plan\n", None),
        (11, "python", "a.py", "x = 1\n", None),
        (17, "", None, "y\n", "why"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_command_stands_outside_of_a_block(page: Path) -> None:
    """A block whose first line is not indented is a paragraph."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?:pip install|skyinfra|terraform) .*", text, re.MULTILINE)


def test_the_commands_parse() -> None:
    program, runner = commands(), runner_cli._parser()
    seen, wrong = 0, []
    for block, line in shells():
        calls = list(of_ours(line))
        if not calls and not re.match(rf"\(?({OTHERS})\b", line):
            wrong.append(f"{block.place}: no command: {line}")
        for words in calls:
            seen += 1
            try:
                parse(program, words[1:], "skyinfra") if words[0] == "skyinfra" else runner.parse_args(words[1:])
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the line is wrong
                wrong.append(f"{block.place}: {line}: {getattr(error, 'message', error)!s}")
    assert not wrong, "\n".join(wrong)
    assert seen > 50


def wrong_inline(text: str) -> list[str]:
    """The commands in the sentences of a page that do not exist, or have no such option; they may leave words out."""
    found = []
    for code in re.findall(r"`(skyinfra(?: [^`\n]+)?)`", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.M | re.S)):
        command = commands()
        words = code.split(" -- ")[0].split()[1:]
        options = opts(command)
        for word in words:
            below = getattr(command, "commands", {})
            if word in below:
                command = below[word]
                # `jobs` alone is `jobs list`.
                options |= opts(command) | opts(getattr(command, "commands", {}).get("list", command))
            elif re.match(r"--|[a-z]+$" if below else "--", word) and word.partition("=")[0].rstrip(",") not in options:
                found.append(code)
    return found


def opts(command: Any) -> set[str]:
    return {"--help"}.union(*(parameter.opts + parameter.secondary_opts for parameter in command.params))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_commands_in_sentences_exist(page: Path) -> None:
    assert not wrong_inline(page.read_text())


def test_a_command_that_does_not_parse_is_seen() -> None:
    program = commands()
    with pytest.raises(Exception, match="--no-such"):
        parse(program, ["plan", "--no-such"], "skyinfra")
    with pytest.raises(Exception, match="nosuch"):
        parse(program, ["mig", "nosuch"], "skyinfra")
    text = "`skyinfra mig plan --json`, `skyinfra nosuch`, `skyinfra jobs --nosuch`, `skyinfra plan`"
    assert wrong_inline(text) == ["skyinfra nosuch", "skyinfra jobs --nosuch"]
    assert list(of_ours("cd x && sudo skyinfra-runner adopt > out | tee  # skyinfra plan")) == [
        ["skyinfra-runner", "adopt"]
    ]


@pytest.mark.parametrize("command", ["mig show", "mig pack"])
def test_what_a_command_prints_stands_there(command: str, tmp_path: Path) -> None:
    [block] = [each for each in ALL if each.text.startswith(f"$ skyinfra {command} ")]
    line, _, printed = block.text.partition("\n")
    done = skyinfra(tmp_path, *shlex.split(line[2:])[1:], COLUMNS="120")
    found = [each.rstrip() for each in done.stdout.splitlines()]
    assert found[: len(printed.splitlines())] == printed.splitlines()


def test_the_refusal_of_a_layout_stands_there() -> None:
    with pytest.raises(LayoutDoesNotFit) as refused:
        accelerators.H100(mig="4g.40gb*2")
    shown = [block for block in ALL if 'with mig="4g.40gb*2"' in block.text]
    assert [name(block.page) for block in shown] == ["README.md", "docs/declaration.md"]
    for block in shown:
        assert block.text.partition("\n")[2].rstrip() == f"error: {refused.value}"


def test_data_are_read() -> None:
    read = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    for block in ALL:
        if block.language in read:
            assert read[block.language](block.text), block.place


def test_the_hcl_is_formatted(tmp_path: Path) -> None:
    found = [block for block in ALL if block.language == "hcl"]
    assert len(found) > 17
    for number, block in enumerate(found):
        (tmp_path / f"{number}-{block.page.parent.name}.tf").write_text(block.text)
    done = subprocess.run(
        [*find_program(), "fmt", "-check", "-diff"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run(page: str, prelude: str, folder: Path, **more: str) -> str:
    helpers = ROOT / "tests" / "helpers"
    done = subprocess.run(
        [sys.executable, helpers / "front_ends" / "page_blocks.py", ROOT / page],
        cwd=folder,
        env=environment(PYTHONPATH=python_path(helpers), **more),
        input=prelude,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", DECLARED)
def test_what_is_declared_compiles(page: str, tmp_path: Path) -> None:
    said = run(page, DECLARED[page], tmp_path)
    assert said.endswith(": ran\n")
    assert page == "docs/recommend.md" or " slots\n" in said


@pytest.mark.slow
@pytest.mark.parametrize("page", SYNTHESIZED)
def test_what_is_declared_is_synthesized(page: str, tmp_path: Path) -> None:
    prelude = SYNTHESIZED[page]
    run(page, prelude, tmp_path)
    if "synth()" in (ROOT / page).read_text():
        assert list((tmp_path / "cdktf.out" / "stacks").glob("*/cdk.tf.json"))


PROGRAM = """
import skyinfra as sky
from cdktf import App
app = App()
sky.FleetStack(app, "inference", pools=[sky.ComputePool(
    name="mig", nodes=2, provider=sky.Local(simulate=True), accelerator="H100:4/3g.40gb")])
app.synth()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the fleet and the files that the pages speak of."""
    here = tmp_path_factory.mktemp("project")
    (here / "main.py").write_text(PROGRAM)
    (here / "cdktf.json").write_text('{"language": "python", "app": "python main.py", "output": "cdktf.out"}')
    (here / "src" / "mylib").mkdir(parents=True)
    text = "import skyinfra as sky\n\n\n@sky.compute\ndef train(seed: int) -> float:\n    return seed + 0.5\n"
    (here / "src" / "mylib" / "__init__.py").write_text(text)
    (here / "vocab.txt").write_text("a b c")
    (here / "skyinfra-4711").mkdir()
    skyinfra(here, "deploy", "--auto-approve")
    try:
        manifest = here / "skyinfra-4711" / "manifest.json"
        manifest.write_text(skyinfra(here, "manifest", "inference/mig").stdout)
        manifest.chmod(0o600)
        yield here
    finally:
        skyinfra(here, "destroy", "--auto-approve")


@pytest.mark.slow
@pytest.mark.xdist_group("code-blocks")
@pytest.mark.parametrize("page", FLEET)
def test_python_runs(page: str, project: Path, tmp_path: Path) -> None:
    (tmp_path / ".bucket-key").write_text("swordfish-4711")
    (tmp_path / ".bucket-key").chmod(0o600)
    variables = {"HOME": os.fspath(tmp_path), "HF_TOKEN": "token-of-a-test", "WANDB_API_KEY": "key-of-a-test"}
    assert run(page, FLEET[page], project, **variables).endswith(": ran\n")


@pytest.mark.slow
def test_the_first_steps_of_the_readme_run(tmp_path: Path) -> None:
    """As they stand, but that nobody is there to be asked."""
    [steps] = [
        block.text for block in ALL if block.text.startswith("skyinfra init") and name(block.page) == "README.md"
    ]
    script = re.sub(r"skyinfra (deploy|destroy)", r"skyinfra \1 --auto-approve", steps)
    assert script.count("--auto-approve") == 2
    done = subprocess.run(
        ["sh", "-ec", script], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quickstart: destroyed" in done.stdout + done.stderr and "ready" in done.stdout
