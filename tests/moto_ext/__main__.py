"""The server. Prints its port on a line of its own once it listens; ends with its standard input."""

from __future__ import annotations

import os
import sys

# Read when moto is imported: AWS's own policies exist.
os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"

from moto.server import ThreadedMotoServer

import moto_ext

if __name__ == "__main__":
    moto_ext.install()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()
