"""``with sky.ComputePool(...) as pool``: deployed around a block, destroyed however the block ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from front_ends.on_terminal import Leaving
from terraform_projects.commands import environment, processes, skyinfra, until

HEAD = """
import os, sys, time
import skyinfra as sky

@sky.compute
def visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]

POOL = sky.ComputePool(provider=sky.Local(simulate=True), accelerator="H100/3g.40gb")
"""


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(HEAD + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def nothing_left(folder: Path) -> None:
    until(lambda: not processes(folder))
    assert [p.name for p in folder.iterdir()] == ["program.py"]


def test_deploys_runs_and_destroys(tmp_path: Path) -> None:
    body = """
    with POOL as pool:
        print(*(visible() @ pool))
        a, b = sky.gather(visible(), visible()) >> pool
        print(len(pool.slots()))
    """
    out, err = start(tmp_path, body).communicate(timeout=180)
    assert out.count("MIG-") == 2, err
    assert out.endswith("2\n")
    # Where nobody watches: where it begins, where it is ready, and its end.
    said = [line for line in err.splitlines() if line.startswith("session: ")]
    assert len(err.splitlines()) == 3 and "deploying 1 node of local, H100:1/3g.40gb (simulated)" in said[0]
    assert "ready, 1 node with 2 slots" in said[1] and "destroyed" in said[2]
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_killed_program_leaves_a_fleet_that_the_command_line_finds_and_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "with POOL as pool:\n    open('inside', 'w').close()\n    time.sleep(120)")
    until(lambda: (tmp_path / "inside").exists())
    assert "which still runs" in skyinfra(tmp_path).stdout
    process.kill()
    process.communicate(timeout=60)
    assert "program.py, process" in (out := skyinfra(tmp_path).stdout) and "ended without destroying it" in out
    (tmp_path / "below").mkdir()
    found = skyinfra(tmp_path / "below", "status", "--json")
    (stack,) = json.loads(found.stdout)["stacks"]
    assert stack["block"]["pid"] == process.pid and not stack["block"]["running"]
    assert len(stack["pools"][0]["nodes"][0]["slots"]) == 2
    assert f"The project is that of {tmp_path}.\n" in found.stderr
    for words in (["top", "session/pool"], ["jobs", "session"], ["logs", "session"], ["doctor", "session"]):
        assert skyinfra(tmp_path, *words).stdout
    assert skyinfra(tmp_path, "exec", "session", "--", "echo", "hi").stdout == "hi\n"
    (tmp_path / "script.py").write_text("print('ran')")
    assert skyinfra(tmp_path, "run", "session", "script.py").stdout == "ran\n"
    # The next program of that name has it, as it stands, and ends it.
    body = "with POOL as pool:\n    print(*(visible() @ pool))"
    out, err = start(tmp_path, body).communicate(timeout=180)
    assert out.count("MIG-") == 2 and "session: takes over the fleet that program.py left, since 20" in err
    until(lambda: not processes(tmp_path))
    assert not (tmp_path / ".skyinfra").exists()


@pytest.mark.slow
def test_the_command_line_destroys_the_fleet_of_a_killed_program(tmp_path: Path) -> None:
    process = start(tmp_path, "with POOL as pool:\n    open('inside', 'w').close()\n    time.sleep(120)")
    until(lambda: (tmp_path / "inside").exists())
    (tmp_path / "inside").unlink()
    process.kill()
    process.communicate(timeout=60)
    done = skyinfra(tmp_path, "destroy", "--auto-approve")
    assert "session: destroyed" in done.stdout and "ended without destroying it" in done.stderr
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_job_of_the_block_is_kept(tmp_path: Path) -> None:
    body = """
    @sky.compute
    def says() -> None:
        print("it is said")

    with POOL as pool:
        pool.submit(says, detach="says").result(timeout=60)
    """
    _, err = start(tmp_path, body).communicate(timeout=180)
    assert f"1 of 1 job kept in {tmp_path}/.skyinfra/.jobs/session" in err, err
    until(lambda: not processes(tmp_path))
    (log,) = (tmp_path / ".skyinfra").rglob("output.log")
    assert log.read_text() == "it is said\n"
    assert [each.name for each in (tmp_path / ".skyinfra").iterdir()] == [".jobs"]


@pytest.mark.slow
def test_a_secret_of_the_image_is_in_no_plan_no_state_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "v4lue-of-the-t0ken")
    body = """
    image = sky.Image(env={"HUB": sky.Secret("A_TOKEN")})
    seen = sky.compute(lambda: (os.environ["HUB"] == "v4lue" + "-of-the-t0ken", "A_TOKEN" in os.environ))
    with sky.ComputePool(provider=sky.Local(simulate=True), image=image) as pool:
        print(seen() >> pool)
        files = [path for path in pathlib.Path(".skyinfra").rglob("*") if path.is_file()]
        print({"cdk.tf.json", "terraform.tfstate", "node.json"} <= {path.name for path in files})
        print([str(path) for path in files if os.environ["A_TOKEN"].encode() in path.read_bytes()])
        print(sum(b"A_TOKEN" in path.read_bytes() for path in files) > 0)
    """
    out, err = start(tmp_path, "import pathlib\n" + textwrap.dedent(body)).communicate(timeout=180)
    assert out == "(True, False)\nTrue\n[]\nTrue\n", err
    assert "v4lue-of-the-t0ken" not in out + err
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_block_that_raises(tmp_path: Path) -> None:
    process = start(tmp_path, "with POOL as pool:\n    raise KeyError('mine')")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "KeyError: 'mine'" in err
    nothing_left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["block", "deploy"])
def test_a_block_that_is_interrupted(tmp_path: Path, number: signal.Signals, where: str) -> None:
    process = start(tmp_path, "with POOL as pool:\n    open('inside', 'w').close()\n    time.sleep(120)")
    if where == "block":
        until(lambda: (tmp_path / "inside").exists())
        (tmp_path / "inside").unlink()
    else:
        until(lambda: (tmp_path / ".skyinfra" / "session" / "pool" / "pool-0").exists())
    process.send_signal(number)
    if number == signal.SIGTERM:  # `timeout` sends it twice, batch systems more often
        for _ in range(100):
            time.sleep(0.02)
            process.send_signal(number)
    _, err = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "/jsii/" not in err and (where == "deploy" or err.count("  File") <= 4), err
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_signal_ends_no_destroy_and_then_the_program(tmp_path: Path) -> None:
    process = start(tmp_path, "with POOL as pool:\n    open('inside', 'w').close()\nprint('never')")
    until(lambda: (tmp_path / "inside").exists())
    (tmp_path / "inside").unlink()
    for _ in range(100):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGTERM and out == "", err
    nothing_left(tmp_path)


def test_a_block_whose_terminal_closes(tmp_path: Path) -> None:
    """As a link of ssh that breaks: what is printed from then on would fail."""
    body = "with POOL as pool:\n    open('inside', 'w').close()\n    time.sleep(120)"
    (tmp_path / "program.py").write_text(HEAD + body)
    program = Leaving([sys.executable, "program.py"], tmp_path, environment())
    until(lambda: program.read() or (tmp_path / "inside").exists())
    (tmp_path / "inside").unlink()
    assert program.close() == 128 + signal.SIGHUP
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_connection_that_cannot_be_closed_does_not_keep_the_fleet(tmp_path: Path) -> None:
    body = """
    with POOL as pool:
        folder = os.path.join(".skyinfra", ".sessions", "session")
        print(oct(os.stat(folder).st_mode & 0o777))
        really = pool.close
        def close():
            really()
            raise RuntimeError("closing failed")
        pool.close = close
    """
    process = start(tmp_path, body)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "RuntimeError: closing failed" in err
    assert out == "0o700\n"  # the state in it holds the fleet secret
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_pool_that_cannot_be_deployed(tmp_path: Path) -> None:
    body = """
    with sky.ComputePool(provider=sky.Local(), accelerator="H100") as pool:
        print("never")
    """
    process = start(tmp_path, body)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "never" not in out
    assert "skyinfra.TerraformFailed" in err and "NVIDIA" in err
    # There is no project here that the command line could go on with.
    assert "skyinfra destroy" not in err and "is destroyed again" in err
    nothing_left(tmp_path)


@pytest.mark.slow
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / ".skyinfra").write_text("in the way")
    process = start(tmp_path, "with POOL as pool:\n    print('never')")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 1 and out == ""
    assert "skyinfra.ProjectError" in err and "cannot be written: Not a directory" in err


@pytest.mark.slow
def test_the_same_name_a_second_time(tmp_path: Path) -> None:
    body = """
    with POOL as pool:
        import skyinfra.deploy
        try:
            skyinfra.deploy.session.Session(POOL).open()
        except sky.FleetError as error:
            print("refused", error.field)
        print(*(visible() @ pool))
    """
    out, err = start(tmp_path, body).communicate(timeout=180)
    assert "refused stack" in out, err
    assert out.count("MIG-") == 2
    nothing_left(tmp_path)
