"""User data: cloud-config that carries every value unchanged, fits, and is the same where only the layout differs."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from first_boots.user_data import aws, files, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ROOT

import skyinfra as sky
from skyinfra.bootstrap import (
    FORMS,
    Form,
    carries_runner,
    converted,
    quoted,
    runner_wheel,
    sizes,
    user_data,
)
from skyinfra.compiler import compile_pool
from skyinfra.engine.credentials import Credentials
from skyinfra.protocol.nodeconfig import NodeConfig
from skyinfra.providers import read

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# All that a file on a node may hold.
CERTIFICATE = Credentials.derive("0123456789abcdef" * 2, role="client", name="x").ca

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def _is_no_placeholder(text: str) -> bool:
    """Those are refused; Hypothesis finds them in the code."""
    return "@SKYINFRA_" not in text


@given(TEXT)
def test_any_text_survives_the_quoting(text: str) -> None:
    line = quoted(text)
    assert "\n" not in line
    assert yaml.safe_load(f"a: {line}") == {"a": text}


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), TEXT.filter(_is_no_placeholder), max_size=3))
def test_user_data_carries_every_value_unchanged(env: dict[str, str]) -> None:
    made = aws(image=sky.Image(env=env, run=[*env.values()]))
    for text, config in ((user_data(made).head, made.head), (user_data(made).worker, made.worker)):
        found = files(text)["/etc/skyinfra/node.json"]
        found = found.replace("@SKYINFRA_HEAD@", "10.0.0.1:8786")
        scheduler = config.scheduler.replace("@SKYINFRA_HEAD@", "10.0.0.1:8786")
        assert NodeConfig.read(json.loads(found)) == replace(config, scheduler=scheduler, folder="/var/lib/skyinfra")
        assert config.env == env


def test_a_runner_with_its_hash_is_fetched_and_held_to_it_before_it_is_installed() -> None:
    address, digest = "https://packages.example.com/skyinfra-0.1.0%2Babc-py3-none-any.whl", "a" * 64
    wheel = "/opt/skyinfra/skyinfra-0.1.0+abc-py3-none-any.whl"
    made = aws(image=sky.Image(runner=f"{address}#sha256={digest}"))
    steps = {
        step["name"]: step for step in json.loads(files(user_data(made).head)["/opt/skyinfra/steps.json"])["steps"]
    }
    assert list(steps).index("runner's wheel") < list(steps).index("runner")
    assert steps["runner's wheel"]["arguments"] == {"url": address, "path": wheel, "sha256": digest}
    assert steps["runner"]["arguments"]["requirements"] == [wheel]
    plain = aws(image=sky.Image(runner=address))
    assert "runner's wheel" not in user_data(plain).head and address in user_data(plain).head


def test_user_data_fits() -> None:
    made = aws(nodes=2, image=sky.Image(pip=["torch", "transformers"], apt=["git"], env={"HF_HOME": "/data"}))
    data = user_data(made)
    assert max(len(gzip.compress(text.encode(), 9)) for text in (data.head, data.worker)) < 14_200
    assert sizes(data.head)["total"] < 14_200
    assert sizes(user_data(aws()).head)["total"] < 14_100


def test_the_runner_and_the_user_data_fit_into_the_metadata_of_google_cloud() -> None:
    taken = re.search(r"user_data_worker\)\) <= (\d+)", (ROOT / "modules/google/main.tf").read_text())
    assert taken
    _, carried = runner_wheel.packed(runner_wheel.wheel())
    pool = sky.ComputePool(name="p", nodes=2, accelerator="A100-40GB", provider=sky.GCP(project="p"))
    data = user_data(compile_pool(pool, "s"))
    assert 4 * len(carried) / 3 + max(len(data.head), len(data.worker)) + 2_000 < int(taken[1])


def test_user_data_that_do_not_fit_are_refused_without_showing_them() -> None:
    noise = "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(500))
    with pytest.raises(sky.NotSupported, match=rf"compressed, of {read('aws').boot.limit} that are taken") as caught:
        user_data(aws(image=sky.Image(env={"BLOB": noise})))
    assert "/etc/skyinfra/node.json" in (caught.value.hint or "")
    assert noise[:20] not in str(caught.value)


def test_user_data_that_reach_a_machine_over_ssh_fit_into_one_variable() -> None:
    image = sky.Image(env={"BLOB": "x" * 120_000})
    made = compile_pool(
        sky.ComputePool(name="p", provider=sky.SSH(hosts=["gpu1"]), accelerator="H100", image=image), "s"
    )
    with pytest.raises(sky.NotSupported, match=r"are \d+ bytes, of 120000 that are taken"):
        user_data(made)


def test_the_secret_and_the_versions_are_fetched_by_root_before_anything_needs_them() -> None:
    data = user_data(aws(nodes=2, image=sky.Image(ca_certificate=CERTIFICATE)))
    for text in (data.head, data.worker):
        assert "/etc/skyinfra/secret" not in files(text) and "@SKYINFRA_SECRET@" not in text
        clock, trusted, secret, versions, *_ = steps(text).items()
        assert clock[0] == "clock"
        assert trusted[0] == "CA certificate"
        assert [(name, step["operation"], step["arguments"]) for name, step in (secret, versions)] == [
            ("secret", "file", {"url": "@SKYINFRA_BUCKET@/secret", "path": "/etc/skyinfra/secret"}),
            ("versions", "file", {"url": "@SKYINFRA_BUCKET@/versions.json", "path": "/opt/skyinfra/versions.json"}),
        ]


@pytest.mark.parametrize("form", FORMS)
def test_root_writes_no_file_by_name_into_the_folder_of_tasks(form: Form, tmp_path: Path) -> None:
    """A task may have put a link there, in place of a file or of what becomes one."""
    text = user_data(aws(nodes=2)).worker
    if form == "cloud-config":
        assert not [path for path in files(text) if path.startswith("/var/lib/")]
        return
    folder, victim = tmp_path / "var/lib/skyinfra", tmp_path / "victim"
    folder.mkdir(parents=True)
    victim.write_text("root's")
    for name in ("node.json", "node.json.new"):
        (folder / name).symlink_to(victim)
    script = converted(text, form)
    for top in ("etc", "opt", "run", "var"):
        script = script.replace(f"/{top}/", f"{tmp_path}/{top}/")
    # As far as the files go.
    script = script.partition("\nsystemctl daemon-reload")[0].partition("\ncommand -v")[0]
    subprocess.run(["sh", "-c", script], check=True)
    assert victim.read_text() == "root's"
    assert sorted(path.name for path in folder.iterdir()) == ["node.json", "node.json.new"]
    assert json.loads((tmp_path / "etc/skyinfra/node.json").read_text())["folder"] == str(folder)
    # A step of root's fetches it.
    assert not (tmp_path / "etc/skyinfra/secret").exists()


def test_all_is_written_anew_at_each_boot_until_it_is_on_the_disk(tmp_path: Path) -> None:
    document = yaml.load(user_data(aws()).head, LOADER)
    instance = "/var/lib/cloud/instance"
    marks = [tmp_path / "sem" / f"config_{name}" for name in ("write_files", "runcmd", "scripts_user", "ssh")]
    marks[0].parent.mkdir()

    def left_after_boot() -> list[bool]:
        """Which of cloud-init's own marks it finds, when it looks what is to be done at this boot."""
        for mark in marks:
            mark.touch()
        for command in document["bootcmd"]:
            subprocess.run([part.replace(instance, str(tmp_path)) for part in command], check=True)
        return [mark.exists() for mark in marks]

    assert left_after_boot() == [False, False, False, True], "cut off before the last command"
    assert document["runcmd"][0][:2] == ["systemctl", "enable"]
    subprocess.run([part.replace(instance, str(tmp_path)) for part in document["runcmd"][-1]], check=True)
    assert left_after_boot() == [True] * 4


