"""The nodes of a fleet as the tasks of a Slurm job, or as pods of Kubernetes, whose machines stand already.

The pool is read from what its stack hands to Terraform, so that any declaration serves whose fields they can carry.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from skyinfra import mig
from skyinfra.bootstrap import files, places
from skyinfra.errors import NotSupported
from skyinfra.protocol.manifest import ManifestSlot
from skyinfra.protocol.nodeconfig import HEAD_PLACEHOLDER, NODE_PLACEHOLDER, NodeConfig

Cluster = Literal["sbatch", "kubernetes"]
CLUSTERS: tuple[Cluster, ...] = get_args(Cluster)

_TEMPLATES: dict[Cluster, str] = {"sbatch": "sbatch.sh.j2", "kubernetes": "kubernetes.yaml.j2"}
_SUFFIXES: dict[Cluster, str] = {"sbatch": "sbatch", "kubernetes": "yaml"}
_PROVIDERS: dict[Cluster, str] = {"sbatch": "slurm", "kubernetes": "kubernetes"}
_SCHEDULERS: dict[Cluster, str] = {"sbatch": "0.0.0.0:0", "kubernetes": "0.0.0.0:8786"}
_SECRETS: dict[Cluster, str] = {"sbatch": "secret", "kubernetes": "/etc/skyinfra/secret"}
_PORT = 8786
# A program that prints the requirements with hashes that the wheel in its first argument brings, where it brings any.
_NEEDS = (
    "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); "
    'names = [name for name in wheel.namelist() if name.endswith(".dist-info/requirements.txt")]; '
    'sys.stdout.buffer.write(b"".join(map(wheel.read, names)))'
)
# Of pods, whose deletion waits for that and a little more.
_GRACE_S = 45
# In place of what the script of a job finds out.
_UNKNOWN_S = 9_999.0
_FOLDER = "/var/lib/skyinfra"
# Names of pods are a label of them, with a hash.
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Declared:
    """A pool, as far as a cluster can carry it.

    node: the configuration of its workers. python: the minor version of Python, such as ``3.11``. runner: what the
    declaration installs as runner; None is the wheel of this skyinfra. vcpus, memory_gb, disk_gb: minima of one node.
    """

    stack: str
    pool: str
    nodes: int
    node: NodeConfig
    slots: tuple[ManifestSlot, ...]
    python: str
    runner: str | None = None
    vcpus: int | None = None
    memory_gb: float | None = None
    disk_gb: int | None = None

    @property
    def name(self) -> str:
        """The name of the fleet in files and clusters."""
        return f"{self.stack}-{self.pool}"


def declared(stack: str, inputs: Mapping[str, Any], described: Mapping[str, Any], *, python: str) -> Declared:
    """Returns the pool with these *inputs* of its module, *described* in its stack. Raises `NotSupported`.

    *python*: where none is declared.
    """
    text = str(inputs["user_data_worker"])
    steps: list[dict[str, Any]] = []
    if text.startswith("#"):
        found = files.written(text)
        text, steps = found.get(places.CONFIG) or found[places.SLICE], json.loads(found[places.STEPS])["steps"]
    arguments = {step["operation"]: step["arguments"] for step in steps}
    node = NodeConfig.read(json.loads(text.replace(HEAD_PLACEHOLDER, _SCHEDULERS["kubernetes"])))
    _refuse(node, arguments)
    own = (arguments.get("runner", {}).get("requirements") or [None])[0]
    # A job has pip hold the wheel to its hash, which a node does itself.
    pinned = (a for step in steps if own and (a := step["arguments"]).get("path") == own)
    own = next((f"{a['url']}#sha256={a['sha256']}" for a in pinned), own)
    slots = tuple(ManifestSlot(**slot) for slot in inputs["slots"])
    return Declared(
        stack=stack,
        pool=node.pool,
        nodes=inputs["node_count"],
        node=node,
        slots=slots,
        python=arguments.get("python", {}).get("version") or python,
        runner=own,
        vcpus=described.get("vcpus"),
        memory_gb=described.get("memory_gb"),
        disk_gb=inputs.get("disk_gb") or None,
    )


def render(pool: Declared, cluster: Cluster, *, wheel: str | None) -> tuple[str, str]:
    """The name of the file, and its text. *wheel*: the name of the runner's file beside it. Raises `NotSupported`."""
    file = f"{pool.name}.{_SUFFIXES[cluster]}"
    node = pool.node
    accelerated = node.accelerator is not None and not node.simulate
    values = {
        "fleet": f"{pool.stack}/{pool.pool}",
        "stack": pool.stack,
        "pool": pool.pool,
        "name": pool.name,
        "file": file,
        "nodes": pool.nodes,
        # The name of a command has no patch version.
        "python": ".".join(pool.python.split(".")[:2]),
        "wheel": wheel,
        "requirement": pool.runner,
        "needs": _NEEDS,
        "sources": node.packages.environment(bundle="") if node.packages else {},
        "disk_gb": pool.disk_gb,
        "memory_gb": math.ceil(pool.memory_gb) if pool.memory_gb else None,
        "cpus": max(pool.vcpus or 0, node.cpu_slots) or None,
        "gpus": len(pool.slots) if accelerated else None,
        "gres": _gres(pool.slots) if accelerated else None,
        "simulated": json.dumps(node.simulate),
        "slots": json.dumps([{k: v for k, v in vars(slot).items() if v is not None} for slot in pool.slots]),
        "head": _node(pool, cluster, head=True),
        "worker": _node(pool, cluster, head=False),
    }
    if cluster == "kubernetes":
        values |= _of_kubernetes(pool, wheel, values)
    return file, files.template(_TEMPLATES[cluster]).render(values)


