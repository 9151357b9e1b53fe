"""What a fleet can do with tasks, one thing after the other, against the deployed quickstart.

(cd stacks/quickstart && skyinfra deploy)
python examples/tour.py                  # or another fleet: python examples/tour.py STACK/POOL, or FLEET.json
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
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
def nap(seconds: float) -> str:
    """Takes its time."""
    time.sleep(seconds)
    return sky.instance_info().slot


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

    def predict(self, x: float) -> tuple[float, int, int]:
        """A result, how often the model was loaded, and the process."""
        return self.factor * x, self.loads, os.getpid()


def rank() -> tuple[int, int, str]:
    """What a rank of a gang knows."""
    gang = sky.gang()
    return gang.rank, gang.world_size, sky.instance_info().slot


class Tour:
    """The stops, on one pool."""

    def __init__(self, pool: sky.Pool, folder: Path) -> None:
        self.pool = pool
        self.folder = folder

    def slots(self) -> str:
        """pool.slots()"""
        return ", ".join(f"{slot.slot} ({slot.profile or slot.kind})" for slot in self.pool.slots())

    def one_slot(self) -> str:
        """task >> pool"""
        return where() >> self.pool

    def every_slot(self) -> str:
        """task @ pool"""
        return ", ".join(where() @ self.pool)

    def gathered(self) -> str:
        """sky.gather(...) >> pool"""
        return str(sky.gather(square(3), square(4)) >> self.pool)

    def mapped(self) -> str:
        """pool.map(...), unordered"""
        return f"{sum(self.pool.map(square, range(100), ordered=False))}, the sum of 100 squares"

    def selected(self) -> str:
        """pool.select(node=...)"""
        node = self.pool.slots()[-1].node
        return ", ".join(where() @ self.pool.select(node=node))

    def coroutines(self) -> str:
        """async with sky.connect_async(...)"""

        async def main() -> list[int]:
            async with sky.connect_async(self.pool.manifest) as pool:
                return list(await asyncio.gather(*(square(x) >> pool for x in range(5))))

        return str(asyncio.run(main()))

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

    def gang(self) -> str:
        """pool.launch(...)"""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sky.GangWarning)  # the partitions of the quickstart share GPUs
            ranks = self.pool.launch(rank, framework="none")
        return ", ".join(f"rank {number} of {size} on {slot}" for number, size, slot in ranks)

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
        return f"{job.result(timeout=60)} from the job {name}, which is {self.pool.job(name).state}"


STOPS: list[Callable[[Tour], str]] = [
    Tour.slots,
    Tour.one_slot,
    Tour.every_slot,
    Tour.gathered,
    Tour.mapped,
    Tour.selected,
    Tour.coroutines,
    Tour.retried,
    Tour.timed_out,
    Tour.cancelled,
    Tour.warm,
    Tour.printed,
    Tour.gang,
    Tour.data,
    Tour.large,
    Tour.job,
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
            print(f"{stop.__doc__}: {stop(tour)}", flush=True)
    print(f"{len(STOPS)} stops in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
