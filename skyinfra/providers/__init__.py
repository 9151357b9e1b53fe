"""One file per provider: what is declared becomes machine types, image and module inputs."""

from __future__ import annotations

from skyinfra.providers.aws import AWS
from skyinfra.providers.base import Provider, Request, Selection
from skyinfra.providers.local import Local
from skyinfra.providers.vastai import VastAI

__all__ = ["AWS", "Local", "Provider", "Request", "Selection", "VastAI"]
