"""The names that a cell uses."""

from __future__ import annotations

import pytest

from skyinfra.notebook.names import used


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a = b + c", "b c"),
        ("x = 1\ny = x", ""),
        ("y = x\nx = 1", "x"),
        ("x += 1", "x"),
        ("x.part = 1\nl[0] = 2", "x l"),
        ("def f(p, q=d):\n    local = p\n    return local + free", "d free"),
        ("f = lambda p: p + free", "free"),
        ("[a + b for a in c]", "c b"),
        ("[a for a in c if (w := a)]\nw", "c"),
        ("for i in c:\n    t = i\n    u = t", "c"),
        ("for i in c:\n    if i:\n        t = 1\n    else:\n        u = t", "c t"),
        ("for i in c:\n    t = i\nt", "c t"),
        ("if c:\n    t = 1\nelse:\n    t = 2\nt", "c"),
        ("if c:\n    t = 1\nt", "c t"),
        ("while c:\n    c = t", "c t"),
        ("with a as b:\n    c = b\nc", "a"),
        ("try:\n    t = 1\nexcept E as e:\n    u = e\nt", "E t"),
        ("try:\n    pass\nfinally:\n    t = 1\nt", ""),
        ("import numpy as np\nnp.array(a)", "a"),
        ("class K(B):\n    v = a\n    def m(self):\n        return i + self.j", "B a i"),
        ("del x", "x"),
        ("match s:\n    case {'k': v}:\n        t = v\nt", "s v t"),
        ("f'{a!r:{w}}'", "a w"),
        ("def f():\n    global g\n    g = 1\n    return h", "h"),
        ("def f():\n    global g\n    g = 1\ng", "g"),
        ("def f():\n    global g\n    [g := 1 for a in c]\ng", "c g"),
        ("class C:\n    v = 1\nv", "v"),
        ("x = {w := a for a in [b for b in c]}\nw", "c"),
        ("@d\ndef f(): ...\nf()", "d"),
        ("", ""),
    ],
)
def test_names(source, names):
    found = [name for name in used(source) if not (name.startswith("__") or name == "super")]
    assert sorted(found) == sorted(names.split())


@pytest.mark.parametrize("source", ["x = = 1", "return 1", "!ls"])
def test_what_is_no_python(source):
    with pytest.raises(SyntaxError):
        used(source)
