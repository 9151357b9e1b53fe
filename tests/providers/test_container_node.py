"""modules/container/node.sh: what it asks of an engine. The program here only notes what it is asked."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from support import ROOT

SCRIPT = ROOT / "modules" / "container" / "node.sh"
# Notes its arguments, one on a line; $FAKE fails with $SAYS. There is no container yet, and everything else.
ENGINE = """#!/bin/sh
printf '%s\\n' "$@" '--end--' >>"$NOTES"
[ "$1" != --host ] || shift 2
[ "$1" != --remote ] || shift 3
[ "$1" != "${FAKE-}" ] || { printf '%s\\n' "$SAYS" >&2; exit 1; }
case "$1 $2" in
  "container inspect")
    [ -z "${STANDS-}" ] || { echo "running 0 id"; exit; }
    echo "${INSPECTED:-Error: no such container c}" >&2; exit 1 ;;
  "context inspect") echo "${CONTEXT-}" ;;
  "system connection") echo "gpu-box=${CONNECTION-}" ;;
  "network inspect") echo '10.89.7.1 ' ;;
  "logs "*) printf '%s\\n' "${LOG-}" | tail -n "$3" ;;
esac
"""
# Stand-ins of ssh, loginctl and id; what they answer is in variables.
ASKED = """#!/bin/sh
printf '%s\\n' "$@" '--end--' >>"$NOTES"
if [ "$1" = -G ]; then echo "remotecommand tmux attach"; else exit "${SSH-0}"; fi
"""
SESSION = """#!/bin/sh
case "${0##*/} $1" in
  "loginctl "*) echo "${LINGER-}" ;;
  "id -u") echo "${USER_ID-0}" ;;
  "id -un") echo me ;;
esac
"""
NO_DRIVER = 'Error response from daemon: could not select device driver ""'
NODE = {
    "CONTAINER": "skyinfra-p-1-0",
    "HEAD": "skyinfra-p-1-0",
    "NODE": "p-0",
    "MADE_FOR": "id",
    "IMAGE": "image",
    "NETWORK": "net",
    "OWN_NETWORK": "1",
    "STATE": "skyinfra-p-1-jobs",
    "DELIVERED": "skyinfra-p-1-delivered",
    "PUBLISH": "127.0.0.1:21000:8786",
    "GPUS": "",
    "LABELS": "",
    "USER_DATA": "the user data",
    "WAIT": "5",
}


class Engine:
    """The programs ``docker`` and ``podman`` of a folder, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name in ("docker", "podman"):
            (self.bin / name).write_text(ENGINE)
            (self.bin / name).chmod(0o755)

    def call(self, verb: str, **variables: str) -> subprocess.CompletedProcess[str]:
        self.notes.write_text("")
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "NOTES": str(self.notes), "HOST": "", **variables}
        return subprocess.run(["sh", str(SCRIPT), verb], env=env, capture_output=True, text=True)

    @property
    def asked(self) -> list[list[str]]:
        """The arguments of each call."""
        return [call.split("\n")[:-1] for call in self.notes.read_text().split("--end--\n")[:-1]]

    def creating(self, **variables: str) -> list[str]:
        """The arguments that the container of a node is made with."""
        done = self.call("up", **{**NODE, **variables})
        assert done.returncode == 0, done.stderr
        return next(call for call in self.asked if "create" in call)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def pairs(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(arguments) if name == option]


def test_a_node_is_made_with_what_is_declared(engine: Engine) -> None:
    made = engine.creating(ENGINE="docker", LABELS="team=a b\ncost=$(id)")
    assert made[-4:] == ["--entrypoint", "/bin/sh", "image", "/skyinfra-start"]
    assert {"--label=team=a b", "--label=cost=$(id)"} <= set(made)
    assert pairs(made, "--publish") == ["127.0.0.1:21000:8786"] and pairs(made, "--restart") == ["always"]
    assert pairs(made, "--volume") == [
        "skyinfra-p-1-delivered:/opt/skyinfra/delivered:ro",
        "skyinfra-p-1-jobs:/var/lib/skyinfra-head",
    ]
    assert not {"--gpus", "--device", "--ip", "--add-host", "--privileged"} & set(made)
    assert "the user data" not in engine.notes.read_text()
    order = [call[0] for call in engine.asked]
    assert order.index("create") < order.index("cp") < order.index("start") < order.index("exec")


