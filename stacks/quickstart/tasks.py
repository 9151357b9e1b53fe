"""One task on every slot of the deployed fleet, and a table of where each ran."""

import os

from rich.console import Console
from rich.table import Table

import skyinfra as sky


@sky.compute
def where_am_i(terms: int) -> tuple[sky.InstanceInfo, str, float]:
    """Pi by Leibniz' series, and the slot it was computed on."""
    pi = 4 * sum((-1) ** k / (2 * k + 1) for k in range(terms))
    return sky.instance_info(), os.environ["CUDA_VISIBLE_DEVICES"], pi


with sky.connect("quickstart", "mig") as pool:
    results = where_am_i(200_000) @ pool

simulated = " (simulated)" if all(info.simulated for info, _, _ in results) else ""
table = Table(title=f"quickstart/mig{simulated}: one task on every slot", title_justify="left", box=None)
for column in ("node", "slot", "profile", "CUDA_VISIBLE_DEVICES", "result"):
    table.add_column(column)
for info, visible, pi in results:
    table.add_row(info.node, str(info.worker), info.profile, visible, f"{pi:.6f}")
console = Console()
console.width = max(console.width, 100)
console.print(table)
