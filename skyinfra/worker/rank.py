"""The process of a rank: ``python -m skyinfra.worker.rank PIPE``, started by `skyinfra.worker.ranks`.

It receives its `Work` through *PIPE* and reports its end there: a failure at once, then the error. A failed rank stays
until its parent's acknowledgement: its connections to other ranks stay open, so that those fail only after the head
knows which rank failed first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path

from skyinfra.errors.signals import default_in_forks
from skyinfra.protocol.gang import MEETS, Work
from skyinfra.worker import output, secrets, streaming

# Messages of a rank, each with its content; the parent answers a failure.
BEGUN = "begun"  # None: Python has started, and has loaded what is ours
UNABLE = "unable"  # None: its node could not load what the rank was to call
FAILED = "failed"  # the time of the failure by `time.monotonic`, which all processes of a machine share
OUTCOME = "outcome"  # a pickled Outcome
PROGRESS = "progress"  # what `skyinfra.progress` reports: done, total, note

_masker = secrets.Masker(())


def main() -> int:
    """Runs the work that the parent sends; returns the exit code."""
    global _masker
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    output.own_streams()
    pipe = Connection(number)
    # Now: the work may change its variables.
    _masker = secrets.of_process()
    work: Work = pipe.recv()
    pipe.send((BEGUN, None))
    said = _Line(pipe)
    with streaming.sending_output(None, said.progress, lambda: "", _masker):
        return _script(work, said) if work.call is None else _function(work, work.call, said)


class _Line:
    """The pipe to the parent, which any thread of the work may write to. Of a fork it takes progress alone."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._process = os.getpid()

    def send(self, message: tuple[str, object]) -> None:
        """Sends a message, with its content."""
        if os.getpid() == self._process:
            with self._lock:
                self._pipe.send(message)

    def progress(self, kind: str, content: object) -> None:
        """Tells the progress; a parent that is gone hears of nothing."""
        with contextlib.suppress(OSError), self._lock:
            self._pipe.send((kind, content))

    def recv(self) -> object:
        """Returns what the parent answers. Raises EOFError where it does not."""
        if os.getpid() != self._process:
            raise EOFError
        return self._pipe.recv()


def _meet() -> None:
    """Initializes `jax.distributed`, where the pool has `sky.plugins.jax` and this is a rank of JAX."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if MEETS in os.environ and address is not None:
        jax = importlib.import_module("jax")
        processes, process = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(address, num_processes=processes, process_id=process)


def _function(work: Work, call: bytes, pipe: _Line) -> int:
    from skyinfra.node import faults
    from skyinfra.protocol import calls
    from skyinfra.worker import execute, fence, interruption

    signal.signal(signal.SIGTERM, _interrupt)
    header = calls.Header("", work.name, "")
    with interruption.task_scope():
        try:
            _meet()
            try:
                function, args, kwargs = execute.load(header, call)
            except BaseException as error:
                if (failed := faults.of_loading(error)) is None:
                    raise
                print(f"{work.name} cannot be loaded here: {failed.message}", file=sys.stderr)
                pipe.send((UNABLE, None))
                return 1
            with fence.Call():
                value = function(*args, **kwargs)
            result = execute.dump_result(header, value)
        except BaseException as error:  # noqa: BLE001 - a rank may raise anything, sys.exit and Ctrl-C included
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pipe.send((FAILED, time.monotonic()))
            _explain(error, pipe)
            return 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send((OUTCOME, pickle.dumps(calls.Outcome(result=result))))
    return 0


def _interrupt(_number: int, _frame: object) -> None:
    """Raises KeyboardInterrupt once, so that a function can clean up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


default_in_forks(_interrupt)


def _script(work: Work, pipe: _Line) -> int:
    """Runs the program as ``python FILE ARGS`` does, in its folder."""
    path = Path.cwd() / work.name
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *work.args]
    # It stays the main module until the process ends, for what its threads pickle.
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    try:
        _meet()
        code = compile(work.source, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - the user's own program
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        pipe.send((FAILED, time.monotonic()))
        _wait(pipe)
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as above
        pipe.send((FAILED, time.monotonic()))
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(own))
        _explain(error, pipe)
        return 1
    return 0


def _explain(error: BaseException, pipe: _Line) -> None:
    # What `distributed` does as it is imported, which takes ten times as long.
    from tblib import pickling_support

    from skyinfra.protocol import calls, failures
    from skyinfra.worker import shortage

    pickling_support.install()
    # Describing it runs code of the user, for which the parent does not wait for ever.
    kind = type(error).__qualname__
    early = failures.Failure(error=None, text=f"{kind}, whose text and content were not had in time", summary=kind)
    pipe.send((OUTCOME, pickle.dumps(calls.Outcome(failure=early))))
    failure = _masker.failure(failures.of(error, below=__file__, shortage=shortage.of(error)))
    pipe.send((OUTCOME, pickle.dumps(calls.Outcome(failure=failure))))
    _wait(pipe)


def _wait(pipe: _Line) -> None:
    """Waits for the answer to a failure, or for the end of the parent."""
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv()


if __name__ == "__main__":
    sys.exit(main())
