"""Values that cross to Terraform as text are the same to it, and to who reads the synthesized stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from skyinfra.terraform.expressions import file_of, folded, from_file, literal, plain, unfolded
from skyinfra.terraform.program import Terraform

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(["${a}", "%{if}", "$${", '"\\'])
VALUE = st.recursive(
    TEXT | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(TEXT, inner, max_size=40),
)


@given(st.dictionaries(TEXT, VALUE, max_size=3))
def test_what_is_folded_is_read_back(inputs: dict[str, Any]) -> None:
    crossed = folded(literal(inputs))
    assert unfolded(crossed) == literal(inputs)


@given(TEXT.filter(lambda text: "$$" not in text and "%%" not in text))
def test_literal_and_back(text: str) -> None:
    assert plain(literal({"a": [text]})) == {"a": [text]}


def test_only_what_is_long_is_folded() -> None:
    few, many = [{"a": 1}] * 8, [{"a": 1}] * 60
    crossed = folded({"few": few, "many": many, "text": "x" * 1000})
    assert crossed["few"] == few and crossed["text"] == "x" * 1000
    assert crossed["many"].startswith('${jsondecode("[{')


def test_terraform_reads_it_as_it_was(tmp_path: Path, terraform_program: str) -> None:
    awkward = ['${x} %{y} " \\ \n\t\b\f é \U0001f600 \x7f', "$", "%", "$${", "}"]
    value = [{"index": index, "text": text, "none": None} for index, text in enumerate(awkward * 20)]
    crossed = folded(literal({"value": value}))
    assert isinstance(crossed["value"], str)
    (tmp_path / "main.tf.json").write_text(json.dumps({"output": {"value": {"value": crossed["value"]}}}))
    terraform = Terraform(tmp_path)
    terraform.prepare()
    with terraform.planned(lambda event: None) as plan:
        terraform.apply_plan(plan, lambda event: None)
    assert terraform.outputs()["value"] == value


def test_a_file_of_the_stack_is_read(tmp_path: Path, terraform_program: str) -> None:
    text = '${x} %{y} $${ "quoted" \\ é\n'
    (tmp_path / "a.user_data_head").write_bytes(text.encode())
    crossed = from_file("a.user_data_head")
    assert file_of(crossed) == "a.user_data_head"
    assert file_of(literal(crossed)) is None
    assert file_of(text) is None and file_of(1) is None
    (tmp_path / "main.tf.json").write_text(json.dumps({"output": {"value": {"value": crossed}}}))
    terraform = Terraform(tmp_path)
    terraform.prepare()
    with terraform.planned(lambda event: None) as plan:
        terraform.apply_plan(plan, lambda event: None)
    assert terraform.outputs()["value"] == text
