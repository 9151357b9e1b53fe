"""On a machine with NVIDIA GPUs: a slot for each, PyTorch on them, what `doctor` and `metrics` say meanwhile.

The baseline of what tasks do is the same function in a new Python process. Without a driver nothing is measured; a
PyTorch without CUDA computes on the CPU, and the rows say so. `gpu_report` keeps what was found in a file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_report import Report, look
from benchmarks.measure import Result, python

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from local_fleets.running_node import RunningNode, until  # noqa: E402

from skyinfra.client import Pool  # noqa: E402
from skyinfra.protocol.nodeconfig import NodeAccelerator, NodeConfig  # noqa: E402
from skyinfra.tasks import Task  # noqa: E402

STEPS = 300
PROCESS = "a new Python process"


def run() -> Iterator[Result]:
    """Measures, and writes the report to the file behind ``--report``."""
    words = sys.argv[1:]
    file = words[words.index("--report") + 1] if "--report" in words[:-1] else "gpu-report.json"
    report = Report()
    yield from report.kept(_measured(report), Path(file))


def _measured(report: Report) -> Iterator[Result]:
    look(report)
    names = [each["name"] for each in report.gpus]
    if not names:
        report.say("this machine has no NVIDIA driver")
        return
    accelerator = NodeAccelerator(names[0], "nvidia", len(names))
    config = NodeConfig(1, "bench", "gpu", "n0", "local", head=True, scheduler="127.0.0.1:0", accelerator=accelerator)
    with tempfile.TemporaryDirectory() as folder:
        node = RunningNode(Path(folder) / "node", config)
        try:
            start = time.perf_counter()
            slots = node.boot().slots
            seconds = time.perf_counter() - start
            ratio = len({slot.uuid for slot in slots}) / len(names)
            yield Result(f"{names[0]}: slots", f"GPUs that NVML lists: {len(names)}", seconds, ratio, "1")
            with node.pool() as pool:
                yield from _training(node, pool, report)
            yield from _doctor(node, report)
        finally:
            node.run("stop", "--timeout", "30")


def train(steps: int) -> dict[str, Any]:
    """Trains a small network: seconds until its first step was done, steps per second, where, and the losses."""
    begin = time.perf_counter()
    import torch

    cuda = torch.cuda.is_available()
    device, width = ("cuda", 4096) if cuda else ("cpu", 256)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(256, width, device=device)
    labels = torch.randint(10, (256,), device=device)
    losses = []

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    step()
    first = losses[0].item()  # waits for the device
    ready = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    last = losses[-1].item()
    return {
        "device": torch.cuda.get_device_name(0) if cuda else "the CPU",
        "visible": torch.cuda.device_count(),
        "ready": ready,
        "rate": steps / (time.perf_counter() - begin),
        "losses": (first, last),
    }


class Numbers:
    """A data set, for workers that are forked."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> int:
        return number


def load_data() -> float:
    """Returns for how many seconds a ``DataLoader`` with two workers takes to give all its data."""
    import torch

    begin = time.perf_counter()
    assert sum(int(batch.sum()) for batch in torch.utils.data.DataLoader(Numbers(), 8, num_workers=2)) == 2016
    return time.perf_counter() - begin


_kept: list[Any] = []


