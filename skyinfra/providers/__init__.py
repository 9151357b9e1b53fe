"""Providers: each turns a declaration into machine types, image and module inputs."""

from __future__ import annotations

from skyinfra.providers.aws import AWS, CapacityBlock, CapacityReservation
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.container import Container
from skyinfra.providers.data import Boot, Data, TerraformProvider, Traits, kinds, read, strings
from skyinfra.providers.from_state import Machines, machines_of, provider_of
from skyinfra.providers.local import Local
from skyinfra.providers.runpod import RunPod
from skyinfra.providers.ssh import SSH, Host
from skyinfra.providers.vastai import VastAI

__all__ = [
    "AWS",
    "Boot",
    "CapacityBlock",
    "CapacityReservation",
    "CloudProvider",
    "Container",
    "Data",
    "Host",
    "Local",
    "Machines",
    "Provider",
    "Request",
    "RunPod",
    "SSH",
    "Selection",
    "TerraformProvider",
    "Traits",
    "VastAI",
    "kinds",
    "machines_of",
    "provider_of",
    "read",
    "strings",
]
