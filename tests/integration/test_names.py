"""The names of what modules make: they fit the provider, and two fleets never share one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from support import ROOT
from terraform_projects.commands import environment

from skyinfra.terraform.program import find_program

# The longest, the shortest and the oddest that `core` lets through.
STACKS = ("A" * 64, "1", "0-_-0", "inference_production-westeurope", "MiXed")
POOLS = ("p" + "-" * 39, "p" * 40, "a", "h100-mig-serving-latency")
FLEETS = ("3f2504e0-4f89-11d3-9a0c-0305e82c3301", "7d444840-9dc0-11d1-b245-5ffdce74fad2")
# Two people give one account the same names; AWS, Google Cloud and containers have suffixes of their own.
OTHERS = {"aws", "container", "core", "gcp", "gcptpu", "google", "hosts", "local", "market", "ssh"}
CALL = re.compile(r"(?m)^  names += (\{ limit = .*\})$")


def calls() -> dict[str, tuple[int, int]]:
    """The length that the provider takes, and what its module appends, by module."""
    found = {}
    for file in sorted((ROOT / "modules").glob("*/main.tf")):
        if called := CALL.search(file.read_text()):
            limit, reserve = (re.search(rf"{name} = (\d+)", called[1]) for name in ("limit", "reserve"))
            assert limit
            found[file.parent.name] = int(limit[1]), int(reserve[1]) if reserve else 6
    return found


def test_every_module_has_its_names_from_one_place() -> None:
    modules = {path.name for path in (ROOT / "modules").iterdir() if path.is_dir()}
    assert modules - OTHERS == set(calls())
    for name in calls():
        text = (ROOT / "modules" / name / "main.tf").read_text()
        # Tags may be those of two fleets, and machines that exist have them; a mount tag is of one machine.
        assert "skyinfra-${" not in re.sub(r"(?m)^ +(tags|mount_tag) += .*", "", text), name
        # Where the length stands.
        assert re.search(r"(?m)^  # .{20,}\n  names += ", text), name
        for block in re.findall(r'(?ms)^resource "\w+" "\w+" \{\n.*?^\}', text):
            named = r"(?m)^  (name|display_name|label|description) += (.*module\.\w+\.names\.|each\.value$)"
            if re.search(named, block):
                assert "ignore_changes" in block, f"{name}: a resource that exists keeps its name: {block[:80]}"


@pytest.mark.parametrize("module", sorted(calls()))
def test_what_a_module_appends_is_reserved(module: str) -> None:
    text = (ROOT / "modules" / module / "main.tf").read_text()
    appended = re.findall(r'"\$\{module\.\w+\.names\.own\}(-[^"]*)"', text)
    for each in appended:
        # Regions and numbers, as long as they get.
        longest = re.sub(r"\$\{substr\(sha1\([^)]*\), 0, 8\)\}", "x" * 8, each)
        longest = re.sub(r"\$\{var\.region\}", "nyc99", re.sub(r"\$\{each\.key\}", "99", longest))
        assert len(longest) <= calls()[module][1], each


def test_the_longest_and_the_oddest_names_fit_and_differ(tmp_path: Path) -> None:
    wanted = {
        f"n{index}": {"stack": stack, "name": pool, "fleet": fleet, "limit": limit, "reserve": reserve}
        for index, (stack, pool, fleet, (limit, reserve)) in enumerate(
            (stack, pool, fleet, each)
            for stack in STACKS
            for pool in POOLS
            for fleet in FLEETS
            for each in sorted(set(calls().values()))
        )
    }
    pool = {
        "stack": "${each.value.stack}",
        "name": "${each.value.name}",
        "node_count": 2,
        "user_data_head": "-",
        "user_data_worker": "-",
        "runner_file": "",
        "versions": None,
        "scheduler_port": 8786,
        "slots": [],
    }
    core = {
        "source": str(ROOT / "modules" / "core"),
        "for_each": "${local.wanted}",
        "pool": pool,
        "secret": {"id": "${each.value.fleet}", "triggers_replace": "-"},
        "places": {"head": "-", "bucket": "-", "runner": "-"},
        "names": {"limit": "${each.value.limit}", "reserve": "${each.value.reserve}"},
    }
    (tmp_path / "main.tf.json").write_text(
        json.dumps(
            {
                "module": {"n": core},
                "locals": {"wanted": wanted},
                "output": {"made": {"value": "${{ for key, each in module.n : key => each.names }}"}},
            }
        )
    )
    for arguments in (["init"], ["apply", "-auto-approve"]):
        subprocess.run([*find_program(), *arguments], cwd=tmp_path, env=environment(), capture_output=True, check=True)
    said = subprocess.run(
        [*find_program(), "output", "-json", "made"], cwd=tmp_path, env=environment(), capture_output=True, check=True
    )
    made = json.loads(said.stdout)
    for key, each in wanted.items():
        limit, reserve = int(str(each["limit"])), int(str(each["reserve"]))
        own, nodes = made[key]["own"], made[key]["nodes"]
        assert re.fullmatch(r"[a-z](-?[a-z0-9])*", own) and len(own) + reserve <= limit, own
        assert set(nodes.values()) == {f"{own}-0", f"{own}-1"} and set(nodes) == {f"{each['name']}-{n}" for n in (0, 1)}
        # A node of five digits fits too.
        assert len(f"{own}-9999") <= limit
        assert own.endswith(str(each["fleet"])[:8])
