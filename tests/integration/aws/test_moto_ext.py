"""What the tests' AWS does that moto does not."""

from __future__ import annotations

import re
import urllib.request

import pytest
from moto_aws.cloud import Cloud


@pytest.mark.slow
@pytest.mark.xdist_group("aws")
def test_a_request_that_is_sent_again_is_done_once(cloud: Cloud) -> None:
    def create(number: str) -> str:
        credential = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/ec2/aws4_request"
        headers = {"Authorization": credential, "amz-sdk-invocation-id": number}
        body = b"Action=CreateVpc&CidrBlock=10.0.0.0/16&Version=2016-11-15"
        with urllib.request.urlopen(urllib.request.Request(cloud.url, body, headers)) as answer:
            [found] = re.findall(r"<vpcId>(.*?)</vpcId>", answer.read().decode())
        return str(found)

    before = len(cloud.client("ec2").describe_vpcs()["Vpcs"])
    first, again, another = create("one"), create("one"), create("two")
    assert first == again != another
    assert len(cloud.client("ec2").describe_vpcs()["Vpcs"]) == before + 2
