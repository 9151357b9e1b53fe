"""Layouts as Slurm and NVIDIA's device plugin for Kubernetes take them."""

from __future__ import annotations

import pytest
import yaml

from skyinfra import mig
from skyinfra.mig import GresDevice


def test_lines_for_what_stands() -> None:
    devices = [
        GresDevice("nvidia_h100_80gb_hbm3", ("/dev/nvidia0",), "GPU-1"),
        GresDevice(
            "3g.40gb", ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22"), "MIG-1"
        ),
        GresDevice(
            "3g.40gb", ("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"), "MIG-2"
        ),
    ]
    text = mig.gres_actual(devices)
    assert "Gres=gpu:nvidia_h100_80gb_hbm3:1,gpu:3g.40gb:2\n" in text
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "AutoDetect=off",
        "Name=gpu Type=nvidia_h100_80gb_hbm3 File=/dev/nvidia0 Flags=nvidia_gpu_env # GPU-1",
        "Name=gpu Type=3g.40gb MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22 "
        "Flags=nvidia_gpu_env # MIG-1",
        "Name=gpu Type=3g.40gb MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap30,/dev/nvidia-caps/nvidia-cap31 "
        "Flags=nvidia_gpu_env # MIG-2",
    ]


def test_lines_for_what_is_declared() -> None:
    text = mig.gres_declared(["h100", "1g.10gb", "1g.10gb"])
    assert "Gres=gpu:h100:1,gpu:1g.10gb:2\n" in text
    assert [line for line in text.splitlines() if not line.startswith("#")] == ["AutoDetect=nvml"]


def test_the_type_of_a_gpu_is_a_part_of_what_slurm_finds() -> None:
    assert mig.gres_type("NVIDIA A100-SXM4-40GB") == "nvidia_a100-sxm4-40gb"
    assert mig.gres_type("H100") in mig.gres_type("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("gpus", "strategy", "offered"),
    [
        ([None, None], "none", ["nvidia.com/gpu: 2"]),
        ([["1g.10gb"] * 7, ["1g.10gb"] * 7], "single", ["nvidia.com/gpu: 14"]),
        ([["1g.10gb"] * 7, None], "mixed", ["nvidia.com/gpu: 1", "nvidia.com/mig-1g.10gb: 7"]),
        ([["3g.40gb", "1g.10gb+me"]], "mixed", ["nvidia.com/mig-3g.40gb: 1", "nvidia.com/mig-1g.10gb.me: 1"]),
        # The strategy `single` is refused by the plugin where a GPU has MIG and no partition.
        ([["1g.10gb"], []], "mixed", ["nvidia.com/mig-1g.10gb: 1"]),
        ([[]], "mixed", ["nothing"]),
    ],
)
def test_the_device_plugin(gpus: list[list[str] | None], strategy: str, offered: list[str]) -> None:
    text = mig.device_plugin(gpus)
    assert yaml.safe_load(text) == {"version": "v1", "flags": {"migStrategy": strategy}}
    assert [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")] == offered
