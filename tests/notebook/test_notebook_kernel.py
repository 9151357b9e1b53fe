"""Real kernels: what is printed and shown stands in the right cell, and %%remote runs cells on slots."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from front_ends.notebooks import Kernel, write_manifest
from support import ROOT, python_path

SETUP = """
import os, time
from pathlib import Path
import skyinfra as sky

@sky.compute
def speak(word, path):
    print(word, "begins")
    sky.progress(1, 2, "half")
    while not Path(path).exists():
        time.sleep(0.02)
    print(word, "ends")
    sky.progress(2, 2, "half")
    return word

@sky.compute
def fail(x):
    return 1 / x

@sky.compute
def wait_for_ever(path):
    print("it waits")
    Path(path).touch()
    try:
        while True:
            time.sleep(0.02)
    finally:
        print("last words")

%load_ext skyinfra
pool = sky.connect("fleet.json")
pool
"""


def test_what_a_task_says_stands_in_the_cell_that_submitted_it(kernel: Kernel, tmp_path):
    shown = kernel.run(SETUP)
    [html] = shown.shown("text/html")
    assert (
        "<script" not in html
        and "stack/pool" in html
        and "<svg" in html
        and shown.shown() == ["<Pool stack/pool: 2 nodes, 4 slots, simulated>"]
    )
    first = kernel.run(f"first = pool.submit(speak('first', {str(tmp_path / 'go')!r}))")
    kernel.until(lambda: "first begins" in first.streams)
    second = kernel.run(f"second = pool.submit(speak('second', {str(tmp_path / 'go')!r})); print('here')")
    kernel.until(lambda: "second begins" in second.streams and second.shown() and first.shown())
    third = kernel.start("print(first.result(), second.result())")
    (tmp_path / "go").touch()
    kernel.until(lambda: third.idle and "second ends" in second.streams and "first ends" in first.streams)
    kernel.until(lambda: all("half: 2 of 2" in cell.shown()[0] for cell in (first, second)))
    assert third.streams == "first second\n"
    lines = [re.sub(r"^n\d/\d \| ", "", line) for line in first.streams.splitlines()]
    assert lines == ["first begins", "first ends"]
    assert second.streams.splitlines()[0] == "here" and "first" not in second.streams
    [bar] = first.shown("text/html")
    assert 'value="2"' in bar and "speak half: 2 of 2" in bar

    remote = kernel.run("%%remote fleet.json\ntotal = base + 1 if 'base' in dir() else 1\nprint('there')\n[total]")
    assert re.fullmatch(r"n\d/\d \| there\n", remote.streams) and remote.shown() == ["[1]"]
    assert kernel.run("print(total)").streams == "1\n"


@pytest.mark.slow
def test_remote_sends_what_the_cell_uses_and_brings_back_what_it_assigns(kernel: Kernel):
    kernel.run(SETUP)
    kernel.run("numbers = [1, 2, 3]\nunused = open('x', 'w')\ndef double(x):\n    return 2 * x\n")
    cell = kernel.run(
        "%%remote pool --node n1\nimport threading\nfor n in numbers:\n    last = double(n)\n"
        "def triple(x):\n    return 3 * x\nlock = threading.Lock()\nwhere = sky.instance_info().node\n"
    )
    assert "lock stayed on the slot: cannot be pickled" in cell.streams
    assert kernel.run("print(last, triple(2), where, 'lock' in dir())").streams == "6 6 n1 False\n"

    cell = kernel.run(
        "%%remote pool\nimport sys, types\nsys.modules['there'] = module = types.ModuleType('there')\n"
        "exec('class Kind: pass', module.__dict__)\nmodule.Kind.__module__ = 'there'\n"
        "kind = module.Kind()\nloss = 0.5\nkind and 'shown'"
    )
    assert "cannot be read here: ModuleNotFoundError: No module named 'there'" in cell.streams
    assert cell.shown() == ["'shown'"]
    assert kernel.run("print(loss, 'kind' in dir())").streams == "0.5 False\n"

    # What is shared stays shared, and memory that can be changed can be changed.
    kernel.run("%%remote pool\nimport numpy\nlarge = [numpy.zeros(3_000_000)]\nsame = large[0]")
    assert kernel.run("same[0] = 7\nprint(large[0][0], large[0] is same)").streams == "7.0 True\n"

    # Again: what the cell assigns first is not sent, though it is here by now and cannot be.
    kernel.run("lock = threading.Lock() if 'threading' in dir() else __import__('threading').Lock()")
    kernel.run("%%remote pool\nlock = 5\nresult = lock + 1")
    assert kernel.run("print(result, lock)").streams == "6 5\n"

    kernel.run("%%remote pool --in numbers --out numbers,last\nnumbers.append(4)\nlast = 0\nother = 1")
    assert kernel.run("print(numbers, last, 'other' in dir())").streams == "[1, 2, 3, 4] 0 False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("%%remote pool\nprint(unpicklable)", "'unpicklable', which the cell uses, cannot be pickled"),
        ("%%remote pool --out nothing\nx = 1", "nothing: the cell has no such name"),
        ("%%remote pool --in numbrs\nx = 1", "there is no such name (given: 'numbrs')"),
        ("%%remote pool --what\nx = 1", "unrecognized arguments: --what"),
        ("%%remote pool\n!nvidia-smi", "a line that begins with ! or % is for the notebook"),
        ("%%remote pool\nx = 1\ny = = 2", "line 3: invalid syntax (given: 'y = = 2')"),
        ("%%remote pool --node n7\nx = 1", "n7"),
        ("%%remote other.json\nx = 1", "other.json"),
    ],
)
def test_what_remote_refuses_is_said_in_a_line(kernel: Kernel, code, text):
    kernel.run(SETUP)
    kernel.run("import threading\nunpicklable = threading.Lock()")
    cell = kernel.run(code, fails=True)
    assert text in cell.traceback
    assert "Traceback" not in cell.traceback and "File " not in cell.traceback


@pytest.mark.slow
def test_exceptions_are_readable(kernel: Kernel):
    kernel.run(SETUP)
    plain = kernel.run("fail(0) >> pool", fails=True).traceback
    assert "ZeroDivisionError: division by zero" in plain
    assert "----> 1 fail(0) >> pool" in plain and re.search(r"---> \d+     return 1 / x", plain)
    assert "futures.py" not in plain and "pickling.py" not in plain

    remote = kernel.run("%%remote pool\nx = 1\ndef inner():\n    return x / 0\ninner()", fails=True).traceback
    assert remote.count("Cell In[3]") == 2 and "----> 4     return x / 0" in remote and "----> 5 inner()" in remote
    assert "ZeroDivisionError: division by zero" in remote and "site-packages" not in remote
    assert "magic.py" not in remote and "cells.py" not in remote

    hostile = "'\\x1b[2J\\x1b]0;title\\x07\\u202ex\\r'"
    raised = f"error = ValueError({hostile})\nerror.add_note({hostile})\nraise error"
    cell = kernel.run(f"%%remote pool\n{raised}", fails=True)
    assert cell.error is not None
    shown = "\n".join(cell.error["traceback"])
    assert "\x1b[" in shown and not re.search("\x1b(?!\\[[0-9;]*m)|[\x07\r\u202e]", shown)
    assert shown.count(r"\x1b[2J\x1b]0;title\x07\u202ex\r") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "wait_for_ever('{0}') >> pool",
        "list(pool.map(wait_for_ever, ['{0}']))",
        "wait_for_ever('{0}') @ pool",
        "%%remote pool\nwait_for_ever('{0}')",
    ],
)
def test_an_interrupt_cancels_and_loses_no_output(kernel: Kernel, tmp_path, code):
    kernel.run(SETUP)
    cell = kernel.start(code.format(tmp_path / "runs"))
    kernel.until(lambda: (tmp_path / "runs").exists())
    kernel.manager.interrupt_kernel()
    kernel.until(lambda: cell.idle)
    assert "KeyboardInterrupt" in cell.traceback and re.search(r"(was|were) cancelled\.", cell.traceback)
    kernel.until(lambda: "it waits" in cell.streams and "last words" in cell.streams)
    # The slot is free, and later output is in later cells.
    after = kernel.run("%%remote pool\nprint('after')")
    assert "after" in after.streams and "last words" not in after.streams


@pytest.mark.slow
def test_a_restarted_kernel_connects_again(kernel: Kernel, tmp_path):
    kernel.run(SETUP)
    kernel.run(f"future = pool.submit(speak('before', {str(tmp_path / 'go')!r}))")
    kernel.restart()
    (tmp_path / "go").touch()
    kernel.run(f"go = {str(tmp_path / 'go')!r}{SETUP}")
    assert kernel.run("%%remote pool\nx = 5\nx").shown() == ["5"]
    assert kernel.run("print(x, speak('after', go) >> pool)").streams.splitlines()[-1] == "5 after"


@pytest.mark.slow
def test_a_map_shows_one_bar_that_stays(kernel: Kernel):
    kernel.run(SETUP)
    cell = kernel.run("def slow(x):\n    time.sleep(0.3)\n    return x\nlist(pool.map(slow, range(20)))")
    bars = [text for text in cell.shown() if "tasks:" in text]
    assert bars == ["tasks: 20 of 20 done"]


@pytest.mark.slow
def test_the_example_runs(fleet, tmp_path):
    import nbformat
    from nbclient import NotebookClient

    write_manifest(tmp_path, fleet.manifest)
    text = (ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8")
    text = text.replace(json.dumps('"quickstart", "mig"')[1:-1], json.dumps('"fleet.json"')[1:-1])
    notebook = nbformat.reads(text.replace("quickstart/mig", "fleet.json"), as_version=4)
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": python_path()}
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.execute(env=environment)
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.source and cell.execution_count for cell in cells)
    shown = ["\n".join(out.get("text", "") or str(out.get("data", "")) for out in cell.outputs) for cell in cells]
    assert "<svg" in shown[0]
    assert "epoch 3" in shown[1] and "epochs: 4 of 4" in shown[1]
    assert "8 of 8 done" in shown[2]
    assert "best of 8" in shown[3] and "best" not in shown[2]
    assert re.search(r"n\d/\d", shown[4])


def test_loading_the_extension_imports_no_client_before():
    program = (
        "import sys, skyinfra\nassert callable(skyinfra.load_ipython_extension)\n"
        "assert 'load_ipython_extension' not in skyinfra.__all__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": python_path()})
