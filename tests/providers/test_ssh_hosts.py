"""sky.SSH: which hosts are declared, and what machines that stand already cannot give."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from far_end.stand_in import far_end
from support import ROOT

import skyinfra as sky
from skyinfra.compiler import compile_pool
from skyinfra.errors import DeclarationError, InvalidField, NotSupported

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ8VhYh0z0o0m7m4b3qvJqk0d1k2m3n4p5q6r7s8t9u0"


def pool(*hosts: Any, **fields: Any) -> sky.ComputePool:
    return sky.ComputePool(name="lab", provider=sky.SSH(hosts=hosts), **{"nodes": len(hosts), **fields})


def test_hosts_are_names_or_hosts() -> None:
    other = sky.Host("10.0.0.7", user="ubuntu", port=2222, host_key=KEY, via="me@bastion", inside="192.168.0.7")
    inputs = compile_pool(pool("gpu1", "root@gpu2", other), "s").selection.inputs
    assert inputs["hosts"] == [
        {"address": "gpu1"},
        {"address": "gpu2", "user": "root"},
        {
            "address": "10.0.0.7",
            "user": "ubuntu",
            "port": 2222,
            "host_key": KEY,
            "inside": "192.168.0.7",
            "via": {"address": "bastion", "user": "me"},
        },
    ]
    assert compile_pool(pool("gpu1"), "s").head.scheduler == "0.0.0.0:8786"


@pytest.mark.parametrize(
    ("head", "listens"),
    [
        ("fd00::7", "[::]:8786"),
        (sky.Host("gpu1", inside="fd00::7"), "[::]:8786"),
        (sky.Host("fd00::7", inside="10.0.0.7"), "0.0.0.0:8786"),
    ],
)
def test_a_head_listens_at_addresses_of_the_kind_at_which_it_is_reached(head: Any, listens: str) -> None:
    assert compile_pool(pool(head, "gpu2"), "s").head.scheduler == listens


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([], "at least one host"),
        ("gpu1", "expected a list of hosts: ['gpu1']"),
        (["gpu1", "GPU1"], "SSH.hosts[1]: the same host as hosts[0]"),
        (["gpu1", "me@gpu1"], "SSH.hosts[1]: the same host as hosts[0]"),
        ([sky.Host("gpu1", inside="10.0.0.7"), "10.0.0.7"], "SSH.hosts[1]: the same host as hosts[0]"),
        (["-oProxyCommand=reboot"], "Host.address"),
        (["a b"], "Host.address"),
        (["gpu1;reboot"], "Host.address"),
        (["10.0.0.7:2222"], 'Declare sky.Host("10.0.0.7", port=2222).'),
        (["me@corp.com@10.0.0.7:22"], 'Declare sky.Host("10.0.0.7", user="me@corp.com", port=22).'),
        (["ssh://me@gpu1:2222/"], 'Declare sky.Host("gpu1", user="me", port=2222).'),
        (["[fd00::7]:2222"], 'Declare sky.Host("fd00::7", port=2222).'),
        ([sky.Host("gw", port=2201), sky.Host("gw", port=2202)], "each has its own `inside`"),
        ([sky.Host("gw", port=22, inside="a"), sky.Host("gw", port=22, inside="b")], "differ in `port` or `via`"),
        ([sky.Host("gw", port=2201, via="gw")], "SSH.hosts[0].via: has one machine twice on the way"),
        ([sky.Host("a", via=sky.Host("b", via="a"))], "SSH.hosts[0].via: has one machine twice on the way"),
    ],
)
def test_hosts_that_cannot_be_are_refused(hosts: Any, words: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(words)):
        sky.SSH(hosts=hosts)


def test_machines_behind_one_address_are_named_by_port_and_way() -> None:
    behind = sky.SSH(hosts=[sky.Host("gw", port=2201, inside="a"), sky.Host("gw", port=2202, inside="b"), "other"])
    assert behind._labels() == ["gw-2201", "gw-2202", "other"]
    ways = [sky.Host("10.0.0.5", via=via, inside=f"{via}-5") for via in ("left", "right")]
    assert sky.SSH(hosts=ways)._labels() == ["10-0-0-5-left", "10-0-0-5-right"]


def test_no_machine_on_the_way_is_dropped() -> None:
    host = sky.Host("gpu1", via=sky.Host("inner", port=2222, via=sky.Host("middle", via="me@outer")))
    assert compile_pool(pool(host), "s").selection.inputs["hosts"] == [
        {
            "address": "gpu1",
            "via": {"address": "inner", "port": 2222},
            "hops": [{"address": "middle"}, {"address": "outer", "user": "me"}],
        }
    ]


@pytest.mark.parametrize(
    "pasted", [f"gpu1 {KEY}", f"|1|aGFzaA==|c2FsdA== {KEY}", f"# gpu1:22 SSH-2.0-OpenSSH_9.6\n[gpu1]:2222 {KEY}\n", KEY]
)
def test_a_line_of_ssh_keyscan_is_a_host_key(pasted: str) -> None:
    assert sky.Host("gpu1", host_key=pasted).host_key == KEY


def test_addresses_of_ipv6_and_users_of_a_domain_are_taken() -> None:
    first, second = sky.SSH(hosts=["me@corp.com@gpu1", "fd00::7"])._hosts
    assert (first.user, first.address, second.address) == ("me@corp.com", "gpu1", "fd00::7")


@pytest.mark.parametrize(
    "fields",
    [{"user": "me$(id)"}, {"port": 0}, {"host_key": "gpu1 ssh-dss AAAA"}, {"host_key": f"{KEY}\n{KEY}"}],
)
def test_fields_of_a_host_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=f"Host.{next(iter(fields))}"):
        sky.Host("gpu1", **fields)


@pytest.mark.parametrize(
    "fields", [{"spot": True}, {"vcpus": 4}, {"memory_gb": 16.0}, {"disk_gb": 100}, {"max_hourly_cost": 1.0}]
)
def test_what_machines_that_stand_cannot_give_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(NotSupported, match=next(iter(fields))) as caught:
        compile_pool(pool("gpu1", **fields), "s")
    assert "sky.SSH()" in str(caught.value)


@pytest.mark.parametrize("nodes", [1, 3])
def test_every_host_is_one_node(nodes: int) -> None:
    with pytest.raises(DeclarationError, match="nodes: the declaration has 2 hosts, and each is one node"):
        compile_pool(pool("gpu1", "gpu2", nodes=nodes), "s")


def host_program(folder: Path, verb: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs modules/hosts/host.sh for a machine whose disk is in *folder*."""
    environment = {**os.environ, **far_end(folder, os.environ["PATH"])}
    for of in ("", "HEAD_"):
        for name in ("SSH_USER", "KEY_FILE", "VIA", "VIA_USER", "VIA_HOST_KEY", "VIA_KEY_FILE"):
            environment[of + name] = ""
        environment |= {f"{of}SSH_PORT": "0", f"{of}HOST_KEY": "ssh-ed25519 AAAA", f"{of}VIA_PORT": "0"}
    environment |= {"FLEET": "s/lab", "FLEET_ID": "1", **variables}
    program = ROOT / "modules" / "hosts" / "host.sh"
    return subprocess.run(["sh", str(program), verb], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("node", "declared", "gone", "left"),
    [
        ("lab-gpu1", {"HOST": "gpu1"}, "gpu0,gpu1", True),
        ("lab-10-0-0-7", {"HOST": "10.0.0.7", "SSH_PORT": "2222"}, "10.0.0.7", True),
        ("lab-gw-2201", {"HOST": "gw", "SSH_PORT": "2201"}, "lab-gw-2201", True),
        # Of two behind one address only that which is named.
        ("lab-gw-2202", {"HOST": "gw", "SSH_PORT": "2202"}, "lab-gw-2201", False),
        ("lab-gw-2202", {"HOST": "gw", "SSH_PORT": "2202"}, "gw", False),
        ("lab-second", {"HOST": "gw"}, "gw", False),
        ("lab-gpu1", {"HOST": "gpu1"}, "", False),
    ],
)
def test_a_host_that_is_gone_is_let_go_by_its_name(
    tmp_path: Path, node: str, declared: dict[str, str], gone: str, left: bool
) -> None:
    machines = tmp_path / "far-end"
    machines.mkdir()
    (machines / f"{declared['HOST']}.off").write_text("ssh: connect to host port 22: No route to host\n" * 3)
    done = host_program(machines, "down", NODE=node, SKYINFRA_GONE=gone, **declared)
    assert (done.returncode == 0) == left, done.stderr
    alone = {"lab-gpu1": "gpu1"}.get(node, node)
    assert left or f"SKYINFRA_GONE={alone} in the environment" in done.stderr