def test_the_head_of_a_network_of_podman_has_a_fixed_address(engine: Engine) -> None:
    head = engine.creating(ENGINE="podman")
    worker = engine.creating(ENGINE="podman", CONTAINER="skyinfra-p-1-1", STATE="", PUBLISH="")
    assert pairs(head, "--ip") == ["10.89.7.250"] and not pairs(worker, "--ip")
    assert pairs(head, "--add-host") == pairs(worker, "--add-host") == ["skyinfra-p-1-0:10.89.7.250"]
    assert not pairs(worker, "--publish") and len(pairs(worker, "--volume")) == 1
    assert not pairs(engine.creating(ENGINE="podman", OWN_NETWORK=""), "--ip")
    assert not {"--publish", "--hostname"} & set(engine.creating(ENGINE="podman", NETWORK="host", OWN_NETWORK=""))


def test_gpus_are_named_as_each_engine_does(engine: Engine) -> None:
    assert pairs(engine.creating(ENGINE="docker", GPUS="all"), "--gpus") == ["all"]
    assert pairs(engine.creating(ENGINE="docker", GPUS="GPU-1,MIG-2"), "--gpus") == ['"device=GPU-1,MIG-2"']
    devices = pairs(engine.creating(ENGINE="podman", GPUS="GPU-1,MIG-2"), "--device")
    assert devices == ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=MIG-2"]
    assert pairs(engine.creating(ENGINE="podman", GPUS="all"), "--device") == ["nvidia.com/gpu=all"]


@pytest.mark.parametrize(
    ("program", "host", "begins"),
    [
        ("docker", "ssh://me@gpu1", ["--host", "ssh://me@gpu1"]),
        ("docker", "unix:///run/d.sock", ["--host", "unix:///run/d.sock"]),
        ("podman", "unix:///run/p.sock", ["--remote", "--url", "unix:///run/p.sock"]),
        ("podman", "ssh://me@gpu1:2222/run/p.sock", ["--remote", "--url", "ssh://me@gpu1:2222/run/p.sock"]),
        ("podman", "ssh://root@gpu1", ["--remote", "--url", "ssh://root@gpu1/run/podman/podman.sock"]),
    ],
)
def test_every_call_goes_to_the_host(engine: Engine, program: str, host: str, begins: list[str]) -> None:
    engine.creating(ENGINE=program, HOST=host)
    assert len(engine.asked) > 5 and all(call[: len(begins)] == begins for call in engine.asked)


def test_podman_on_another_machine_needs_the_path_of_its_socket(engine: Engine) -> None:
    done = engine.call("down", ENGINE="podman", HOST="ssh://me@gpu1", CONTAINER="c")
    assert done.returncode == 1 and not engine.asked
    assert "ssh://me@gpu1/run/user/1000/podman/podman.sock" in done.stderr


