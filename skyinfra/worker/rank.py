"""The process of a rank: ``python -m skyinfra.worker.rank READ WRITE``, started by `skyinfra.worker.ranks`.

It receives its work through the pipe *READ* and reports its end through *WRITE*: a failure at once, then the error. A
failed rank stays until its parent's acknowledgement: its connections to other ranks stay open, so that those fail only
after the head knows which rank failed first.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import cast

from skyinfra.protocol.gang import Work

# Messages of a rank: kind, length of the content, content.
HEADER = struct.Struct("!cQ")
FAILED = b"F"  # the time of the failure by `time.monotonic`, which all processes of a machine share
OUTCOME = b"O"  # a pickled Outcome
WORK = b"W"  # from the parent: a pickled Work
NOD = b"N"  # from the parent


class Pipe:
    """Messages from and to another process."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._writing = threading.Lock()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Sends a message. Raises BrokenPipeError where the other side has ended."""
        with self._writing:
            for data in (HEADER.pack(kind, len(content)), content):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._write, view) :]

    def receive(self) -> tuple[bytes, bytes] | None:
        """Returns the next message; None where the other side has ended."""
        header = self._exactly(HEADER.size)
        if header is None:
            return None
        kind, length = HEADER.unpack(header)
        content = self._exactly(length)
        return None if content is None else (kind, content)

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._read)
        os.close(self._write)

    def _exactly(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            part = os.read(self._read, min(length - len(data), 2**20))
            if not part:
                return None
            data += part
        return bytes(data)


def main() -> int:
    """Runs the work that the parent sends; returns the exit code."""
    read, write = int(sys.argv[1]), int(sys.argv[2])
    for number in (read, write):
        os.set_inheritable(number, False)
    pipe = Pipe(read, write)
    message = pipe.receive()
    if message is None:
        return 1
    work = cast(Work, pickle.loads(message[1]))  # noqa: S301 - the fleet's own, from the parent
    return _script(work, pipe) if work.call is None else _function(work, work.call, pipe)


def _function(work: Work, call: bytes, pipe: Pipe) -> int:
    from skyinfra.protocol import calls
    from skyinfra.worker import execute, interruption

    signal.signal(signal.SIGTERM, _interrupt)
    header = calls.Header("", work.name, "")
    try:
        with interruption.task_scope():
            function, args, kwargs = execute.load(header, call)
            result = execute.dump_result(header, function(*args, **kwargs))
    except BaseException as error:  # noqa: BLE001 - a rank may raise anything, sys.exit and Ctrl-C included
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pipe.send(FAILED, _now())
        _explain(error, pipe)
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.send(OUTCOME, pickle.dumps(calls.Outcome(result=result)))
    return 0


def _interrupt(_number: int, _frame: object) -> None:
    """Raises KeyboardInterrupt once, so that a function can clean up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _script(work: Work, pipe: Pipe) -> int:
    """Runs the program as ``python FILE ARGS`` does, in its folder."""
    path = Path.cwd() / work.name
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *work.args]
    # It stays the main module until the process ends, for what its threads pickle.
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    try:
        exec(compile(work.source, str(path), "exec"), module.__dict__)  # noqa: S102 - the user's own program
    except SystemExit as error:
        if error.code in (None, 0):
            return 0
        pipe.send(FAILED, _now())
        pipe.receive()
        if isinstance(error.code, int):
            return error.code & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as above
        pipe.send(FAILED, _now())
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(own))
        _explain(error, pipe)
        return 1
    return 0


def _explain(error: BaseException, pipe: Pipe) -> None:
    # What `distributed` does as it is imported, which takes ten times as long.
    from tblib import pickling_support

    from skyinfra.protocol import calls, failures

    pickling_support.install()
    pipe.send(OUTCOME, pickle.dumps(calls.Outcome(failure=failures.of(error, below=__file__))))
    pipe.receive()


def _now() -> bytes:
    return repr(time.monotonic()).encode()


if __name__ == "__main__":
    sys.exit(main())