def test_what_a_machine_prints_before_and_after_is_no_part_of_its_answer(tmp_path: Path) -> None:
    machines = tmp_path / "far-end"
    (tmp_path / "bashrc").write_text("echo welcome; trap 'echo good bye' EXIT")
    prints = {"LOGIN_SHELL": "bash", "BASH_ENV": str(tmp_path / "bashrc")}
    runner = tmp_path / "runner-1.whl"
    runner.write_bytes(bytes(range(256)) + b"no end of a line")
    versions = '{"wheel":{"name":"runner-1.whl"}}'
    declared = {"SECRET": "abc", "USER_DATA": "exit 0", "VERSIONS": versions, "RUNNER": str(runner)}
    done = host_program(machines, "deliver", HOST="head", **declared, **prints)
    assert done.returncode == 0, done.stderr
    # The worker gets what the head says that it has, whatever runner is here now.
    (tmp_path / "runner-2.whl").write_bytes(b"another")
    other = {**declared, "VERSIONS": "{}", "RUNNER": str(tmp_path / "runner-2.whl")}
    done = host_program(machines, "deliver", HOST="worker", HEAD_HOST="head", **other, **prints)
    assert done.returncode == 0, done.stderr
    delivered = machines / "worker" / "opt/skyinfra/delivered"
    assert (delivered / "versions.json").read_text() == versions
    assert (delivered / "runner-1.whl").read_bytes() == runner.read_bytes()
