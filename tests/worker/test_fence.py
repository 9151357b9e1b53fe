"""A task leaves its process as it found it, or another process takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import queue
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from local_fleets.client_fixtures import eventually

import skyinfra as sky
from skyinfra.client import open_pool
from skyinfra.tasks import Task


@pytest.fixture
def one(pool: Any) -> Any:
    """One slot of the fleet."""
    return pool.slots()[:1]


def on(pool: Any, slot: Any, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return pool.broadcast(Task(function, arguments).options(**options), slots=slot)[0]


def state() -> dict[str, Any]:
    umask = os.umask(0)
    os.umask(umask)
    return {
        "process": os.getpid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "variables": dict(os.environ),
        "folder": (os.getcwd(), os.listdir()),  # noqa: PTH109, PTH208
        "paths": (sys.path[:], sys.argv[:]),
        "streams": [(each.closed, each.encoding, each.errors) for each in (sys.stdin, sys.stdout, sys.stderr)],
        "umask": umask,
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": os.sched_getaffinity(0),
        "socket": socket.getdefaulttimeout(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "collects": (gc.isenabled(), gc.get_threshold()),
        "traced": (sys.gettrace() is None, sys.getprofile() is None),
        "time zone": (time.tzname, time.timezone),
        "locale": locale.setlocale(locale.LC_ALL),
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "temporary": tempfile.gettempdir(),
        "starts": multiprocessing.get_start_method(allow_none=True),
        "refused": [str(each) for each in warnings.filters if each[0] == "error"],
    }


def change_lists() -> None:
    sys.path.insert(0, "/nowhere")
    sys.path = ["/nowhere"]
    sys.argv = ["x"]


def change_variables() -> None:
    os.environ["LEAKED"] = "x"
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()
    del os.environ["PATH"]
    os.environ = {}  # type: ignore[assignment]  # noqa: B003


def change_folder() -> None:
    Path("kept/deep").mkdir(parents=True)
    Path("kept/deep/file").touch()
    Path("kept/deep").chmod(0o500)
    Path("link").symlink_to("/etc")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def remove_folder() -> None:
    Path.cwd().rmdir()


def change_signals() -> None:
    def late(*_: object) -> None:
        raise TimeoutError("late")

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, late)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    with contextlib.suppress(TimeoutError):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        time.sleep(0.01)


def change_streams() -> None:
    sys.stdout.close()
    sys.stderr.detach()  # type: ignore[union-attr]
    sys.stdin = None  # type: ignore[assignment]


def replace_streams() -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.__stderr__.reconfigure(encoding="ascii", errors="replace")  # type: ignore[union-attr]


def change_numbers() -> None:
    os.umask(0)
    os.nice(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    socket.setdefaulttimeout(1)
    sys.setrecursionlimit(5000)
    sys.setswitchinterval(1)
    gc.disable()
    gc.set_threshold(5)
    sys.settrace(lambda *_: None)
    sys.setprofile(lambda *_: None)
    locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
    tempfile.tempdir = "/nowhere"
    multiprocessing.set_start_method("spawn", force=True)
    warnings.simplefilter("error")


CHANGES = [
    change_lists,
    change_variables,
    change_folder,
    remove_folder,
    change_signals,
    change_streams,
    replace_streams,
    change_numbers,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_task_changes_is_put_back(pool: Any, one: Any, change: Callable[[], None]) -> None:
    before = on(pool, one, state)
    with contextlib.suppress(TimeoutError):  # of its own handler
        on(pool, one, change)
    after = on(pool, one, state)
    if change is change_signals and after["process"] != before["process"]:
        return  # its timer may hit what puts things back: another process takes the place of that one
    assert after == before
    assert after["main thread"]
    assert before["folder"][1] == []


def watchdogs() -> int:
    """How many threads take no signals at all: that of faulthandler."""
    found = 0
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended
            found += re.search(r"SigBlk:\s*ffffff", (each / "status").read_text()) is not None
    return found


def watch() -> None:
    faulthandler.dump_traceback_later(600, exit=True)
    while not watchdogs():  # it has begun
        time.sleep(0.01)


def test_a_watchdog_ends_with_its_task(pool: Any, one: Any) -> None:
    for timeout in (None, 600):
        on(pool, one, watch, timeout=timeout)
        assert on(pool, one, watchdogs) == 0


def close_output() -> None:
    os.close(1)
    Path("/dev/null").open()  # noqa: SIM115 - it has the number now


def test_where_something_cannot_be_put_back_another_process_comes(fleet: Any, one: Any) -> None:
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        before = on(pool, one, state)
        on(pool, one, close_output)
        after = on(pool, one, state)
        on(pool, one, print, "line")
        eventually(lambda: lines == ["line"])
    assert after.pop("process") != before.pop("process")
    # With folders of its own for each process.
    assert len(after.pop("paths")[0]) == len(before.pop("paths")[0])
    # And one of the files of the client.
    for name in ("SKYINFRA_TREE", "PYTHONPATH", "__DASK_PARENT_PID"):
        after["variables"].pop(name, None), before["variables"].pop(name, None)
    assert after == before


def test_tasks_of_one_message_have_a_fence_each(pool: Any) -> None:
    def step(n: int) -> tuple[str | None, list[str]]:
        found = os.environ.get("LEAKED"), os.listdir()  # noqa: PTH208
        os.environ["LEAKED"] = "x"
        Path("file").touch()
        if n % 50 == 0:
            os.close(1)
        return found

    assert list(pool.map(step, range(200))) == [(None, [])] * 200


# Interrupts ---------------------------------------------------------------------------------------------------------


def wait(how: str, path: str) -> None:
    try:
        if how == "sleep":
            time.sleep(60)
        elif how == "queue":
            queue.Queue().get()
        elif how == "program":
            subprocess.run(["sleep", "60"], check=True)
        elif how == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        else:
            asyncio.run(asyncio.sleep(60))
    finally:
        Path(path).touch()


@pytest.mark.parametrize("how", ["sleep", "queue", "program", "lock", "asyncio"])
def test_a_task_is_interrupted_where_it_waits(pool: Any, one: Any, tmp_path: Path, how: str) -> None:
    before = on(pool, one, os.getpid)
    with pytest.raises(sky.TaskTimeout):
        on(pool, one, wait, how, str(tmp_path / "over"), timeout=1)
    assert (tmp_path / "over").exists()
    assert on(pool, one, os.getpid) == before


def test_an_interrupt_hits_no_other_task(pool: Any) -> None:
    def victim() -> None:
        for _ in range(4):
            time.sleep(0.003)

    slots = len(pool.slots())
    for n in range(30):
        futures = [pool.submit(victim) for _ in range(slots)]
        others = [pool.submit(Task(abs, (n,))) for _ in range(slots)]
        time.sleep(random.random() * 0.03)
        for each in futures:
            each.cancel()
        assert [each.result(60) for each in others] == [n] * slots


def test_signals_reach_a_task(pool: Any, one: Any) -> None:
    def alarmed() -> str:
        def on_alarm(*_: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(60)
        except TimeoutError:
            return "alarmed"
        return "slept"

    assert on(pool, one, alarmed) == "alarmed"


# Processes ----------------------------------------------------------------------------------------------------------


def start_some() -> list[int]:
    plain = subprocess.Popen(["sleep", "987"])
    apart = subprocess.Popen(["sleep", "988"], start_new_session=True)
    # Its parent ends at once.
    daemon = subprocess.run(
        ["sh", "-c", "setsid sleep 989 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    if (deaf := os.fork()) == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        os._exit(0)
    return [plain.pid, apart.pid, int(daemon.stdout), deaf]


def test_processes_that_a_task_leaves_are_ended_and_said(fleet: Any, one: Any) -> None:
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        pids = on(pool, one, start_some)
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        eventually(lambda: bool(lines))
        assert len(lines) == 1
        assert lines[0].startswith("[ended 4 processes that the task left behind: ")
        assert "sleep 987" in lines[0]
        assert on(pool, one, subprocess.check_output, ["echo", "x"]) == b"x\n"
        assert len(lines) == 1


def use_a_pool() -> tuple[list[int], int]:
    with multiprocessing.get_context("forkserver").Pool(2) as pool:
        return pool.map(abs, [-1, -2]), forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def test_what_python_lets_run_for_a_pool_of_the_task_is_ended_and_not_said(fleet: Any, one: Any) -> None:
    lines: list[str] = []
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        for _ in range(2):
            result, server = on(pool, one, use_a_pool)
            assert result == [1, 2] and not Path(f"/proc/{server}").exists()
        on(pool, one, print, "last")
        eventually(lambda: bool(lines))
    assert lines == ["last"]


def compile_worker(program: str) -> int:
    return subprocess.Popen([sys.executable, program]).pid


def test_what_a_library_keeps_for_its_process_stays_as_long(pool: Any, one: Any, tmp_path: Path) -> None:
    program = tmp_path / "torch/_inductor/compile_worker/__main__.py"
    program.parent.mkdir(parents=True)
    program.write_text("import subprocess; subprocess.run(['sleep', '986'])")
    pid = on(pool, one, compile_worker, str(program))
    assert on(pool, one, os.getpid) and Path(f"/proc/{pid}").exists()
    on(pool, one, os.getpid, fresh=True)
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def how_processes_start() -> tuple[str, str, int]:
    """Starts one without saying how; one that is forked needs no function that can be pickled."""
    ours, theirs = multiprocessing.Pipe()
    method = multiprocessing.get_start_method()
    target: Callable[[int], object] = (lambda number: theirs.send(number)) if method == "fork" else theirs.send
    process = multiprocessing.Process(target=target, args=(7,))
    process.start()
    try:
        return multiprocessing.current_process().name, method, ours.recv()
    finally:
        process.join()


def test_processes_start_as_in_a_program(pool: Any, one: Any) -> None:
    program = "import multiprocessing as m; print(m.current_process().name, m.get_start_method())"
    name, method = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert on(pool, one, how_processes_start) == (name, method, 7)


def test_a_fork_that_returns_ends_there(pool: Any, one: Any) -> None:
    def forks(how: str) -> tuple[str, int]:
        if (pid := os.fork()) == 0:
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise OSError("in the child")
            return "child", 0
        return "parent", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert [on(pool, one, forks, how) for how in ("return", "exit", "raise")] == [
        ("parent", 0),
        ("parent", 3),
        ("parent", 1),
    ]


@sky.cls
class Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.environ["OF_OBJECT"] = "x"

    def pid(self) -> int:
        subprocess.Popen(["sleep", "601"])
        assert self.process.poll() is None
        return self.process.pid

    def variable(self) -> str | None:
        return os.environ.get("OF_OBJECT")


def test_processes_of_an_object_stay_for_as_long_as_it(pool: Any, one: Any) -> None:
    server = Server()
    pid = pool.broadcast(server.pid(), slots=one)[0]
    assert pool.broadcast(server.pid(), slots=one) == [pid]
    assert Path(f"/proc/{pid}").exists()
    assert pool.broadcast(server.variable(), slots=one) == [None]
    assert pool.broadcast(server.release(), slots=one) == [True]
    assert not Path(f"/proc/{pid}").exists()


@sky.cls
class Unmade(getattr(Server, "kind", Server)):  # on a node, it is the class itself
    def __init__(self) -> None:
        super().__init__()
        raise LookupError(self.process.pid)


def test_processes_of_an_object_that_could_not_be_made_are_ended(pool: Any, one: Any) -> None:
    with pytest.raises(LookupError) as caught:
        pool.broadcast(Unmade().pid(), slots=one)
    assert not Path(f"/proc/{caught.value.args[0]}").exists()


# Threads ------------------------------------------------------------------------------------------------------------


def leave_threads() -> str:
    def say(n: int) -> None:
        print(f"secret {n}", flush=True)
        print("part of a line", end="", file=sys.stderr)
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.buffer.flush()
        # Each is started by the one before.
        if n < 40:
            threading.Timer(0.02, say, (n + 1,)).start()

    say(0)
    return threading.current_thread().name


def test_threads_of_an_ended_task_print_into_its_own_log(fleet: Any, pool: Any, one: Any) -> None:
    lines: list[str] = []

    def listens() -> None:
        print("mine")
        thread = threading.Thread(target=print, args=("also mine",))
        thread.start()
        thread.join()
        time.sleep(0.5)

    first = pool.submit(leave_threads)
    slot_of = first.result(60)
    assert slot_of == "MainThread"
    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as other:
        other.broadcast(Task(listens))
        assert sorted(lines) == ["also mine"] * 4 + ["mine"] * 4
    (log,) = fleet.root.glob(f"*/tasks/{first.key}.log")
    eventually(lambda: "secret 40" in log.read_text())


def test_logging_that_a_task_sets_up_goes_on(fleet: Any, one: Any) -> None:
    lines: list[str] = []

    def set_up() -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
        logging.info("one")
        sys.stderr.close()

    with open_pool(fleet.manifest, output=lambda _, line: lines.append(line)) as pool:
        on(pool, one, set_up)
        on(pool, one, logging.info, "two")
        eventually(lambda: lines == ["one", "two"])


# New processes ------------------------------------------------------------------------------------------------------


def test_a_fresh_task_has_a_process_of_its_own(pool: Any, one: Any) -> None:
    used = set(pool.broadcast(Task(os.getpid)))
    fresh = [pool.submit(Task(os.getpid).options(fresh=True, retries=0)) for _ in range(6)]
    others = [pool.submit(os.getpid) for _ in range(20)]
    pids = [each.result(60) for each in fresh]
    assert len({*pids}) == 6
    assert used.isdisjoint(pids)
    assert {each.result(60) for each in others}.isdisjoint(pids)
    assert on(pool, one, os.getpid, fresh=True) not in pids


@pytest.mark.slow
def test_no_task_is_lost_or_blamed_where_processes_are_replaced(pool: Any, tmp_path: Path) -> None:
    def note(n: int) -> int:
        with (tmp_path / "starts").open("a") as file:
            file.write(f"{n}\n")
        return n

    tasks = [pool.submit(Task(note, (n,)).options(fresh=n % 10 == 0)) for n in range(60)]
    assert [each.result(120) for each in tasks] == [*range(60)]
    assert sorted((tmp_path / "starts").read_text().split(), key=int) == [str(n) for n in range(60)]
