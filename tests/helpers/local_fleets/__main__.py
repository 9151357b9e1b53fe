"""Starts fleets as forks of this process, which has imported what they need: ``python -P -m local_fleets SOCKET``.

For each request, the environment and the folder of a fleet with its stdin, stdout and stderr, it answers with the
process id and a file descriptor of the process. The import of Dask takes half a second of CPU, for a fleet and for its
fork server.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

from local_fleets import client_fleet

_MOST = 1 << 20


def main() -> None:
    """Serves the socket whose number is the argument until its other end is closed."""
    with socket.socket(fileno=int(sys.argv[1])) as line:
        signal.signal(signal.SIGCHLD, _reap)
        # Forks share what never changes.
        gc.freeze()
        while True:
            message, files, _, _ = socket.recv_fds(line, _MOST, 3)
            if not message:
                return
            # None is reaped before it is known.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
            pid = os.fork()
            if not pid:
                line.close()
                _become(json.loads(message), files)
            known = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            socket.send_fds(line, [str(pid).encode()], [known])
            for file in (known, *files):
                os.close(file)


def _reap(_number: int, _frame: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become(request: dict, files: list[int]) -> None:
    """Is the process of a fleet until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.setsid()
    os.chdir(request["folder"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        client_fleet.main()
        code = 0
    except BaseException:  # noqa: BLE001 - what ends a process is printed
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