def test_an_image_of_a_node_brings_nothing_of_that_nodes_fleet(tmp_path: Path) -> None:
    """EC2 makes images of machines; what the first boot finds it does not fetch again."""
    document = yaml.load(user_data(aws()).head, LOADER)
    others = ["etc/skyinfra/secret", "opt/skyinfra/versions.json"]
    others += [f"var/lib/skyinfra/{name}.json" for name in ("idle", "drain", "status", "desired-layout")]
    # The volume with the jobs of the head.
    kept = ["var/lib/skyinfra-head/jobs/1", "var/lib/skyinfra/jobs/1", "var/lib/skyinfra/kept/1"]
    # What is installed needs not be again.
    kept.append("var/lib/skyinfra/prepared.json")
    instance = tmp_path / "var/lib/cloud/instance"
    instance.mkdir(parents=True)

    def run(command: list[str]) -> None:
        subprocess.run([re.sub("/(?=(etc|opt|var)/)", f"{tmp_path}/", part) for part in command], check=True)

    def left_after_boot() -> list[str]:
        for command in document["bootcmd"]:
            run(command)
        return [name for name in (*others, *kept) if (tmp_path / name).exists()]

    for name in (*others, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert left_after_boot() == kept
    # The same instance that starts again: what is fetched and kept since stays.
    for name in others:
        (tmp_path / name).touch()
    run(document["runcmd"][-1])
    assert left_after_boot() == [*others, *kept]


def test_a_head_of_an_auto_scaling_group_has_no_slots() -> None:
    made = aws("L4", spot=True, nodes=3, image=sky.Image(pip=["torch"], env={"A": "b"}))
    assert made.head.scheduler_only
    assert not made.worker.scheduler_only
    assert (made.head.pip, made.worker.pip) == ((), ("torch",))
    data = user_data(made)
    assert steps(data.worker)["name of the node"]["arguments"]["stands_for"] == "p-asg"
    assert "name of the node" not in steps(data.head)
    # No GPU on that head.
    assert "driver" in steps(data.worker) and "driver" not in steps(data.head)
    started = [steps(text)["services"]["arguments"]["units"] for text in (data.head, data.worker)]
    assert ["skyinfra-watch.service" in units for units in started] == [True, False]


def test_the_steps_of_a_node() -> None:
    image = sky.Image(python="3.12", apt=["git"], ca_certificate=CERTIFICATE)
    found = steps(user_data(aws(image=image)).head)
    assert list(found) == [
        "clock",
        "CA certificate",
        "secret",
        "versions",
        "user and folders",
        "disk",
        "instance store",
        "packages of the system",
        "driver",
        "Python",
        "runner",
        "volume of the head",
        "services",
    ]
    assert "volume of the head" not in steps(user_data(aws(image=image)).worker)
    assert found["driver"]["arguments"]["minimum"] == "525.85.12"
    assert found["Python"]["arguments"]["version"] == "3.12"
    assert found["packages of the system"]["arguments"]["apt"] == ["git"]
    assert all(step["timeout_s"] > 0 and step["attempts"] >= 1 for step in found.values())


def test_every_step_can_be_read_by_the_program_that_travels(tmp_path: Path) -> None:
    made = aws("L4", spot=True, nodes=2, image=sky.Image(apt=["git"], ca_certificate=CERTIFICATE))
    data = user_data(made)
    for text in (data.head, data.worker):
        for path, content in files(text).items():
            if path.startswith("/opt/skyinfra/first_boot/"):
                (tmp_path / "first_boot").mkdir(exist_ok=True)
                (tmp_path / "first_boot" / Path(path).name).write_text(content)
        (tmp_path / "steps.json").write_text(files(text)["/opt/skyinfra/steps.json"])
        check = (
            "import json; from first_boot.operations import OPERATIONS\n"
            "for step in json.load(open('steps.json'))['steps']:\n"
            "    print(OPERATIONS[step['operation']](**step['arguments']))"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.')\n{check}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "Runner(" in done.stdout and "Units(" in done.stdout


def test_where_the_runner_comes_from() -> None:
    default = user_data(aws())
    assert carries_runner(aws())
    asked = steps(default.head)["runner"]["arguments"]
    wheel = runner_wheel.wheel()
    assert (asked["bucket"], asked["requirements"]) == ("@SKYINFRA_BUCKET@", [])
    assert wheel.name not in default.head and wheel.sha256 not in default.head
    made = aws(image=sky.Image(runner="skyinfra @ https://example.com/a b.whl"))
    own = user_data(made)
    assert not carries_runner(made)
    asked = steps(own.head)["runner"]["arguments"]
    assert asked["requirements"] == ["skyinfra @ https://example.com/a b.whl"]
    assert own.versions is not None
    pinned = {requirement.partition("==")[0] for requirement in own.versions["requirements"]}
    assert pinned >= {"cloudpickle", "cryptography", "distributed", "msgpack", "nvidia-ml-py"}
    # Where none is declared, Python is that of the fleet.
    found = [steps(user_data(aws(image=sky.Image(python=each))).head)["Python"] for each in (None, "3.12")]
    assert [step["arguments"]["version"] for step in found] == [None, "3.12"]


def test_a_package_index_reaches_first_boot_and_runner() -> None:
    image = sky.Image(
        index="https://pypi.example.com/simple",
        extra_indexes=["http://wheels.example.com:8080/simple"],
        proxy="http://proxy.example.com:3128",
        ca_certificate=CERTIFICATE,
    )
    data = user_data(aws(image=image)).head
    environment = json.loads(files(data)["/opt/skyinfra/steps.json"])["environment"]
    config = NodeConfig.read(json.loads(files(data)["/etc/skyinfra/node.json"].replace("@SKYINFRA_HEAD@", "h:1")))
    assert config.packages is not None
    assert config.packages.environment(bundle="/opt/skyinfra/ca.pem").items() <= environment.items()
    assert environment["PIP_INDEX_URL"] == environment["UV_DEFAULT_INDEX"] == "https://pypi.example.com/simple"
    assert environment["PIP_EXTRA_INDEX_URL"] == environment["UV_INDEX"] == "http://wheels.example.com:8080/simple"
    assert environment["PIP_TRUSTED_HOST"] == "wheels.example.com:8080"
    assert environment["https_proxy"] == "http://proxy.example.com:3128"
    assert "169.254.169.254" in environment["no_proxy"]
    assert environment["PIP_CERT"] == environment["SSL_CERT_FILE"] == "/opt/skyinfra/ca.pem"
    assert "PIP_NO_INDEX" not in environment
    alone = user_data(aws(image=sky.Image(wheelhouse="http://10.0.0.1/wheels/"))).head
    environment = json.loads(files(alone)["/opt/skyinfra/steps.json"])["environment"]
    assert environment["PIP_FIND_LINKS"] == environment["UV_FIND_LINKS"] == "http://10.0.0.1/wheels/"
    assert environment["PIP_NO_INDEX"] == "1"


@pytest.mark.parametrize(
    "fields",
    [
        {"index": "https://user:hunter2@pypi.example.com/simple"},
        {"extra_indexes": ["https://hunter2@pypi.example.com/simple"]},
        {"wheelhouse": "http://user:hunter2@wheels.example.com/"},
        {"proxy": "http://user:hunter2@proxy.example.com:3128"},
        {"runner": "skyinfra @ https://user:hunter2@example.com/skyinfra.whl"},
        {"pip": ["mine @ git+https://hunter2@example.com/mine.git"]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_credentials_in_addresses_are_refused_without_showing_them(fields: dict[str, Any]) -> None:
    with pytest.raises(sky.InvalidField, match="user data") as caught:
        sky.Image(**fields)
    assert "hunter2" not in str(caught.value)
    assert next(iter(fields)) in (caught.value.field or "")


@pytest.mark.parametrize(
    "fields",
    [
        {"index": "pypi.example.com"},
        {"index": "https://a b/"},
        {"proxy": "socks5://proxy:1080"},
        {"wheelhouse": "ftp://x/"},
        {"ca_certificate": "not one"},
        {"ca_certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
        {"ca_certificate": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"},
    ],
)
def test_what_is_no_address_or_certificate_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(sky.InvalidField) as caught:
        sky.Image(**fields)
    assert "AAAA" not in str(caught.value)


@settings(max_examples=25, deadline=None)
@given(
    env=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), TEXT, max_size=3),
    apt=st.lists(st.from_regex(r"/[!-?A-~]+\.deb", fullmatch=True)),
)
def test_one_source_of_files_for_all_forms(env: dict[str, str], apt: list[str]) -> None:
    data = user_data(aws(image=sky.Image(env=env, apt=apt))).head
    for form in ("script", "container"):
        text = converted(data, form)
        made = _run_as_shell(text)
        wanted = {path: body for path, body in files(data).items() if form == "script" or "/systemd/" not in path}
        assert made.keys() == wanted.keys()
        for path, body in wanted.items():
            if form == "script" or path != "/opt/skyinfra/steps.json":
                assert made[path] == body


def _run_as_shell(text: str) -> dict[str, str]:
    """What the script puts where, by a shell whose `put` only says so."""
    rest = text.partition("put() {")[2]
    body = rest.partition("\n}\n")[2]
    puts = body.rpartition("\nput ")
    last = puts[2].partition("\nsystemctl daemon-reload\n" if "\nsystemctl daemon-reload\n" in text else "\ncommand -v")
    script = 'put() { printf \'%s\\0%s\\0\' "$2" "$3"; }\n' + puts[0] + puts[1] + last[0]
    done = subprocess.run(["sh"], input=script.encode(), capture_output=True, check=True)
    parts = done.stdout.decode().split("\0")
    return dict(zip(parts[0::2], parts[1::2], strict=False))


def test_the_forms_where_there_is_no_cloud_init(tmp_path: Path) -> None:
    data = user_data(aws(image=sky.Image(run=["echo 'a b' $X"], env={"Q": 'it\'s "so": $X\nü'}))).head
    for form in ("script", "container"):
        file = tmp_path / form
        file.write_text(converted(data, form))
        subprocess.run(["sh", "-n", str(file)], check=True)
        if shutil.which("shellcheck"):
            subprocess.run(["shellcheck", str(file)], check=True)
    container = (tmp_path / "container").read_text()
    assert "/etc/systemd" not in container and "systemctl enable" not in container
    assert "exec runuser -u skyinfra --" in container
    with pytest.raises(sky.InvalidField, match="no cloud-config"):
        converted("{}", "script")