def _refuse(node: NodeConfig, arguments: Mapping[str, Any]) -> None:
    """Raises `NotSupported` for what needs root, or what neither Slurm nor Kubernetes has a request for."""
    for operation, field, what in (("mount", "volumes", "disks"), ("bucket", "mounts", "buckets")):
        if operation in arguments:
            raise NotSupported(
                f"{what} are mounted by root, which a job and a pod are not",
                field=field,
                hint=f"Leave {field} out, and use a folder that the cluster has.",
            )
    if "packages" in arguments:
        raise NotSupported(
            "packages of the system are installed by root, which a job and a pod are not",
            field="image.apt",
            given=", ".join(arguments["packages"]["apt"]),
            hint="Leave image.apt out, and have them on the nodes of the cluster, or in an image of your own.",
        )
    if node.packages is not None and node.packages.ca_certificate is not None:
        raise NotSupported(
            "certificates are not carried to the nodes of a cluster",
            field="image.ca_certificate",
            hint="Leave it out, and set PIP_CERT on the cluster.",
        )
    if node.max_nodes:
        raise NotSupported(
            "a job and a set of pods have as many nodes as they began with",
            field="nodes",
            given=f"Range({node.min_nodes}, {node.max_nodes})",
            hint="Declare a number of nodes.",
        )
    if node.follow is not None:
        raise NotSupported(
            "a cluster gives a node its GPUs, and the node partitions none",
            field="layout",
            hint="Leave layout= out.",
        )
    accelerator = node.accelerator
    if accelerator is not None and accelerator.vendor != "nvidia" and not node.simulate:
        raise NotSupported(
            "NVIDIA's GPUs alone are asked for from Slurm and Kubernetes",
            field="accelerator",
            given=accelerator.name,
            hint="Declare an NVIDIA GPU, or a pool of CPU nodes.",
        )


def _node(pool: Declared, cluster: Cluster, *, head: bool) -> str:
    """Returns the node configuration, for a here-document with the variables ``name``, ``head`` and ``grace``."""
    config = replace(
        pool.node,
        node=NODE_PLACEHOLDER,
        provider=_PROVIDERS[cluster],
        head=head,
        scheduler=_SCHEDULERS[cluster] if head else HEAD_PLACEHOLDER,
        secret_file=_SECRETS[cluster],
        folder=None,
        given=True,
        grace_seconds=_UNKNOWN_S if cluster == "sbatch" else _GRACE_S,
    )
    text = files.heredoc(config.dumps())
    text = text.replace(NODE_PLACEHOLDER, "$name").replace(HEAD_PLACEHOLDER, "$head")
    return text.replace(f'"grace_seconds":{_UNKNOWN_S}', '"grace_seconds":$grace')


def _of_kubernetes(pool: Declared, wheel: str | None, values: Mapping[str, Any]) -> dict[str, Any]:
    # A service is named as a host of DNS (RFC 1035): a letter first, and no dash last.
    name = pool.name.lower().replace("_", "-").rstrip("-")
    name = name if name[0].isalpha() else f"s{name}"
    if len(name) > _LONGEST_NAME:
        raise NotSupported(
            f"names of pods are made of the names of stack and pool, {_LONGEST_NAME} characters at most",
            field="name",
            given=pool.name,
            hint="Choose a shorter name of the stack or the pool.",
        )
    members = [
        {
            "name": f"{pool.pool}-{number}",
            "id": f"{name}-{number}",
            "address": f"{name}-{number}.{name}-nodes",
            "head": number == 0,
        }
        for number in range(pool.nodes)
    ]
    requests = {
        "cpu": str(values["cpus"]) if values["cpus"] else None,
        "memory": f"{values['memory_gb']}Gi" if values["memory_gb"] else None,
        "ephemeral-storage": f"{pool.disk_gb}Gi" if pool.disk_gb else None,
    }
    return {
        "name": name,
        "folder": _FOLDER,
        "port": _PORT,
        "grace": _GRACE_S,
        "image": f"python:{pool.python}-slim",
        "members": json.dumps(members),
        "source": pool.runner or f"/opt/skyinfra/{wheel}",
        "requests": {resource: amount for resource, amount in requests.items() if amount},
        "gpus": (gpus := _resources(pool.slots) if values["gpus"] else {}),
        "kinds": len(gpus),
    }


def _gres(slots: tuple[ManifestSlot, ...]) -> str | None:
    """Returns the devices of a node by their types, as `skyinfra mig export --format gres` names them.

    None where all slots are of one kind, whose number says it whatever the cluster calls them, and for whole GPUs.
    """
    types = [mig.gpu_profile(slot.profile) for slot in slots if slot.profile]
    return mig.gres_counts(types) if len({*types}) > 1 and len(types) == len(slots) else None


def _resources(slots: tuple[ManifestSlot, ...]) -> dict[str, int]:
    """The requests of a pod for what its slots stand on, by the names of NVIDIA's device plugin (strategy "mixed").

    Raises NotSupported for compute instances.
    """
    names = (mig.mig_resource(slot.profile) if slot.profile else "nvidia.com/gpu" for slot in slots)
    return dict(Counter(names))
