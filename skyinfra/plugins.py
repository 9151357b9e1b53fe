"""Plugins of a pool: the older spelling of layouts, and the environment of frameworks on every node.

``plugins=[sky.plugins.mig(profile="3g.40gb")]`` says the same as ``accelerator="H100/3g.40gb"``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyinfra.accelerators import Accelerator
from skyinfra.errors import InvalidField
from skyinfra.mig import PerGpu
from skyinfra.protocol.gang import DEFAULTS, MEETS


@dataclass(frozen=True)
class Mig:
    """The layout that `mig` declares."""

    profile: str | Mapping[str, int] | Sequence[str] | PerGpu

    def apply(self, accelerator: Accelerator) -> Accelerator:
        """*accelerator* with this layout. Raises `InvalidField` where it has another one already."""
        if accelerator.mig is not None and accelerator.mig != accelerator.with_(mig=self.profile).mig:
            raise InvalidField(
                f"the layout is declared twice: {accelerator} and the mig plugin differ",
                field="plugins",
                given=self.profile,
                hint="Declare it in one place.",
            )
        return accelerator.with_(mig=self.profile)


@dataclass(frozen=True)
class Environment:
    """Settings for a framework: variables of every worker, and a package index. The pool's image stands above them.

    index: asked for packages besides, unless the image declares an index or a wheelhouse. vendor: of the only
    accelerators that it is for; None is any.
    """

    framework: str
    settings: tuple[tuple[str, str], ...] = ()
    index: str | None = None
    vendor: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables, by name."""
        return dict(self.settings)

    def check(self, accelerators: Sequence[Accelerator]) -> None:
        """Raises `InvalidField` where one of *accelerators*, or none at all, is of another vendor."""
        others = [str(each) for each in accelerators if self.vendor not in (None, each.vendor)]
        if others or (self.vendor is not None and not accelerators):
            raise InvalidField(
                f"the plugin {self.framework} is for {_NAMES[self.vendor or '']}",
                field="plugins",
                given=", ".join(others) or "no accelerator",
                hint="Leave the plugin out, or declare a pool of its own for these accelerators.",
            )


_NAMES = {"amd": "AMD GPUs", "aws": "Trainium and Inferentia", "google": "TPUs"}


def mig(profile: str | Mapping[str, int] | Sequence[str] | PerGpu) -> Mig:
    """The layout of the pool's GPUs: a profile that fills each, a list, a mapping, or ``sky.mig.per_gpu(...)``."""
    return Mig(profile)


def torch() -> Environment:
    """Sets PyTorch's environment variables for every task: a process in which NCCL fails or hangs ends.

    Ranks of ``pool.launch(..., framework="torch")`` have that anyway. RCCL of AMD GPUs obeys the same variables.
    """
    return Environment("torch", tuple(DEFAULTS["torch"].items()))


def jax() -> Environment:
    """Initializes `jax.distributed` in every rank of ``pool.launch(..., framework="jax")`` before the rank begins.

    Sets JAX's environment variables for every task besides: memory of the device is taken as it is needed. For TPUs,
    ``Image(pip=["jax[tpu]"])`` is enough.
    """
    return Environment("jax", (*DEFAULTS["jax"].items(), (MEETS, "1")))


def neuron() -> Environment:
    """PyTorch or JAX on AWS Trainium and Inferentia: ``Image(pip=["torch-neuronx", "neuronx-cc"])``, or jax-neuronx.

    Adds the index in which these packages are, and makes torch-xla use NeuronCores. Raises `InvalidField` at the pool
    where its accelerators are others.
    """
    # awsdocs-neuron.readthedocs-hosted.com, "PyTorch Neuron: manual installation"; torch_neuronx reads PJRT_DEVICE.
    return Environment("neuron", (("PJRT_DEVICE", "NEURON"),), "https://pip.repos.neuron.amazonaws.com", "aws")


def torch_xla() -> Environment:
    """PyTorch on TPUs: ``Image(pip=["torch", "torch_xla[tpu]"])``. Makes torch-xla use the TPU, or fail without it.

    Raises `InvalidField` at the pool where its accelerators are others.
    """
    # docs.pytorch.org/xla, "PJRT Runtime": without the variable it may choose the CPU.
    return Environment("torch-xla", (("PJRT_DEVICE", "TPU"),), vendor="google")


def rocm(version: str) -> Environment:
    """PyTorch on AMD GPUs: adds the index of the builds for this ROCm, such as ``"6.4"``.

    Name the build too, ``Image(pip=["torch==2.8.0+rocm6.4"])``: PyPI has builds for CUDA of the same name. Raises
    `InvalidField` for what is no version, and at the pool where its accelerators are others.
    """
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise InvalidField("expected a version of ROCm such as 6.4", field="rocm", given=version)
    # pytorch.org/get-started/locally: the index of each ROCm. The runner sets the variables of the devices.
    return Environment(f"rocm-{version}", (), f"https://download.pytorch.org/whl/rocm{version}", "amd")
