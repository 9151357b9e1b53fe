"""Machines of a cloud that are set up over SSH, on the mock bed with a stand-in for the far end of `ssh`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cloud_modules.cases import AZURE, CASES, CLOUDS, DIGITALOCEAN, LAMBDA, NEBIUS, VERDA, ModuleCase
from cloud_modules.states import SSH
from far_end.stand_in import calls, far_end, node_file
from mock_provider.bed import Bed, served
from mock_provider.world import Failure
from support import ROOT

from skyinfra.deploy.orphans import ending_modules
from skyinfra.providers import read

HOST_KEY = re.compile(r'"ed25519_public":"([^"]+)"')


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    """Where the disks of the machines are."""
    return tmp_path / "far-end"


@pytest.fixture
def bed(request: pytest.FixtureRequest, tmp_path: Path, machines: Path) -> Iterator[Bed]:
    """A root with a module, DigitalOcean's unless another case is asked for."""
    case: ModuleCase = getattr(request, "param", DIGITALOCEAN)
    with served(tmp_path, *case.mock) as made:
        # npm, which may have started Terraform, sets NODE for all below it.
        made.environment |= far_end(machines, made.environment["PATH"]) | {"NODE": "/usr/bin/node"}
        case.answers(made.world)
        declare(made, case)
        made.run("init", "-no-color")
        yield made


def clouds(*cases: ModuleCase) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bed", cases, ids=lambda case: case.name, indirect=True)


def declare(bed: Bed, case: ModuleCase = DIGITALOCEAN, **inputs: Any) -> None:
    module = {"source": case.source, "name": "train", "node_count": 2, **case.inputs, **inputs}
    fleet = {"fleet": {"value": "${module.train.fleet}", "sensitive": True}}
    root = {"provider": case.providers, "module": {"train": module}, "output": fleet}
    bed.write(json.dumps({key: value for key, value in root.items() if value}), "main.tf.json")


def addresses(bed: Bed) -> dict[str, str]:
    return {node["name"]: node["public_address"] for node in bed.output("fleet")["nodes"]}


def done(machines: Path) -> dict[str, list[str]]:
    """What was done on each machine since the last time: `claim`, `up`, `configure`."""
    found: dict[str, list[str]] = {}
    for call in calls(machines):
        if named := re.match(r"exec sh -s (claim|up|configure|down)", call["command"]):
            found.setdefault(call["host"], []).append(named[1])
    (machines / "calls").unlink()
    return found


def test_a_machine_is_known_by_its_key_from_the_first_contact_on(bed: Bed, machines: Path) -> None:
    bed.apply()
    asked = {each["name"]: each["user_data"] for each in bed.world.asked("digitalocean_droplet")}
    keys = {node: HOST_KEY.search(text)[1] for node, text in asked.items()}  # type: ignore[index]
    assert len(set(keys.values())) == 2
    for node, address in addresses(bed).items():
        assert {call["user"] for call in calls(machines) if call["host"] == address} == {"root"}
        (machines / f"{address}.key").write_text(keys[node])
    # The keys that the machines were made with are those that are looked for.
    done(machines)
    declare(bed, **DIGITALOCEAN.layout)
    bed.apply()
    assert set(done(machines)) == set(addresses(bed).values())
    # Another key: somebody in the middle, who gets nothing.
    (machines / f"{addresses(bed)['train-0']}.key").write_text("ssh-ed25519 AAAAstranger")
    declare(bed)
    said = bed.apply(code=1)
    assert "does not answer with the host key that this fleet knows" in said


@pytest.mark.slow
def test_a_machine_may_take_its_time_to_answer(bed: Bed, machines: Path) -> None:
    off = "ssh: connect to host port 22: Connection refused\nHost key verification failed.\n"
    for number in (1, 2):
        (machines / f"203.0.113.{number}.off").write_text(off)
    bed.apply()
    assert node_file(machines, addresses(bed)["train-0"])["node"] == "train-0"


