"""Providers: each turns a declaration into machine types, image and module inputs."""

from __future__ import annotations

from skyinfra.providers.aws import AWS, CapacityBlock, CapacityReservation
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.container import Container
from skyinfra.providers.data import Boot, Data, TerraformProvider, Traits, kinds, read, strings
from skyinfra.providers.digitalocean import DigitalOcean
from skyinfra.providers.from_state import Machines, machines_of, provider_of
from skyinfra.providers.lambdalabs import Lambda
from skyinfra.providers.local import Local
from skyinfra.providers.ssh import SSH, Host
from skyinfra.providers.vastai import VastAI
from skyinfra.providers.verda import Verda

__all__ = [
    "AWS",
    "Boot",
    "CapacityBlock",
    "CapacityReservation",
    "CloudProvider",
    "Container",
    "Data",
    "DigitalOcean",
    "Host",
    "Lambda",
    "Local",
    "Machines",
    "Provider",
    "SSH",
    "Request",
    "Selection",
    "TerraformProvider",
    "Traits",
    "VastAI",
    "Verda",
    "kinds",
    "machines_of",
    "provider_of",
    "read",
    "strings",
]