def test_the_secret_is_on_no_command_line(engine: Engine, tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    wheel.touch()
    given = {"SECRET": "very-secret", "VERSIONS": "{}", "RUNNER": str(wheel), "TMPDIR": str(tmp_path)}
    done = engine.call("prepare", ENGINE="docker", IMAGE="image", NETWORK="net", STATE="s", DELIVERED="d", **given)
    assert done.returncode == 0, done.stderr
    (copied,) = [call for call in engine.asked if call[0] == "cp"]
    assert copied[2] == "d:/delivered" and "very-secret" not in engine.notes.read_text() + done.stdout + done.stderr
    # Nor is the copy for the engine left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "notes", "w.whl"]


def test_an_engine_that_sees_no_temporary_folder_gets_what_is_copied(engine: Engine, tmp_path: Path) -> None:
    """Docker as a snap has a /tmp of its own, and reads of this machine what is below the home alone."""
    (tmp_path / "runner.whl").write_text("wheel")
    sees_nothing = """
case "$*" in *"${TMPDIR:-/tmp}"/*) echo "lstat: no such file or directory" >&2; exit 1 ;; esac
if [ "$1 $2" = "cp -" ]; then
  mkdir -p "$GOT/${3#*:}" && tar -tv --numeric-owner -f - -C "$GOT" >>"$GOT/list" || exit 1
fi
"""
    for name in ("docker", "podman"):
        (engine.bin / name).write_text(ENGINE.replace("\ncase", sees_nothing + "case", 1))
    got = {"GOT": str(tmp_path / "got"), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    (tmp_path / "got").mkdir()
    fleet = {"SECRET": "abc", "VERSIONS": "{}", "RUNNER": str(tmp_path / "runner.whl")}
    done = engine.call("prepare", ENGINE="docker", **{**NODE, **fleet}, **got)
    assert done.returncode == 0, done.stderr
    done = engine.call("up", ENGINE="docker", **NODE, **got)
    assert done.returncode == 0, done.stderr
    # Who copied it is no user of the container's, and the secret is for root alone.
    files = [line.split() for line in (tmp_path / "got" / "list").read_text().splitlines()]
    assert {(mode, owner, words[-1]) for mode, owner, *words in files if not mode.startswith("d")} == {
        ("-rw-------", "0/0", name) for name in ("./secret", "./versions.json", "./runner.whl", "skyinfra-start")
    }
    assert not list((tmp_path / "temporary").iterdir())


def test_the_first_engine_that_answers_is_found(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "root" / "stack" / "p.engine"
    assert engine.call("find", FILE=str(file)).returncode == 0 and file.read_text() == "docker\n"
    (engine.bin / "docker").unlink()
    if not any(Path(folder, "docker").exists() for folder in ("/usr/bin", "/bin")):
        assert engine.call("find", FILE=str(file), ENGINE="").returncode == 0 and file.read_text() == "podman\n"
    none = engine.call("find", FILE=str(file), ENGINE="podman", FAKE="ps", SAYS="cannot connect.\n")
    assert none.returncode == 1 and "podman does not answer: cannot connect: start its service" in none.stderr
    engine.call("forget", FILE=str(file))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("program", "fake", "says", "words"),
    [
        ("docker", "start", "Error: 127.0.0.1:21000 failed: port is already allocated", "port: 127.0.0.1:21000 is"),
        (
            "docker",
            "start",
            f"{NO_DRIVER}\nError: failed to start containers: c",
            f"gpus: the container gets no GPUs GPU-1: {NO_DRIVER}",
        ),
        ("podman", "start", "Error: unresolvable CDI devices nvidia.com/gpu=GPU-1", "nvidia-ctk cdi generate"),
        ("podman", "create", "Error: no such option", "p-0 cannot be started: Error: no such option"),
        ("docker", "cp", "no space left", "the start script cannot be copied into skyinfra-p-1-0: no space left"),
        ("docker", "network", "no", "network: docker has no network net: make it with `docker network create net`"),
    ],
)
def test_what_an_engine_refuses(engine: Engine, program: str, fake: str, says: str, words: str) -> None:
    done = engine.call("up", **{**NODE, "ENGINE": program, "GPUS": "GPU-1", "FAKE": fake, "SAYS": says})
    assert done.returncode == 1
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


STEPS = [f'{{"step": "{step}", "state": "{state}"}}' for step in "abcdef" for state in ("started", "done")]


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        # It was started again before anybody asked why it had ended.
        (
            [*STEPS, "it broke", '{"step": "g", "state": "failed"}', *STEPS],
            'it broke\n{"step": "g", "state": "failed"}',
        ),
        (STEPS, "\n".join(STEPS[-10:])),
    ],
)
def test_a_container_that_ended_says_why_also_when_it_runs_again(engine: Engine, printed: list[str], said: str) -> None:
    log = {"FAKE": "exec", "SAYS": "not running", "LOG": "\n".join(printed)}
    done = engine.call("up", **{**NODE, "ENGINE": "docker", **log})
    assert done.returncode == 1
    assert done.stderr == f"skyinfra: p-0 has ended instead of starting: {said}\n"


