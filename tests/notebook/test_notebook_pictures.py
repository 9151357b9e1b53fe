"""A fleet as HTML."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

import pytest

from skyinfra.mig import Compute
from skyinfra.notebook import pictures
from skyinfra.protocol.instance import InstanceInfo
from skyinfra.protocol.manifest import Endpoint, Manifest, ManifestNode

BAD = "<script>alert('x')</script>&\""
VOID = {"rect", "line", "progress"}


class Page(HTMLParser):
    """Checks that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.labels: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.labels += [value for name, value in attrs if name == "aria-label"]
        assert not any(name.startswith("on") for name, _ in attrs)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def manifest(*names: str, **given) -> Manifest:
    nodes = tuple(ManifestNode(name, name, "127.0.0.1", head=name == names[0]) for name in names)
    return Manifest(1, "stack", "pool", "local", Endpoint("127.0.0.1", 1), nodes, (), "s" * 40, **given)


def slots(node: str, gpu: int = 0, **given) -> list[InstanceInfo]:
    parts = [("3g.40gb", 0, 4), ("2g.20gb", 4, 2), ("1g.10gb", 6, 1)]
    made = [
        InstanceInfo(node, index, f"{node}/{gpu}{index}", "partition", "stack/pool", profile, "H100", gpu)
        for index, (profile, _, _) in enumerate(parts)
    ]
    return [
        dataclasses.replace(slot, start=start, size=size, units=8, **given)
        for slot, (_, start, size) in zip(made, parts, strict=True)
    ]


def test_nodes_slots_tasks_and_one_drawing_for_a_layout():
    found = [*slots("n0", 0), *slots("n0", 1), *slots("n1", 0)]
    page = Page(pictures.fleet(manifest("n0", "n1"), ["n0", "n1"], found, {"n0/00": ["train"], "n0/01": ["train"]}))
    assert page.tags.count("svg") == 1 and "H100: n0 GPU 0, 1; n1 GPU 0" in page.text
    assert page.labels == ["fleet stack/pool", "3g.40gb+2g.20gb+1g.10gb"]
    assert "n0 (head)" in page.text and "train*2" in page.text and "H100 3g.40gb*2" in page.text
    assert "2 nodes, 9 slots" in page.text


def test_another_layout_is_another_drawing():
    page = Page(pictures.fleet(manifest("n0"), ["n0"], [*slots("n0", 0), *slots("n0", 1)[:2]], {}))
    assert page.tags.count("svg") == 2 and "free" in page.text


def test_slots_that_share_a_gpu_instance_are_drawn_in_one():
    whole, *_ = slots("n0")
    shares = [dataclasses.replace(whole, slot=f"n0/{i}", profile="1c.3g.40gb", compute=Compute(i, 1)) for i in range(3)]
    page = Page(pictures.fleet(manifest("n0"), ["n0"], shares, {}))
    assert page.tags.count("svg") == 1
    assert page.labels == ["fleet stack/pool", "1c.3g.40gb*3"]
    other = [dataclasses.replace(each, node="n1") for each in shares[:2]]
    page = Page(pictures.fleet(manifest("n0", "n1"), ["n0", "n1"], [*shares, *other], {}))
    assert page.tags.count("svg") == 2, "another division is another layout"
    unknown = [dataclasses.replace(each, accelerator="MyGPU") for each in shares]
    assert "MyGPU 1c.3g.40gb*3: n0 GPU 0" in Page(pictures.fleet(manifest("n0"), ["n0"], unknown, {})).text


def test_everything_is_escaped():
    found = slots(BAD)
    evil = [dataclasses.replace(found[0], profile=BAD, accelerator=BAD), *found[1:]]
    made = dataclasses.replace(manifest(BAD), stack=BAD, pool=BAD, provider=BAD)
    page = Page(pictures.fleet(made, [BAD], evil, {found[0].slot: [BAD]}, BAD))
    assert "script" not in page.tags and page.text.count(BAD) >= 5


def test_no_style_sheet_and_no_class_reaches_the_page_around_it():
    html = pictures.fleet(manifest("n0"), ["n0"], slots("n0"), {})
    assert "<style" not in html and "class=" not in html and 'fill="currentColor"' in html


@pytest.mark.parametrize("given", [{"accelerator": "My GPU"}, {"accelerator": "MI300X"}, {"profile": "9g.90gb"}])
def test_what_cannot_be_drawn_is_named(given):
    page = Page(pictures.fleet(manifest("n0"), ["n0"], slots("n0", **given), {}))
    assert "svg" not in page.tags and str(*given.values()) in page.text


def test_other_slots_have_no_drawing():
    cpus = [InstanceInfo("n0", index, f"n0/{index}", "cpu", "stack/pool") for index in range(2)]
    gpus = [InstanceInfo("n1", 0, "n1/0", "gpu", "stack/pool", accelerator="L4", gpu=0)]
    page = Page(pictures.fleet(manifest("n0", "n1"), ["n0", "n1"], [*cpus, *gpus], {}))
    assert "cpu*2" in page.text and "L4" in page.text and "svg" not in page.tags


def test_many_nodes_are_folded():
    names = [f"n{number}" for number in range(25)]
    page = Page(pictures.fleet(manifest(*names), names, [s for n in names for s in slots(n)], {}))
    assert "15 more nodes" in page.text and page.tags.count("details") == 1 and "n24" in page.text
    assert "n9 GPU 0; and 15 more nodes" in page.text


def test_a_fleet_that_does_not_answer_is_shown_as_declared():
    page = Page(pictures.fleet(manifest("n0"), ["n0"], [], {}, "the head does not answer"))
    assert "the head does not answer" in page.text and "none" in page.text
