from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from skyinfra import InvalidField, UnknownModel
from skyinfra.cli.app import app


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["recommend", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_for_a_person() -> None:
    out = run("llama-3.1-8b", "--dtype", "int4", "--provider", "verda")
    assert out.startswith("Llama 3.1 8B: 8.03e9 parameters, 32 layers of 4096, 32 heads of 128, 8 KV heads")
    assert "inference, weights in int4, 8,192 tokens x 1" in out
    assert "8.03e9 parameters x 0.5195 bytes (int4), 1.05e9 of them x 2" in out
    assert "2 x 8 KV heads x 128 x 32 layers x 2 bytes x 8,192 tokens x 1" in out
    assert "10 % of a device stay free" in out and "Memory decides alone" in out
    assert "MIG partitions" in out and "A100:1/1g.10gb*7" in out
    assert out.count("sky.ComputePool(") == 2


def test_the_declaration_can_be_pasted() -> None:
    out = run("llama-3-70b", "--dtype", "fp8", "--provider", "aws")
    space: dict[str, object] = {}
    exec(out[out.index("import skyinfra as sky") :], space)
    (pool,) = space["pools"]  # type: ignore[misc]
    assert pool.nodes == 1


def test_rows_are_cut_and_all_shows_them() -> None:
    assert "more; --all shows them" in run("llama-3.1-8b")
    assert "more; --all shows them" not in run("llama-3.1-8b", "--all")


def test_a_note_is_said_once_of_all_its_gpus() -> None:
    notes = json.loads(run("llama-3-70b", "--dtype", "fp8", "--json"))["notes"]
    (ampere,) = [note for note in notes if "Ampere computes in 16 bits" in note]
    assert ampere.startswith("A100, ")


def test_json() -> None:
    made = json.loads(run("gpt-oss-20b", "--provider", "aws", "--json"))
    assert made["workload"] == {"task": "inference", "dtype": "mxfp4", "context": 8192, "batch": 1}
    assert sum(part["bytes"] for part in made["need"]) == made["bytes"]
    assert made["model"]["active"] == 3_610_000_000 and made["model"]["source"]
    first = made["choices"][0]
    assert first["provider"] == "aws" and first["price"]["date"] and "sky.ComputePool(" in first["source"]
    assert any(each["slot"] for each in made["choices"])


def test_by_size() -> None:
    made = json.loads(run("--params", "13e9", "--layers", "40", "--hidden", "5120", "--kv-heads", "40", "--json"))
    assert made["model"]["params"] == 13_000_000_000
    assert {part["name"] for part in made["need"]} == {"weights", "KV cache", "activations"}


def test_errors_name_options() -> None:
    with pytest.raises(InvalidField) as error:
        run("llama-3-8b", "--task", "infer")
    assert error.value.field == "--task"
    with pytest.raises(UnknownModel) as unknown:
        run("llama-3")
    assert unknown.value.field == "MODEL"
    with pytest.raises(InvalidField) as heads:
        run("--params", "1e9", "--kv-heads", "0")
    assert heads.value.field == "--kv-heads"
