"""An AWS account: moto where it has the operation, answers of the test's own where it has not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import botocore.loaders
import botocore.session
from botocore.awsrequest import AWSResponse
from botocore.validate import validate_parameters
from moto.ec2 import ec2_backends
from terraform_projects.synthesized import synthesized

import skyinfra as sky
from skyinfra.preflight import Line, Report, preflight

REGION = "us-east-1"
ACCOUNT = "123456789012"
# It keeps what it has read, and the description of EC2 is long.
_LOADER = botocore.loaders.create_loader()

Answer = dict[str, Any] | Callable[[dict[str, Any]], dict[str, Any]]


class Cloud:
    """The account. `answer` and `refuse` stand before moto; what they return has the shape that botocore knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inner = botocore.session.Session()
        inner.register_component("data_loader", _LOADER)
        self.session = boto3.Session(region_name=REGION, botocore_session=inner)
        # Before anything is counted or answered.
        self.ec2, self.s3 = (self.session.client(service) for service in ("ec2", "s3"))
        self.asked: Counter[str] = Counter()
        self.quotas: dict[str, float] = {}
        self.session.events.register("provide-client-params", self._count)
        self.answer("service-quotas", "GetServiceQuota", self._quota)
        self.answer("ec2", "DescribeCapacityReservations", {"CapacityReservations": []})
        self.answer("ec2", "DescribeCapacityBlockOfferings", {"CapacityBlockOfferings": []})
        self.images = {"x86_64": self.image("x86_64"), "arm64": self.image("arm64")}
        self.parameter("x86_64")
        self.scores(a=7, b=7, c=7, d=7, f=7)

    def _count(self, model: Any, **_: Any) -> None:
        self.asked[model.name] += 1

    def _quota(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"Quota": {"QuotaCode": request["QuotaCode"], "Value": self.quotas.get(request["QuotaCode"], 100_000)}}

    def answer(self, service: str, operation: str, answer: Answer) -> None:
        """Answers *operation*; a function is given the request."""

        def reply(model: Any, params: dict[str, Any], **_: Any) -> tuple[AWSResponse, dict[str, Any]]:
            body = params["body"]
            made = answer(json.loads(body) if isinstance(body, bytes | str) else body) if callable(answer) else answer
            validate_parameters(made, model.output_shape)
            return AWSResponse("", 200, {}, None), {**made, "ResponseMetadata": {"HTTPStatusCode": 200}}

        self._register(service, operation, reply)

    def refuse(self, service: str, operation: str, code: str, words: str = "no", status: int = 400) -> None:
        """Refuses *operation* with AWS's *code*."""

        def reply(**_: Any) -> tuple[AWSResponse, dict[str, Any]]:
            error = {"Error": {"Code": code, "Message": words}, "ResponseMetadata": {"HTTPStatusCode": status}}
            return AWSResponse("", status, {}, None), error

        self._register(service, operation, reply)

    def _register(self, service: str, operation: str, reply: Callable[..., Any]) -> None:
        event = f"before-call.{service}.{operation}"
        self.session.events.unregister(event, unique_id=event)
        self.session.events.register_first(event, reply, unique_id=event)

    def image(self, architecture: str, gib: int = 65) -> str:
        """An image of that architecture and size."""
        device = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": gib}}
        made = self.ec2.register_image(
            Name=f"base {architecture} {gib}", RootDeviceName="/dev/sda1", BlockDeviceMappings=[device]
        )
        image = ec2_backends[ACCOUNT][REGION].amis[made["ImageId"]]
        image.architecture = architecture  # which moto forgets
        return str(image.id)

    def parameter(self, ami: str) -> None:
        """Every SSM parameter names the image *ami*."""
        value = self.images.get(ami, ami)
        self.answer("ssm", "GetParameter", {"Parameter": {"Name": "p", "Value": value}})

    def spot(self, *prices: tuple[str, str, float]) -> None:
        """The spot prices: machine type, zone, USD per hour."""

        history = [
            {"InstanceType": t, "AvailabilityZone": z, "SpotPrice": str(usd), "Timestamp": datetime.now(UTC)}
            for t, z, usd in prices
        ]
        self.answer("ec2", "DescribeSpotPriceHistory", {"SpotPriceHistory": history})

    def scores(self, **scores: int) -> None:
        """The placement scores by the letter of the zone."""
        ids = {z["ZoneName"][-1]: z["ZoneId"] for z in self.ec2.describe_availability_zones()["AvailabilityZones"]}
        found = [{"Region": REGION, "AvailabilityZoneId": ids[zone], "Score": score} for zone, score in scores.items()]
        self.answer("ec2", "GetSpotPlacementScores", {"SpotPlacementScores": found})

    def run(self, kind: str, count: int, tags: dict[str, str] | None = None, **more: Any) -> None:
        """Starts instances."""
        found = {"skyinfra-test": "yes", **(tags or {})}
        listed = [{"Key": key, "Value": value} for key, value in found.items()]
        self.ec2.run_instances(
            ImageId=self.images["x86_64"],
            InstanceType=kind,
            MinCount=count,
            MaxCount=count,
            TagSpecifications=[{"ResourceType": "instance", "Tags": listed}],
            **more,
        )

    def check(self, *pools: sky.ComputePool, workers: int | None = None) -> Report:
        """Preflight of a stack `s` of these pools."""
        return preflight(synthesized(self.folder, *pools), session=self.session, workers=workers)

    def lines(self, check: str, *pools: sky.ComputePool) -> list[Line]:
        """The lines of one check."""
        return [line for line in self.check(*pools).lines if line.check == check]

    def line(self, check: str, *pools: sky.ComputePool) -> Line:
        """The only line of one check."""
        (found,) = self.lines(check, *pools)
        return found