@pytest.mark.slow
def test_what_only_sets_up_anew_replaces_no_machine(bed: Bed, machines: Path) -> None:
    bed.apply()
    before = {node["name"]: node["id"] for node in bed.output("fleet")["nodes"]}
    head, worker = addresses(bed)["train-0"], addresses(bed)["train-1"]
    assert done(machines) == {head: ["claim", "up", "configure"], worker: ["claim", "up", "configure"]}
    declare(bed, user_data_revision="2")
    assert not [each for each in bed.changes() if "droplet" in each]
    bed.apply()
    assert done(machines) == {head: ["claim", "up", "configure"], worker: ["claim", "up", "configure"]}
    bed.apply("-replace=module.train.terraform_data.secret")
    assert done(machines) == {head: ["claim", "up", "configure"], worker: ["claim", "up", "configure"]}
    secret = bed.output("fleet")["secret"]
    assert {(machines / each / "opt/skyinfra/delivered/secret").read_text() for each in (head, worker)} == {secret}
    # A new login key, and new labels, are no reason to make a machine anew.
    declare(
        bed,
        user_data_revision="2",
        labels={"team": "ops"},
        ssh_public_key=f"{DIGITALOCEAN.inputs['ssh_public_key']} me",
    )
    assert not [each for each, action in bed.changes().items() if "droplet" in each and action != "update"]
    assert {node["name"]: node["id"] for node in bed.output("fleet")["nodes"]} == before


@pytest.mark.slow
def test_a_machine_that_its_cloud_has_lost_is_made_anew_and_the_others_hear_of_it(bed: Bed, machines: Path) -> None:
    bed.apply()
    old = addresses(bed)
    done(machines)
    # A worker: nobody else is touched.
    _lose(bed, "train-1")
    bed.apply()
    new = addresses(bed)
    assert new["train-0"] == old["train-0"] and new["train-1"] != old["train-1"]
    assert done(machines) == {new["train-1"]: ["claim", "up", "configure"]}
    # The head: the workers get its address.
    _lose(bed, "train-0")
    bed.apply()
    head = addresses(bed)["train-0"]
    assert done(machines) == {each: ["claim", "up", "configure"] for each in (head, new["train-1"])}
    [address] = [node["address"] for node in bed.output("fleet")["nodes"] if node["head"]]
    assert node_file(machines, new["train-1"])["head"] == f"{address}:8786"
    # One that is made anew gets the versions of who applies, and the workers have those of their head.
    _lose(bed, "train-0")
    declare(bed, versions={"python": "3.13", "requirements": []})
    bed.apply()
    delivered = [machines / each / "opt/skyinfra/delivered/versions.json" for each in addresses(bed).values()]
    assert [json.loads(each.read_text())["python"] for each in delivered] == ["3.13", "3.13"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"allow_cidrs": []}, "allow_cidrs: the nodes are set up over SSH"),
        ({"allow_cidrs": ["203.0.113.7/24"]}, "allow_cidrs: the first address of a network"),
        ({"ssh_public_key": ""}, "ssh_public_key: one line such as"),
        ({"gpu_partition_mode": "CPX"}, "PARTITION_MODE_DPX_NPS2"),
        ({"user_data_worker": ""}, "user_data_worker: needed"),
        ({"versions": None, "user_data_head": "@SKYINFRA_BUCKET@/versions.json"}, "versions: the user data ask"),
        ({"user_data_head": "x" * 132_000}, "user_data_head: 132000 bytes, and the environment of a program takes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_bought(bed: Bed, inputs: dict[str, Any], words: str) -> None:
    declare(bed, **inputs)
    assert words in bed.run("plan", "-no-color", code=1)


def test_a_machine_that_is_gone_hinders_no_destroy(bed: Bed, machines: Path) -> None:
    bed.apply()
    for address in addresses(bed).values():
        (machines / f"{address}.off").write_text("ssh: connect: No route to host\n" * 100)
    done(machines)
    bed.destroy()
    assert bed.world.existing() == {} and not (machines / "calls").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bed", "case"), [pytest.param(each, each, id=each.name) for each in CASES if each.over_ssh], indirect=["bed"]
)
def test_what_makes_a_machine_anew_and_what_does_not(bed: Bed, case: ModuleCase) -> None:
    bed.apply()

    def machines() -> set[str]:
        [kind] = read(case.name).terraform["machines"]
        return {action for address, action in bed.changes().items() if address.startswith(f"module.train.{kind}.node[")}

    for inputs in CLOUDS[case.name]["replacing"]:
        declare(bed, case, **inputs)
        assert machines() == {"replace"}, inputs
    for kept in (
        {"labels": {"team": "ops"}},
        {"ssh_public_key": f"{case.inputs['ssh_public_key']}9 me"},
        {"key_file": "mine"},
        {"wait_seconds": 60},
        {"user_data_revision": "2"},
        {"scheduler_port": 8786},
    ):
        declare(bed, case, **kept)
        assert machines() <= {"update"}, kept
    bed.apply()


