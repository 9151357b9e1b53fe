"""Deployment → user data: what Terraform hands to the nodes, with placeholders that it fills.

A local node needs no operating system set up, so its user data is the node configuration itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyinfra.compiler import Deployment


@dataclass(frozen=True)
class UserData:
    """The user data of the head and of the other nodes. No secret stands in it."""

    head: str
    worker: str


def user_data(deployment: Deployment) -> UserData:
    """The user data of *deployment*; the same bytes for the same Deployment."""
    return UserData(head=deployment.head.dumps(), worker=deployment.worker.dumps())
