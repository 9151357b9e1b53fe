"""What a fleet can do with tasks, one thing after the other, against the deployed quickstart.

In a project of `skyinfra init --example tour`: skyinfra deploy && python tour.py
Another fleet: python tour.py STACK/POOL, or FLEET.json
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import skyinfra as sky

QUICKSTART = Path(__file__).resolve().parent.parent / "stacks" / "quickstart"


@sky.compute
def where() -> str:
    """The slot that this runs on."""
    return sky.instance_info().slot


@sky.compute
def square(x: int) -> int:
    """A short task."""
    return x * x


@sky.compute(retries=2)
def fail_twice(path: str) -> int:
    """Works the third time."""
    with Path(path).open("a") as file:
        file.write(".")
        start = file.tell()
    if start < 3:
        raise OSError(f"start {start}")
    return start


@sky.compute
def nap(seconds: float, name: str = "") -> str:
    """Takes its time."""
    time.sleep(seconds)
    return name


@sky.compute
def divide(a: int, b: int) -> float:
    """Raises where *b* is 0."""
    return a / b


@sky.compute
def in_steps(steps: int) -> str:
    """Says how far it is."""
    for step in range(steps):
        sky.progress(step, steps, f"loss {1 / (step + 1):.2f}")
        time.sleep(0.1)
    return f"{steps} steps"


@sky.compute
def speak(word: str) -> None:
    """Prints, and starts a program that does."""
    print(word, "from Python")
    sys.stdout.flush()
    subprocess.run(["/bin/echo", word, "from a program"], check=True)


@sky.cls
class Model:
    """Is loaded once in the process of each slot."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.loads = 0

    @sky.enter
    def load(self) -> None:
        """What would read the weights."""
        self.loads += 1

    @sky.exit
    def unload(self) -> None:
        """What would leave a connection; called when the process of the slot ends."""

    def predict(self, x: float) -> tuple[float, int, int]:
        """A result, how often the model was loaded, and the process."""
        return self.factor * x, self.loads, os.getpid()


def rank() -> tuple[int, int, str]:
    """What a rank of a gang knows."""
    gang = sky.gang()
    return gang.rank, gang.world_size, sky.instance_info().slot


def fail_on_rank_1() -> None:
    """All ranks end with the first one that fails."""
    if sky.gang().rank == 1:
        raise ValueError("no data")
    time.sleep(60)


LIBRARY = """
import os
from pathlib import Path

def read() -> tuple[str, int]:
    return Path(__file__).with_name("data.txt").read_text(), os.getpid()
"""


@sky.compute
def use_library() -> tuple[str, int]:
    """Imports a package that was synced."""
    from tour_library import read  # type: ignore[import-not-found]

    found: tuple[str, int] = read()
    return found


