"""Lines of an image that are no packages and no variables are refused at declaration, not by root on a node."""

from __future__ import annotations

import pytest

import skyinfra as sky
from skyinfra.errors import is_ours
from skyinfra.runner.workers import image_variables


@pytest.mark.parametrize(
    "line",
    [
        *("torch", "torch==2.8.0", "torch==2.8.0+rocm6.4", "jax[cuda12]>=0.7,<0.8", "torch (>=2.0)", "a.b-c_d~=1.0"),
        *("numpy<3; python_version < '3.13'", "x @ https://example.com/x-1.whl", "x[y] @ git+https://example.com/x@v1"),
        *("https://example.com/x-1-py3-none-any.whl#sha256=00", "git+https://example.com/x.git", "/srv/x-1.whl"),
        *("torch_xla[tpu]~=2.8", "pkg!=1.*", "pkg===1.0-local", "file:///srv/x.whl"),
    ],
)
def test_requirements(line: str) -> None:
    assert sky.Image(pip=[line]).pip == (line,)


@pytest.mark.parametrize(
    "line",
    [
        *("", " ", "-r requirements.txt", "--extra-index-url=https://evil.example", "--pre", "-e .", "torch numpy"),
        *("torch=2.8", "torch --index-url https://evil.example", "torch\nnumpy", "# torch", "torch; x\x00", "$(id)"),
        *("`id`", "torch==2.8 --hash=sha256:00", "-", "torch\x1b[31m", "pip install torch"),
    ],
)
def test_what_is_no_requirement(line: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"Image\.pip\[1\]: is no requirement") as refused:
        sky.Image(pip=["six", line])
    assert "one in each string" in str(refused.value)


@pytest.mark.parametrize("line", ["requirements.txt", "requirements-gpu.in", "pyproject.toml", "uv.lock"])
def test_a_file_is_no_package_of_that_name(line: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"Image\.pip\[0\]: is the name of a file.*") as refused:
        sky.Image(pip=[line])
    assert f'Path("{line}").read_text()' in str(refused.value)


@pytest.mark.parametrize(
    "name", ["git", "g++", "libnccl2=2.27.3-1+cuda12.9", "libc6:i386", "git/bookworm", "/srv/x.deb"]
)
def test_packages(name: str) -> None:
    assert sky.Image(apt=[name]).apt == (name,)


@pytest.mark.parametrize(
    "name",
    [
        *("", "-y", "--allow-unauthenticated", "-oDPkg::Pre-Invoke=touch /tmp/x", "sudo-", "git curl", "Git", "git;id"),
        *("git\n", "*", "cuda-*", "./x.deb", "../x", "apt::x", "/srv/a b.deb", "$(id)"),
    ],
)
def test_what_is_no_package(name: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"Image\.apt\[0\]: is no Debian package"):
        sky.Image(apt=[name])


@pytest.mark.parametrize("line", ["-r x", "--pre", "skyinfra\n-r x"])
def test_what_is_no_runner(line: str) -> None:
    with pytest.raises(sky.InvalidField, match=r"Image\.runner"):
        sky.Image(runner=line)


OURS = ("SKYINFRA_NODE_DIR", "SKYINFRA_SLOT", "SKYINFRA_PRELOAD", "SKYINFRA_TREE", "SKYINFRA_SECRETS", "SKYINFRA_NEW")


@pytest.mark.parametrize("name", OURS)
def test_variables_of_the_runner_are_nobody_else_s(name: str) -> None:
    for declare in (
        lambda: sky.Image(env={name: "/tmp"}),
        lambda: sky.Image(env={name: sky.Secret("TOKEN")}),
        lambda: sky.compute(env={name: "/tmp"})(print),
        lambda: sky.connect("stack/pool", env={name: "/tmp"}),
    ):
        with pytest.raises(sky.InvalidField, match="the runner sets this variable"):
            declare()
    assert is_ours(name)


def test_variables_of_users_are_theirs() -> None:
    for name in ("SKYINFRA_DEBUG", "SKYINFRA_JAX_DISTRIBUTED", "LD_PRELOAD", "PATH"):
        assert sky.Image(env={name: "1"}).env == {name: "1"}


def test_a_node_takes_none_of_an_older_declaration() -> None:
    assert image_variables([*((name, "/tmp") for name in OURS), ("A", "1"), ("SKYINFRA_DEBUG", "1")]) == {
        "A": "1",
        "SKYINFRA_DEBUG": "1",
    }