def keep(share: float) -> int:
    """Leaves that share of the device's memory taken in its process; returns the process."""
    import torch

    _kept.append(torch.empty(int(share * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda"))
    return os.getpid()


def break_context() -> int:
    """Reads beyond the end of a tensor, after which no call of CUDA in its process succeeds."""
    import torch

    return int(torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")].cpu())


def _left(pool: Pool) -> Iterator[Result]:
    """Returns in how many ways a task fails by what those before it have left in the process of its slot."""
    slot = pool.slots()[0]
    here = pool.select(node=slot.node)

    def on(function: Callable[..., Any], *arguments: Any) -> Any:
        return pool.submit(Task(function, arguments).options(slot=slot.slot, timeout=60)).result()

    def after_an_error() -> bool:
        with contextlib.suppress(Exception):  # a class of PyTorch, which may not be here
            return on(break_context) is None
        return bool(on(train, 1)["visible"] == 1)

    ways: dict[str, Callable[[], bool]] = {
        "a task after an error that stays with the context": after_an_error,
        "a task that needs what another holds": lambda: on(keep, 0.6) != on(keep, 0.6),
        "a rank beside such a process": lambda: bool(
            on(keep, 0.6) and here.launch(keep, 0.6, nodes=1, per_node=1, framework="none")
        ),
    }
    failed = []
    for way, works in ways.items():
        try:
            failed += [] if works() else [way]
        except Exception as error:  # noqa: BLE001 - as above
            print(f"gpu: {way}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(way)
    what = f"fails by what tasks left on the device: {', '.join(failed) or 'nothing'}"
    yield Result(what, f"{len(ways)} ways", 0, len(failed) / len(ways), "0", f"{len(failed)}")


def _training(node: RunningNode, pool: Pool, report: Report) -> Iterator[Result]:
    if importlib.util.find_spec("torch") is None:
        report.say("this Python has no PyTorch")
        return
    slot = pool.slots()[:1]
    program = f"import json; from benchmarks import gpu; print(json.dumps(gpu.train({STEPS})))"
    # The process sees all GPUs and takes the first one, which is that of the first slot.
    alone = [
        json.loads(subprocess.run(python(program), cwd=ROOT, capture_output=True, check=True, text=True).stdout)
        for _ in range(3)
    ]
    first, *more = [pool.broadcast(Task(train, (STEPS,)), slots=slot)[0] for _ in range(4)]
    where = first["device"]
    assert first["visible"] in (0, 1), first
    assert all(last < begin for begin, last in (each["losses"] for each in (first, *more)))
    ready = statistics.median(each["ready"] for each in alone)
    yield Result(f"first task on a slot, ready on {where}", PROCESS, first["ready"], first["ready"] / ready)
    again = statistics.median(each["ready"] for each in more)
    yield Result(f"second task there, ready on {where}", PROCESS, again, again / ready)
    rate, plain = (statistics.median(each["rate"] for each in found) for found in (more, alone))
    yield Result(f"training on {where}, steps", PROCESS, 0, rate / plain, "1", f"{rate:.0f}/s")
    together = Task(train, (STEPS,)) @ pool
    rate = sum(each["rate"] for each in together)
    yield Result(
        f"training on all {len(together)} slots at once",
        f"{len(together)} times one",
        0,
        rate / plain / len(together),
        "1",
        f"{rate:.0f}/s",
    )
    program = "from benchmarks import gpu; print(gpu.load_data(), gpu.load_data())"
    out = subprocess.run(python(program), cwd=ROOT, capture_output=True, check=True, text=True).stdout
    seconds = min(pool.broadcast(Task(load_data, ()), slots=slot)[0] for _ in range(2))
    yield Result("a DataLoader with two workers", PROCESS, seconds, seconds / min(map(float, out.split())), "1")
    if first["visible"]:
        yield from _busy(node, pool)
        yield from _left(pool)


def _busy(node: RunningNode, pool: Pool) -> Iterator[Result]:
    """Returns the readings by `metrics` of the first slot while it trains."""
    future = pool.submit(Task(train, (100 * STEPS,)))
    found = re.compile(r"^skyinfra_slot_utilization_ratio\{.*?\} ([\d.]+)$", re.MULTILINE)
    try:
        read = lambda: max(map(float, found.findall(node.run("metrics", "--once").stdout)), default=0.0)  # noqa: E731
        ratio = until(lambda: future.done() or read(), "a slot is in use")
        yield Result("utilization that metrics shows meanwhile", "all of it", 0, float(ratio), figure=f"{ratio:.0%}")
    finally:
        future.cancel()


def _doctor(node: RunningNode, report: Report) -> Iterator[Result]:
    findings = json.loads(node.run("doctor", "--json", check=False).stdout)["findings"]
    report.doctor = [{"what": each["what"], "result": each["result"]} for each in findings]
    wrong = [each["what"] for each in findings if each["result"] == "wrong"]
    baseline = f"{len(findings)} findings of doctor"
    what = f"wrong: {', '.join(wrong) or 'nothing'}"
    yield Result(what, baseline, 0, len(wrong) / len(findings), "0", f"{len(wrong)}")