@pytest.mark.slow
@clouds(AZURE)
def test_infiniband_connects_the_nodes_of_an_availability_set(bed: Bed) -> None:
    given = {"machine_types": ["Standard_ND96isr_H100_v5"], "infiniband": True}
    declare(bed, AZURE, **given)
    bed.apply()
    [placed] = bed.world.existing("azurerm_availability_set").values()
    machines = bed.world.existing("azurerm_linux_virtual_machine").values()
    assert [each["availability_set_id"] for each in machines] == [placed["id"]] * 2 and bed.changes() == {}
    for wrong in ({"machine_types": ["Standard_NC40ads_H100_v5"]}, {"spot": True}, {"zone": "1"}):
        declare(bed, AZURE, **{**given, **wrong})
        assert "infiniband: for sizes with an r behind" in bed.run("plan", "-no-color", code=1)


@pytest.mark.slow
@clouds(AZURE)
def test_a_machine_that_azure_makes_with_trusted_launch_by_itself_is_not_made_anew(bed: Bed) -> None:
    # The provider sends no security profile where both are false (azurerm 5.2.0 linux_virtual_machine_resource.go:712),
    # Azure then decides, and what it decided is read (:1103), where a difference makes a machine anew.
    # https://learn.microsoft.com/en-us/azure/virtual-machines/trusted-launch: "selected as the default state"
    bed.apply()
    for file, each in bed.world.existing("azurerm_linux_virtual_machine").items():
        made = {**each, "secure_boot_enabled": True, "vtpm_enabled": True}
        (bed.world.folder / file).write_text(json.dumps(made))
    assert bed.changes() == {}


@pytest.mark.slow
@clouds(AZURE)
def test_a_machine_that_was_left_outside_of_the_state_stops_the_apply_and_no_other_machine(bed: Bed) -> None:
    kind, which = "azurerm_linux_virtual_machine", {"computer_name": "train-1"}
    said = ("AllocationFailed: Allocation failed.", "already exists - to be managed via Terraform this resource needs")
    bed.world.fail(Failure("create", kind, said[0], which, leaves="outside", times=1))
    assert said[0] in bed.apply(code=1)
    assert len(bed.world.existing(kind)) == 2
    [head] = [
        each["virtual_machine_id"] for each in bed.world.existing(kind).values() if each["computer_name"] == "train-0"
    ]
    bed.world.fail(Failure("create", kind, said[1], which, times=1))
    assert said[1] in bed.apply(code=1)
    # It is deleted by hand.
    [left] = [file for file, each in bed.world.existing(kind).items() if each["computer_name"] == "train-1"]
    (bed.world.folder / left).unlink()
    bed.apply()
    assert bed.output("fleet")["nodes"][0]["id"] == head
    assert len(bed.world.existing(kind)) == 2 and bed.changes() == {}


