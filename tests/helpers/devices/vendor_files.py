"""Made-up device files, driver files and tools of AMD, AWS and Intel, below a folder that stands for a machine's root.

Sources, read 2026-11-24:
- AMD: drivers/gpu/drm/amd/pm/amdgpu_pm.c and amdkfd/kfd_topology.c of Linux 6.x; `used_memory` as ROCm's
  device-metrics-exporter reads it, which AMD's own driver has and Linux has not.
- AWS: tools/neuron-sys-tools of aws-neuron-sdk at 81ce03ae (2026-08-21), "Neuron Monitor User Guide"; modes of files as
  in neuron_cdev.c of aws-neuron-driver.
- Intel: docs.habana.ai, "System Management Interface Tool"; a row of values as hl-smi 1.18.0 prints it for an HL-205.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30
# A report for the two cores of a process, and the memory of a Trainium1 device.
NEURON_REPORT = {
    "neuron_runtime_data": [
        {
            "pid": 113985,
            "address": "",
            "neuron_runtime_tag": "my_app_1",
            "error": "",
            "report": {
                "neuroncore_counters": {
                    "period": 1.000113182,
                    "neuroncores_in_use": {
                        "2": {"neuroncore_utilization": 42.0, "flops": 1234567891011},
                        "3": {"neuroncore_utilization": 43.0, "flops": 1234567891021},
                    },
                    "error": "",
                },
                "memory_used": {
                    "period": 1.00001,
                    "neuron_runtime_used_bytes": {
                        "host": 6997643264,
                        "neuron_device": 12519788544,
                        "usage_breakdown": {
                            "host": {"application_memory": 6996594688, "constants": 0, "dma_buffers": 1048576},
                            "neuroncore_memory_usage": {
                                core: {
                                    "constants": 193986816,
                                    "model_code": 176285056,
                                    "model_shared_scratchpad": 0,
                                    "runtime_memory": 0,
                                    "tensors": 20971520,
                                }
                                for core in ("2", "3")
                            },
                        },
                    },
                    "loaded_models": [],
                    "error": "",
                },
            },
        }
    ],
    "system_data": {},
    "instance_info": {"instance_type": "trn1.32xlarge", "error": ""},
    "neuron_hardware_info": {
        "neuron_device_type": "trainium",
        "neuron_device_version": "v2",
        "neuroncore_version": "v2",
        "neuron_device_count": 16,
        "neuron_device_memory_size": 34359738368,
        "neuroncore_per_device_count": 2,
        "logical_neuroncore_config": 1,
        "error": "",
    },
}
NEURON_USED = 2 * (193986816 + 176285056 + 20971520)


def write(root: Path, files: Mapping[str, object]) -> None:
    """Writes *files*, by their paths below *root*."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def program(file: Path, script: str) -> None:
    """Makes *file* a program of the shell."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def amd_gpu(root: Path, bus: int, **figures: object) -> Path:
    """An AMD GPU in sysfs. *figures*: the content of files of its PCI device, ``__`` for the folder hwmon/hwmon3."""
    files = {name.replace("__", "hwmon/hwmon3/"): value for name, value in figures.items()}
    device = root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
    write(device, {"vendor": "0x1002", **files})
    return device


def kfd(root: Path, *nodes: tuple[int, int], size: int = 192 * GIB, used: Sequence[int] = ()) -> None:
    """The KFD topology: two CPU sockets, then *nodes*, each of (bus, partition). *used*: memory in use, by node."""
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    for socket in range(2):
        write(folder, {f"{socket}/properties": "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0"})
    for number, (bus, partition) in enumerate(nodes):
        text = f"cpu_cores_count 0\nsimd_count 1216\nlocation_id {bus << 8 | partition}\ndomain 0\ndrm_render_minor 128"
        node = folder / str(2 + number)
        write(node, {"properties": text, "mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {size}\nflags 0"})
        if number < len(used):
            write(node, {"mem_banks/0/used_memory": used[number]})


def neuron_monitor(folder: Path, report: object = NEURON_REPORT) -> None:
    """A neuron-monitor that wants its configuration, and reports again and again until it is ended."""
    text = report if isinstance(report, str) else json.dumps(report)
    script = f"""[ "$1" = -c ] && grep -q neuroncore_counters "$2" || exit 2
while :; do cat <<'END'
{text}
END
sleep 0.1; done"""
    program(folder / "neuron-monitor", script)


def hl_smi(folder: Path, *rows: str) -> None:
    """An hl-smi that prints *rows* of module, utilization, memory used, memory, temperature and power."""
    lines = "\n".join(f'  echo "{row}"' for row in rows)
    script = f"""case "$*" in
"-L") echo "AIP 0" ;;
"-v") echo "hl-smi version hl-1.18.0-fw-53.1.1.1 (Oct 09 2024 - 20:09:06)" ;;
"-Q module_id,utilization.aip,memory.used,memory.total,temperature.aip,power.draw -f csv,noheader,nounits")
  [ -d "$HABANA_LOGS" ] || exit 1
{lines} ;;
*) exit 2 ;;
esac"""
    program(folder / "hl-smi", script)
