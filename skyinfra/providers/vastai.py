"""Vast.ai: instances of its marketplace."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from skyinfra.errors import InvalidField
from skyinfra.offers import Query
from skyinfra.providers.base import Request, Selection
from skyinfra.providers.cloud import CloudProvider
from skyinfra.providers.data import Strings, TerraformProvider
from skyinfra.providers.selected import SelectedMachines


class VastAI(CloudProvider):
    """Instances of Vast.ai's marketplace, by Terraform's realnedsanders/vastai and the API key in VASTAI_API_KEY.

    What is shipped tells names and what was once the lowest price: the cheapest machine that is verified and offered
    when a node is made is taken, and kept. `max_hourly_cost`, `vcpus` and `memory_gb` of the pool are asked for then.

    bid: for spot pools, in USD per hour for the whole machine. min_reliability: of a machine, as Vast.ai measures it.
    datacenter: machines of data centers alone. countries: to take, such as ``SE``; empty is all. min_cuda: the oldest
    CUDA that the driver of the machine has to serve, such as ``12.8``. instance_types: to take, as
    `skyinfra offers --provider vastai` lists them. image: one of your own, with python3. wait_seconds: how long an
    instance may take to start.
    """

    kind: ClassVar[str] = "vastai"

    region: Literal["all regions"] = "all regions"
    bid: float | None = Field(default=None, ge=0.001, le=128)
    min_reliability: float = Field(default=0.95, ge=0, le=1)
    datacenter: bool = False
    countries: Strings = ()
    min_cuda: str | None = Field(default=None, pattern=r"^\d+\.\d+$")
    image: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")
    wait_seconds: int = Field(default=1200, ge=1)

    def terraform(self) -> tuple[TerraformProvider, ...]:
        """Returns the provider; its key comes from the environment."""
        return (self.data.terraform_provider(),)

    def check(self, request: Request) -> None:
        """Raises `InvalidField` for a bid that goes with nothing."""
        if request.spot and self.bid is None:
            hint = "Such as sky.VastAI(bid=0.4), in USD per hour for the whole machine."
            raise InvalidField("an interruptible instance needs a bid", field="provider.bid", hint=hint)
        if self.bid is not None and not request.spot:
            hint = "Declare the pool with spot=True, or limit its price with max_hourly_cost."
            raise InvalidField("is for spot pools", field="provider.bid", given=self.bid, hint=hint)
        if self.bid is not None and request.max_hourly_cost is not None and self.bid > request.max_hourly_cost:
            hint = "A bid is what is paid at most."
            raise InvalidField("is above max_hourly_cost", field="provider.bid", given=self.bid, hint=hint)

    def select(self, request: Request) -> Selection:
        """The kind of machine for *request*; which one is chosen when it is made. Raises as that of every cloud."""
        self.refuse_lacking(request)
        self.check(request)
        # What is shipped has a price and size of machines that are long gone.
        found = super().select(replace(request, max_hourly_cost=None, vcpus=None, memory_gb=None))
        asked = {
            "max_price": None if request.spot else request.max_hourly_cost,
            "min_vcpus": request.vcpus,
            "min_memory_gb": request.memory_gb,
        }
        paid = (
            f"a bid of ${self.bid:g}/h for the machine; Vast.ai's Terraform provider calls it one per GPU"
            if request.spot
            else f"{found.price_note}; the cheapest offer at the deploy is taken"
        )
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(found, inputs={**found.inputs, **given}, price_note=paid)

    def _query(self, request: Request, **changes: object) -> Query:
        return super()._query(request, **{**changes, "region": None})

    def inputs(self, selected: SelectedMachines, head: str | None) -> dict[str, object]:
        """Returns the inputs of modules/vastai besides those of every cloud."""
        return {
            "bid": self.bid,
            "min_reliability": self.min_reliability,
            "datacenter": self.datacenter or None,
            "countries": list(self.countries) or None,
            "min_cuda": self.min_cuda,
            "wait_seconds": self.wait_seconds,
        }