@clouds(AZURE)
def test_an_address_that_is_made_anew_goes_after_its_interface(bed: Bed) -> None:
    """Azure deletes no address that an interface has; one that stays has its interface changed in place."""
    bed.apply()

    def changed(**inputs: Any) -> dict[str, set[str]]:
        declare(bed, AZURE, **inputs)
        found = bed.changes()
        kinds = ("azurerm_public_ip", "azurerm_network_interface", "azurerm_linux_virtual_machine")
        return {kind: {found.get(f'module.train.{kind}.node["train-{n}"]', "") for n in range(2)} for kind in kinds}

    assert set(map(frozenset, changed(zone="2").values())) == {frozenset({"replace"})}
    assert set(map(frozenset, changed(labels={"team": "b"}).values())) == {frozenset({"update"})}


@clouds(LAMBDA)
def test_where_no_key_can_be_given_that_of_the_first_contact_is_kept(bed: Bed, machines: Path) -> None:
    (machines / "10.0.0.1.key").write_text("ssh-ed25519 AAAAfirst")
    (machines / "10.0.0.2.key").write_text("ssh-ed25519 AAAAsecond")
    bed.apply()
    kept = dict(line.split(" ", 1) for line in (bed.folder / "known_hosts").read_text().splitlines())
    ids = {node["id"] for node in bed.output("fleet")["nodes"]}
    assert set(kept) == {f"skyinfra-lambda-{each}" for each in ids}
    assert set(kept.values()) == {"ssh-ed25519 AAAAfirst", "ssh-ed25519 AAAAsecond"}
    (machines / "10.0.0.1.key").write_text("ssh-ed25519 AAAAstranger")
    declare(bed, LAMBDA, **LAMBDA.layout)
    assert "does not answer with the host key that this fleet knows" in bed.apply(code=1)


@clouds(LAMBDA)
def test_another_key_is_that_of_machines_that_are_made_later(bed: Bed) -> None:
    bed.apply()
    before = {node["name"]: node["id"] for node in bed.output("fleet")["nodes"]}
    other = f"{LAMBDA.inputs['ssh_public_key']}9"
    declare(bed, LAMBDA, ssh_public_key=other, node_count=3)
    bed.apply()
    assert [each["public_key"] for each in bed.world.existing("lambdalabs_ssh_key").values()] == [other]
    after = {node["name"]: node["id"] for node in bed.output("fleet")["nodes"]}
    assert len(after) == 3 and before.items() <= after.items()
    assert bed.changes() == {}


@clouds(LAMBDA)
def test_a_firewall_that_lets_nobody_reach_the_scheduler_is_said(bed: Bed) -> None:
    declare(bed, LAMBDA, scheduler_port=9000)
    assert "the firewall of the account lets nobody reach TCP port 9000" in bed.run("plan", "-no-color", code=1)


@clouds(VERDA)
def test_a_machine_that_has_no_address_yet_is_waited_for_and_can_be_destroyed(bed: Bed) -> None:
    bed.world.answer("verda_instance", {"ip": None})
    assert "train-0 has no address yet" in bed.apply(code=1)
    for file, each in bed.world.existing("verda_instance").items():
        (bed.world.folder / file).write_text(json.dumps({**each, "ip": f"192.0.2.{each['id'].rpartition('-')[2]}"}))
    bed.apply()
    assert bed.changes() == {}
    for file, each in bed.world.existing("verda_instance").items():
        (bed.world.folder / file).write_text(json.dumps({**each, "ip": None}))
    bed.destroy()
    assert bed.world.existing() == {}


