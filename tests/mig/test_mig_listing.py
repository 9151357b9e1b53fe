"""Output of `nvidia-smi mig -lgi`, as drivers of several years have printed it."""

from __future__ import annotations

import pytest

from skyinfra import InvalidLayout, UnknownProfile, mig

# NVIDIA, MIG User Guide, "Creating GPU Instances".
R450 = """
+----------------------------------------------------+
| GPU instances:                                     |
| GPU   Name          Profile  Instance   Placement  |
|                       ID       ID       Start:Size |
|====================================================|
|   0  MIG 3g.20gb       9        1          4:4     |
+----------------------------------------------------+
|   0  MIG 3g.20gb       9        2          0:4     |
+----------------------------------------------------+
"""
# As R525 and later write it, with a name that they have an attribute in.
R570 = """
+---------------------------------------------------------+
| GPU instances:                                          |
| GPU   Name               Profile  Instance   Placement  |
|                            ID       ID       Start:Size |
|=========================================================|
|   0  MIG 1g.10gb           19        9          2:1     |
+---------------------------------------------------------+
|   0  MIG 1g.10gb+me        20       10          3:1     |
+---------------------------------------------------------+
|   0  MIG 3g.40gb            9        1          4:4     |
+---------------------------------------------------------+
|  10  MIG 7g.80gb            0        0          0:8     |
+---------------------------------------------------------+
"""


def test_listings_of_several_drivers() -> None:
    assert mig.read_listing(R450) == {0: (mig.Placement("3g.20gb", 0, 4), mig.Placement("3g.20gb", 4, 4))}
    found = mig.read_listing(R570)
    assert [mig.placed_text(layout) for layout in found.values()] == ["1g.10gb@2+1g.10gb+me@3+3g.40gb@4", "7g.80gb@0"]
    assert list(found) == [0, 10]


def test_what_is_written_is_read_to_the_same_places() -> None:
    geometry = mig.geometry("h100_80gb")
    for layout in mig.maximal_layouts(geometry):
        (resolved,) = mig.resolve(mig.placed_text(layout), geometry, 1)
        assert resolved == layout


def test_nothing_stands() -> None:
    assert mig.read_listing("No GPU instances found: Not Found\n") == {}
    assert mig.read_listing("No MIG-enabled devices found.\n") == {}


@pytest.mark.parametrize("text", ["", "Unable to list: Insufficient Permissions", "|   0  MIG 1g.10gb  15*7 |"])
def test_something_else(text: str) -> None:
    with pytest.raises(InvalidLayout, match="no GPU instance is listed"):
        mig.read_listing(text)


def test_names_of_other_drivers_and_places_of_other_gpus() -> None:
    drifted = (mig.Placement("3g.39gb", 4, 4),)
    assert mig.check_listed(drifted, mig.geometry("a100_80gb")) == (mig.Placement("3g.40gb", 4, 4),)
    with pytest.raises(UnknownProfile):
        mig.check_listed((mig.Placement("3g.20gb", 0, 4),), mig.geometry("h100_80gb"))
    for wrong in ((mig.Placement("3g.40gb", 2, 4),), (mig.Placement("3g.40gb", 4, 2),), drifted * 2):
        with pytest.raises(InvalidLayout, match=r"has no 3g\.40gb there"):
            mig.check_listed(wrong, mig.geometry("h100_80gb"))