def test_what_is_gone_is_removed_all_the_same(engine: Engine) -> None:
    assert engine.call("down", ENGINE="docker", CONTAINER="c").returncode == 0
    assert not [call for call in engine.asked if call[0] in ("rm", "stop")]
    silent = engine.call("down", ENGINE="docker", CONTAINER="c", FAKE="ps", SAYS="Cannot connect")
    assert silent.returncode == 1 and "docker does not answer" in silent.stderr


@pytest.mark.parametrize("said", ["Error: no such container c", "Error response from daemon: No such container: c"])
def test_a_container_is_gone_where_the_engine_says_so(engine: Engine, said: str) -> None:
    assert engine.call("down", ENGINE="docker", CONTAINER="c", INSPECTED=said).returncode == 0


def test_an_engine_that_fails_has_not_said_that_a_container_is_gone(engine: Engine) -> None:
    silent = engine.call("down", ENGINE="docker", CONTAINER="c", INSPECTED="Error: broken pipe")
    assert silent.returncode == 1
    assert silent.stderr == "skyinfra: engine: docker does not say whether there is c: Error: broken pipe\n"


ELSEWHERE = [
    ("docker", {"CONTEXT": "ssh://me@gpu-box"}, "ssh://me@gpu-box"),
    ("docker", {"DOCKER_HOST": "tcp://docker:2375", "CONTEXT": "unix:///var/run/docker.sock"}, "tcp://docker:2375"),
    ("podman", {"CONTAINER_HOST": "ssh://me@gpu-box/run/p.sock"}, "ssh://me@gpu-box/run/p.sock"),
    ("podman", {"CONTAINER_CONNECTION": "gpu-box", "CONNECTION": "ssh://me@gpu-box/p"}, "ssh://me@gpu-box/p"),
]


@pytest.mark.parametrize(("program", "variables", "place"), ELSEWHERE)
@pytest.mark.parametrize("verb", ["find", "down"])
def test_an_engine_of_another_machine_is_none_of_this_one(
    engine: Engine, tmp_path: Path, verb: str, program: str, variables: dict[str, str], place: str
) -> None:
    done = engine.call(verb, ENGINE=program, CONTAINER="c", FILE=str(tmp_path / "file"), **variables)
    assert done.returncode == 1 and not (tmp_path / "file").exists()
    assert f"engine: {program} speaks to {place} (its context, or a variable)" in done.stderr
    assert 'sky.Container(host="ssh://...")' in done.stderr
    # Whose address is declared is asked there.
    assert engine.call("down", ENGINE=program, CONTAINER="c", HOST="ssh://root@gpu1", **variables).returncode == 0


def test_what_a_version_before_has_made_at_another_engine_is_removed_there(engine: Engine) -> None:
    done = engine.call("down", ENGINE="docker", CONTAINER="c", CONTEXT="ssh://gpu-box", STANDS="1")
    assert done.returncode == 0, done.stderr
    assert [call for call in engine.asked if call[0] == "rm"]


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("docker", {"CONTEXT": "unix:///home/me/.colima/docker.sock"}),
        ("docker", {"DOCKER_HOST": "tcp://127.0.0.1:2375", "CONTEXT": "ssh://gpu-box"}),
        ("docker", {"DOCKER_HOST": "tcp://[::1]:2375"}),
        ("docker", {"DOCKER_HOST": "tcp://0.0.0.0:2375"}),
        ("docker", {"DOCKER_HOST": "tcp://:2375"}),
        ("docker", {"DOCKER_HOST": "tcp://127.0.1.1:2375"}),
        ("docker", {"CONTAINER_HOST": "ssh://gpu-box"}),
        ("podman", {"CONTAINER_HOST": "tcp://localhost:1234", "DOCKER_HOST": "ssh://gpu-box"}),
        ("podman", {"CONTAINER_HOST": "ssh://core@127.0.0.1:49637/run/user/501/podman/podman.sock"}),
    ],
)
def test_an_engine_of_this_machine(engine: Engine, program: str, variables: dict[str, str]) -> None:
    done = engine.call("down", ENGINE=program, CONTAINER="c", **variables)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def session(engine: Engine) -> Engine:
    for name, text in {"ssh": ASKED, "loginctl": SESSION, "id": SESSION}.items():
        (engine.bin / name).write_text(text)
        (engine.bin / name).chmod(0o755)
    return engine