@clouds(NEBIUS)
def test_a_machine_that_was_taken_back_is_named_with_what_makes_another_one(bed: Bed) -> None:
    """Nebius stops it, and takes its address."""
    bed.apply()
    node = 'nebius_compute_v1_instance.node["train-1"]'
    kind = node.partition(".")[0]
    [file] = [file for file, each in bed.world.existing(kind).items() if each["hostname"] == "train-1"]
    made = bed.world.existing(kind)[file]
    for none in ([{**made["status"]["network_interfaces"][0], "public_ip_address": None}], []):
        made["status"] |= {"state": "STOPPED", "network_interfaces": none}
        (bed.world.folder / file).write_text(json.dumps(made))
        said = bed.run("plan", "-no-color", code=1)
        assert f"train-1 has stopped. Start it, or have another one made: -replace='module.NAME.{node}'" in said
        assert "Invalid" not in said
    assert bed.changes(f"-replace=module.train.{node}")[f"module.train.{node}"] == "replace"
    # One that runs again has an address after a moment.
    made["status"]["state"] = "STARTING"
    (bed.world.folder / file).write_text(json.dumps(made))
    assert "train-1 has no address yet" in bed.run("plan", "-no-color", code=1)
    bed.destroy()
    assert bed.world.existing() == {}


@clouds(VERDA)
def test_a_startup_script_gives_the_key_and_the_disk_goes_with_the_machine(bed: Bed, machines: Path) -> None:
    bed.apply()
    scripts = [each["script"] for each in bed.world.asked("verda_startup_script")]
    # As the shell reads it: the key ends where its mark stands alone, and OpenSSH reads no line of it that is indented.
    key = r"-----BEGIN OPENSSH PRIVATE KEY-----\nprivate half \d\n-----END OPENSSH PRIVATE KEY-----"
    assert all(re.search(rf"<<'KEY'\n{key}\nKEY\nrm -f", each) for each in scripts), scripts
    [disk, _] = [each["os_volume"] for each in bed.world.asked("verda_instance")]
    assert disk["on_destroy"] == disk["on_spot_discontinue"] == "delete_permanently" and disk["size"] == 100


@pytest.mark.slow
@clouds(SSH)
def test_a_host_whose_node_gets_another_name_is_given_back_before_it_is_set_up_again(bed: Bed, machines: Path) -> None:
    key = SSH.inputs["hosts"][0]["host_key"]
    head, *workers = [{"address": f"192.0.2.{number}", "host_key": key} for number in range(4)]
    declare(bed, SSH, hosts=[head, *workers], node_count=4)
    bed.apply()
    done(machines)
    named = [{**each, "name": f"gpu{number}"} for number, each in enumerate(workers)]
    declare(bed, SSH, hosts=[head, *named], node_count=4)
    # Terraform sees to it: what is made waits for what is destroyed of that which it depends on.
    bed.apply()
    asked = [re.match(r"exec sh -s (claim|down)", call["command"]) for call in calls(machines)]
    assert [each[1] for each in asked if each] == ["down"] * 3 + ["claim"] * 3
    assert set(done(machines)) == {each["address"] for each in workers}
    for number, each in enumerate(workers):
        assert node_file(machines, each["address"])["node"] == f"train-gpu{number}"
    assert bed.changes() == {}


def test_a_machine_from_an_image_of_another_node_becomes_its_own(bed: Bed, machines: Path) -> None:
    declare(bed, node_count=1)
    bed.apply()
    head = addresses(bed)["train-0"]
    assert head == "203.0.113.1"
    shutil.copytree(machines / head, machines / "203.0.113.2", symlinks=True)
    declare(bed)
    bed.apply()
    assert node_file(machines, addresses(bed)["train-1"])["node"] == "train-1"
    assert (machines / "203.0.113.2/etc/skyinfra/node").read_text() == "train-1\n"