class Tour:
    """The stops, on one pool."""

    def __init__(self, pool: sky.Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder

    def slots(self) -> str:
        """pool.slots()"""
        return ", ".join(f"{slot.slot} ({slot.profile or slot.kind})" for slot in self.pool.slots())

    def nodes(self) -> str:
        """pool.nodes()"""
        return ", ".join(f"{node.name} at {node.address}" for node in self.pool.nodes())

    def one_slot(self) -> str:
        """task >> pool"""
        return where() >> self.pool

    def every_slot(self) -> str:
        """task @ pool"""
        return ", ".join(where() @ self.pool)

    def gathered(self) -> str:
        """sky.gather(...) >> pool"""
        return str(sky.gather(square(3), square(4)) >> self.pool)

    def streamed(self) -> str:
        """sky.gather(..., stream=True)"""
        found = sky.gather(nap(0.3, "slow"), nap(0.1, "fast"), stream=True, ordered=False) >> self.pool
        return ", then ".join(found)

    def mapped(self) -> str:
        """pool.map(...), unordered"""
        return f"{sum(self.pool.map(square, range(100), ordered=False))}, the sum of 100 squares"

    def selected(self) -> str:
        """pool.select(node=..., profile=...)"""
        last = self.pool.slots()[-1]
        return ", ".join(where() @ self.pool.select(node=last.node, profile=last.profile))

    def coroutines(self) -> str:
        """async with sky.connect_async(...)"""

        async def main() -> list[int]:
            async with sky.connect_async(self.pool.manifest) as pool:
                return list(await asyncio.gather(*(square(x) >> pool for x in range(5))))

        return str(asyncio.run(main()))

    def raised(self) -> str:
        """future.exception(), .traceback()"""
        future = self.pool.submit(divide(1, 0))
        frames = traceback.extract_tb(future.traceback())
        return f"{future.exception()!r}, raised there in {frames[-1].name}: {frames[-1].line}"

    def retried(self) -> str:
        """@sky.compute(retries=2)"""
        return f"came through at start {fail_twice(str(self.folder / 'starts')) >> self.pool}"

    def timed_out(self) -> str:
        """task.options(timeout=0.5)"""
        try:
            nap(60).options(timeout=0.5) >> self.pool
        except sky.TaskTimeout as error:
            return str(error).splitlines()[0]
        raise AssertionError("it was not stopped")

    def cancelled(self) -> str:
        """future.cancel()"""
        future = self.pool.submit(nap(60))
        while not any(task.key == future.key for tasks in self.pool.running().values() for task in tasks):
            time.sleep(0.1)
        began = time.monotonic()
        future.cancel()
        where() @ self.pool
        return f"every slot took its next task within {time.monotonic() - began:.1f} s"

    def warm(self) -> str:
        """@sky.cls"""
        model = Model(2.0)
        slots = self.pool.slots()[:1]
        found = [self.pool.broadcast(model.predict(x), slots=slots)[0] for x in (1.0, 2.0, 3.0)]
        return f"{[value for value, _, _ in found]} by one process, loaded {found[-1][1]} time"

    def printed(self) -> str:
        """what tasks print"""
        speak("hello") >> self.pool
        return "is above, with the slot in front"

    def progressed(self) -> str:
        """sky.progress(step, steps)"""
        return f"{in_steps(15) >> self.pool}, as a bar where someone watches"

    def gang(self) -> str:
        """pool.launch(...)"""
        ranks = self.pool.launch(rank, framework="none")
        return ", ".join(f"rank {number} of {size} on {slot}" for number, size, slot in ranks)

    def gang_failed(self) -> str:
        """a rank of it that fails"""
        try:
            self.pool.launch(fail_on_rank_1, nodes=1, framework="none")
        except ValueError as error:
            return f"{type(error).__name__}: {error}. {error.__notes__[0]}"
        raise AssertionError("it did not fail")

    def included(self) -> str:
        """pool.sync(...)"""
        library = self.folder / "tour_library"
        library.mkdir()
        (library / "__init__.py").write_text(LIBRARY)
        slots = self.pool.slots()[:1]
        found = []
        for text in ("first data", "other data"):
            (library / "data.txt").write_text(text)
            sent = self.pool.sync(library)
            [(read, process)] = self.pool.broadcast(use_library(), slots=slots)
            found.append((f"{read} ({sent.sent_blobs} blobs sent)", process))
        stays = "the same process" if found[0][1] == found[1][1] else "another process"
        return f"{found[0][0]}, then {found[1][0]} in {stays}"

    def data(self) -> str:
        """pool.put(...), pool.get(...)"""
        (self.folder / "words.txt").write_text("brought and taken\n")
        remote = self.pool.put(self.folder / "words.txt")
        back = self.pool.get(remote, self.folder / "back.txt", node=self.pool.node_names()[-1])
        return Path(back).read_text().strip()

    def large(self) -> str:
        """large arguments and results"""
        data = bytearray(20_000_000)
        back = self.pool.submit(bytes, data).result()
        return f"{len(data) + len(back):,} bytes out and back"

    def job(self) -> str:
        """pool.submit(..., detach=...)"""
        name = f"tour-{uuid.uuid4().hex[:8]}"
        job = self.pool.submit(square(12), detach=name)
        said = f"{job.result(timeout=60)} from the job {name}, which is {self.pool.job(name).state}"
        job.forget()
        return said

    def job_cancelled(self) -> str:
        """job.cancel()"""
        job = self.pool.detach(nap(60))
        while job.state != "running":
            time.sleep(0.1)
        began = time.monotonic()
        job.cancel()
        try:
            job.result(timeout=60)
        except sky.JobCancelled:
            said = f"{job.state} after {time.monotonic() - began:.1f} s"
        job.forget()
        return said


STOPS: list[Callable[[Tour], str]] = [
    Tour.slots,
    Tour.nodes,
    Tour.one_slot,
    Tour.every_slot,
    Tour.gathered,
    Tour.streamed,
    Tour.mapped,
    Tour.selected,
    Tour.coroutines,
    Tour.raised,
    Tour.retried,
    Tour.timed_out,
    Tour.cancelled,
    Tour.warm,
    Tour.printed,
    Tour.progressed,
    Tour.gang,
    Tour.gang_failed,
    Tour.data,
    Tour.included,
    Tour.large,
    Tour.job,
    Tour.job_cancelled,
]


def main() -> None:
    """Goes from stop to stop and prints what was seen."""
    fleet = sys.argv[1] if len(sys.argv) > 1 else "quickstart/mig"
    if len(sys.argv) == 1 and not Path("cdktf.json").exists():
        os.chdir(QUICKSTART)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, sky.connect(fleet) as pool:
        tour = Tour(pool, Path(folder))
        for stop in STOPS:
            said = stop(tour)
            print(f"{stop.__doc__:<36} {said}", flush=True)
    print(f"{len(STOPS)} stops in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