@pytest.mark.parametrize("program", ["docker", "podman"])
@pytest.mark.parametrize(
    ("host", "machine"),
    [
        ("ssh://me@gpu1:22/run/user/1000/p.sock", "ssh://me@gpu1:22"),
        ("ssh://root@gpu1/run/user/1000/p.sock", "ssh://root@gpu1"),
        ("ssh://[fd00::7]/run/user/1000/p.sock", "ssh://[fd00::7]"),
    ],
)
def test_a_user_of_another_machine_has_to_linger(
    session: Engine, tmp_path: Path, program: str, host: str, machine: str
) -> None:
    file = tmp_path / "file"
    given = {"ENGINE": program, "HOST": host, "FILE": str(file)}
    done = session.call("find", **given, SSH="1")
    assert done.returncode == 1 and not file.exists()
    assert "skyinfra: host: containers of the user 1000 end with its last login" in done.stderr
    assert "`loginctl enable-linger 1000` there" in done.stderr
    assert machine in session.asked[-1] and "linger/$(getent passwd 1000 |" in session.asked[-1][-1]
    # Beside one of the configuration, such as `tmux attach`, ssh runs none, and nothing would be known.
    assert "RemoteCommand=none" in session.asked[-1]
    # It lingers, or nobody knows.
    for code in ("0", "255", "127"):
        assert (session.call("find", **given, SSH=code).returncode, file.read_text()) == (0, f"{program}\n")


@pytest.mark.parametrize("host", ["ssh://root@gpu1", "ssh://me@gpu1/run/p.sock", "ssh://root@gpu1/run/user/0/p.sock"])
def test_root_needs_not_linger(session: Engine, tmp_path: Path, host: str) -> None:
    assert session.call("find", ENGINE="podman", HOST=host, FILE=str(tmp_path / "file"), SSH="1").returncode == 0


@pytest.mark.parametrize(
    ("program", "variables", "said"),
    [
        ("podman", {"USER_ID": "1000", "LINGER": "no"}, True),
        ("podman", {"USER_ID": "1000", "LINGER": "no", "HOST": "unix:///run/user/1000/podman/podman.sock"}, True),
        ("docker", {"USER_ID": "1000", "LINGER": "no", "CONTEXT": "unix:///run/user/1000/docker.sock"}, True),
        ("docker", {"USER_ID": "1000", "LINGER": "no", "CONTEXT": "unix:///var/run/docker.sock"}, False),
        ("podman", {"USER_ID": "1000", "LINGER": "no", "CONTAINER_HOST": "unix:///run/podman/podman.sock"}, False),
        ("podman", {"USER_ID": "1000", "LINGER": "yes"}, False),
        # No systemd.
        ("podman", {"USER_ID": "1000", "LINGER": ""}, False),
        ("podman", {"USER_ID": "0", "LINGER": "no"}, False),
    ],
)
def test_a_user_of_this_machine_is_only_warned(
    session: Engine, tmp_path: Path, program: str, variables: dict[str, str], said: bool
) -> None:
    done = session.call("find", ENGINE=program, FILE=str(tmp_path / "file"), **variables)
    assert done.returncode == 0 and (tmp_path / "file").exists()
    assert ("containers of me end when it logs out" in done.stderr) == said == bool(done.stderr)


def test_the_script_is_plain_sh() -> None:
    for shell in filter(os.path.exists, ("/bin/dash", "/bin/bash")):
        assert subprocess.run([shell, "-n", SCRIPT]).returncode == 0