@clouds(SSH)
def test_a_machine_that_is_declared_by_two_names_stays_the_node_that_it_is(bed: Bed, machines: Path) -> None:
    hosts = SSH.inputs["hosts"]
    head, worker = (machines / each["address"] for each in hosts)
    head.mkdir()
    worker.symlink_to(head)
    assert "it is the node train-192-0-2-1 of this fleet already: the declaration has this machine twice" in bed.apply(
        code=1
    )
    assert node_file(machines, head.name)["node"] == "train-192-0-2-1"
    # The second name is taken away: the node stays.
    declare(bed, SSH, hosts=hosts[:1], node_count=1)
    bed.apply()
    assert node_file(machines, head.name)["node"] == (head / "etc/skyinfra/node").read_text().strip()
    # Hosts of an earlier version have no such file.
    (head / "etc/skyinfra/node").unlink()
    bed.apply("-replace=module.train.terraform_data.secret")
    assert (head / "etc/skyinfra/node").read_text() == "train-192-0-2-1\n"
    bed.destroy()
    assert not (head / "etc/skyinfra").exists()


@clouds(SSH)
def test_a_host_with_a_systemd_that_is_too_old_is_refused_at_once(bed: Bed, machines: Path) -> None:
    """Ubuntu 20.04 has 245: its services never start, and the apply would wait for them."""
    bed.environment["SYSTEMD"] = "245"
    assert "its systemd is 245, and a node needs 247 or later" in bed.apply(code=1)
    assert set().union(*done(machines).values()) == {"claim"}
    bed.environment["SYSTEMD"] = "247"
    bed.apply()


@pytest.mark.slow
@clouds(SSH)
def test_hosts_of_a_pool_that_is_not_declared_any_more_are_given_back(bed: Bed, machines: Path) -> None:
    bed.apply()
    done(machines)
    [module] = ending_modules(bed.folder, {"train": "ssh"}).values()
    bed.write(json.dumps({"module": {"train": {**module, "count": 0}}}), "main.tf.json")
    bed.run("init", "-no-color")
    bed.apply()
    assert done(machines) == {each["address"]: ["down"] for each in SSH.inputs["hosts"]}


def _lose(bed: Bed, name: str) -> None:
    [file] = [file for file, each in bed.world.existing("digitalocean_droplet").items() if each["name"] == name]
    (bed.world.folder / file).unlink()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("sudo: a password is required", "10.0.0.1: the user has no sudo without a password"),
        ("there is /opt/skyinfra already", "skyinfra: 10.0.0.1: there is /opt/skyinfra already \n"),
    ],
)
def test_what_sudo_only_warns_of_is_no_reason(line: str, words: str, tmp_path: Path) -> None:
    """A machine whose own name is in no file of names: https://github.com/ansible/ansible/issues/20858."""
    ssh = tmp_path / "ssh"
    warning = "sudo: unable to resolve host gpu1: Name or service not known"
    ssh.write_text(f"#!/bin/sh\nprintf '%s\\n' '{warning}' '{line}' >&2\nexit 1\n")
    ssh.chmod(0o755)
    names = ("SSH_USER", "HOST_KEY", "KEY_FILE", "VIA")
    given = {**dict.fromkeys(names, ""), "HOST": "10.0.0.1", "SSH_PORT": "0", "FLEET": "s/p", "FLEET_ID": "1"}
    environment = {**os.environ, **given, "NODE": "p-0", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = ROOT / "modules" / "hosts" / "host.sh"
    done = subprocess.run(["sh", str(script), "claim"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and words in done.stderr


def test_nothing_of_a_module_is_said_twice() -> None:
    """The module that sets machines up stands once, and nothing in it is of one provider."""
    files = [path for path in (ROOT / "modules" / "hosts").iterdir() if path.suffix in (".tf", ".sh")]
    assert {"main.tf", "host.sh", "node.sh"} <= {path.name for path in files}
    for path in files:
        text = path.read_text().lower()
        assert not [each for each in ("digitalocean", "verda", "lambda", "azure") if each in text], path.name
    for case in (each for each in CASES if each.over_ssh):
        module = "".join(path.read_text() for path in case.folder.glob("*.tf"))
        assert re.search(r'source += "\.\./hosts"', module) and "provisioner" not in module, case.name
