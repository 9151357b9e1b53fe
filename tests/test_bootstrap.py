"""User data: cloud-config that carries every value unchanged, fits, and is the same where only the layout differs."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import skyinfra as sky
from skyinfra.bootstrap import LIMIT, quoted, sizes, user_data
from skyinfra.compiler import Deployment, compile_pool
from skyinfra.protocol.nodeconfig import NodeConfig

# All that a file on a node may hold.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def aws(accelerator: Any = "H100:8/3g.40gb+2g.20gb+1g.10gb*2", **fields: Any) -> Deployment:
    pool = sky.ComputePool(**{"name": "p", "provider": sky.AWS(), "accelerator": accelerator, **fields})
    return compile_pool(pool, "s")


def files(text: str) -> dict[str, str]:
    """The files of a cloud-config by path."""
    assert text.startswith("#cloud-config\n")
    document = yaml.safe_load(text)
    assert set(document) == {"write_files", "runcmd"}
    return {file["path"]: file["content"] for file in document["write_files"]}


@given(TEXT)
def test_any_text_survives_the_quoting(text: str) -> None:
    line = quoted(text)
    assert "\n" not in line
    assert yaml.safe_load(f"a: {line}") == {"a": text}


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), TEXT, max_size=3))
def test_user_data_carries_every_value_unchanged(env: dict[str, str]) -> None:
    made = aws(image=sky.Image(env=env, run=[*env.values()]))
    for text, config in ((user_data(made).head, made.head), (user_data(made).worker, made.worker)):
        found = files(text)["/var/lib/skyinfra/node.json"]
        found = found.replace("@SKYINFRA_HEAD@", "10.0.0.1:8786")
        assert NodeConfig.read(json.loads(found)) == replace(
            config, scheduler=config.scheduler.replace("@SKYINFRA_HEAD@", "10.0.0.1:8786")
        )
        assert config.env == env


def test_user_data_fits() -> None:
    made = aws(nodes=2, image=sky.Image(pip=["torch", "transformers"], apt=["git"], env={"HF_HOME": "/data"}))
    data = user_data(made)
    assert max(len(gzip.compress(text.encode(), 9)) for text in (data.head, data.worker)) < 14_000
    assert sizes(data.head)["total"] < 14_000


def test_user_data_that_do_not_fit_are_refused_without_showing_them() -> None:
    noise = "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(500))
    with pytest.raises(sky.NotSupported, match=rf"compressed, of {LIMIT} that are taken") as caught:
        user_data(aws(image=sky.Image(env={"BLOB": noise})))
    assert "/var/lib/skyinfra/node.json" in (caught.value.hint or "")
    assert noise[:20] not in str(caught.value)


def test_the_revision_is_of_all_but_the_layout() -> None:
    one = user_data(aws("H100:8/3g.40gb"))
    other = user_data(aws("H100:8/1g.10gb"))
    assert one.revision == other.revision
    assert one.head != other.head
    assert user_data(aws("H100:8/3g.40gb", image=sky.Image(pip=["torch"]))).revision != one.revision


def test_the_secret_is_a_placeholder_in_a_file_of_its_own() -> None:
    data = user_data(aws(nodes=2))
    for text in (data.head, data.worker):
        assert files(text)["/var/lib/skyinfra/secret"] == "@SKYINFRA_SECRET@\n"
        assert text.count("@SKYINFRA_SECRET@") == 1
        secret = next(f for f in yaml.safe_load(text)["write_files"] if f["path"].endswith("/secret"))
        assert secret["permissions"] == "0600"


def test_a_head_of_an_auto_scaling_group_has_no_slots() -> None:
    made = aws("L4", spot=True, nodes=3, image=sky.Image(pip=["torch"], env={"A": "b"}))
    assert made.head.scheduler_only
    assert not made.worker.scheduler_only
    assert (made.head.pip, made.worker.pip) == ((), ("torch",))
    data = user_data(made)
    assert '"node":"p-asg"' in files(data.worker)["/opt/skyinfra/setup"]
    assert "p-asg" not in files(data.head)["/opt/skyinfra/setup"]
    assert "/etc/systemd/system/skyinfra-watch.service" in files(data.head)
    assert "/etc/systemd/system/skyinfra-watch.service" not in files(data.worker)


@pytest.mark.parametrize("accelerator", ["H100:8/3g.40gb", "L4", None])
def test_the_script_is_one(accelerator: str | None, tmp_path: Path) -> None:
    made = aws(accelerator, spot=accelerator == "L4", nodes=2, image=sky.Image(apt=["git", "g++"]))
    script = tmp_path / "setup"
    script.write_text(files(user_data(made).worker)["/opt/skyinfra/setup"])
    subprocess.run(["sh", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def test_where_the_runner_comes_from() -> None:
    default = files(user_data(aws()).head)["/opt/skyinfra/setup"]
    assert f"skyinfra=={sky.__version__} cloudpickle==" in default
    own = aws(image=sky.Image(runner="skyinfra @ https://example.com/a b.whl", python="3.12"))
    script = files(user_data(own).head)["/opt/skyinfra/setup"]
    assert "'skyinfra @ https://example.com/a b.whl'" in script
    assert "--python 3.12 /opt/skyinfra/venv" in script
