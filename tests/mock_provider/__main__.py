"""``python -m mock_provider WORLD NAME ...`` serves these providers, over the folder WORLD, until its input ends.

What it prints is for TF_REATTACH_PROVIDERS: Terraform then connects to providers that run, and starts none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from tf.gen import tfplugin_pb2_grpc as rpc

from mock_provider.schema import Schema
from mock_provider.service import Service
from mock_provider.world import World


def main(world: Path, *names: str) -> None:
    reattach = {}
    with tempfile.TemporaryDirectory() as sockets:
        running = []
        for name in names:
            schema = Schema.read(name)
            server = grpc.server(ThreadPoolExecutor(16), options=[("grpc.max_receive_message_length", -1)])
            rpc.add_ProviderServicer_to_server(Service(schema, World(world)), server)
            server.add_insecure_port(f"unix:{sockets}/{name}")
            server.start()
            running.append(server)
            reattach[f"registry.terraform.io/{schema.source}"] = {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                # Terraform is not to end it.
                "Test": True,
                "Addr": {"Network": "unix", "String": f"{sockets}/{name}"},
            }
        print(json.dumps(reattach), flush=True)
        sys.stdin.read()
        for each in running:
            each.stop(0.1).wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
