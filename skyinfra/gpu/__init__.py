"""GPUs of a node: what they have, and the way to what is desired, which `skyinfra.desired` says.

What they have: `nvml`, `inventory`, `actual` (by the driver), `record` (by root's record), `exports`, `snapshot`. The
way: `targets` (the places), `hardware`, `partitioner`, `transition`, `holders`, `machine`.
"""
