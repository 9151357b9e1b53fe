"""A moto server that keeps more of EC2's rules: what moto 5 drops or lets through and the AWS module depends on.

It runs in a process of its own: ``python -m moto_ext --port N``. Patched there, and only there:

- RunInstances merges a launch template into the request, and keeps what it asks for: several network cards with their
  interface types, tags of network interfaces, placement group, market options, capacity reservation, volumes.
- It refuses what EC2 refuses: a machine type that the zone does not offer, an unknown image or one of another
  architecture, user data over 16,384 bytes, interfaces a machine type does not have, a public address for several, tag
  keys the metadata service cannot show, a placement group that is not there.
- Auto Scaling groups follow their mixed instances policy: the types in their order, the launch template of each, spot.
- Placement groups exist. The Deep Learning images and their SSM parameters exist.
- An account has quotas and spot scores.
- A test says where capacity or an offer is missing, and what AWS refuses; see `moto_ext.world`.
"""

from __future__ import annotations

from moto_ext import account, answers, details, groups, images, interfaces, launch, placement, world


def install() -> None:
    """Patches moto in this process."""
    for part in (details, world, images, interfaces, placement, launch, groups, account, answers):
        part.install()
