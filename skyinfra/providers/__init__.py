"""Providers: each turns a declaration into machine types, image and module inputs."""

from __future__ import annotations

from skyinfra.providers.aws import AWS, CapacityBlock, CapacityReservation
from skyinfra.providers.base import Provider, Request, Selection, TerraformProvider, strings
from skyinfra.providers.from_state import Machines, machines_of, provider_of
from skyinfra.providers.local import Local
from skyinfra.providers.vastai import VastAI

__all__ = [
    "AWS",
    "CapacityBlock",
    "CapacityReservation",
    "Local",
    "Machines",
    "Provider",
    "Request",
    "Selection",
    "TerraformProvider",
    "VastAI",
    "machines_of",
    "provider_of",
    "strings",
]
