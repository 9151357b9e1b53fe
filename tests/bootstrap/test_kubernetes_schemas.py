"""The pods that `skyinfra render --format kubernetes` writes, against the schemas of Kubernetes."""

from __future__ import annotations

import kubernetes_validate
import pytest
from clusters.pools import POOLS, declared, documents, stateful_set


@pytest.mark.parametrize("version", ["1.25", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", POOLS)
def test_what_is_rendered_fits_the_schemas_of_kubernetes(name: str, version: str) -> None:
    found = documents(declared(**POOLS[name]))
    assert [each["kind"] for each in found] == ["Service", "Service", "StatefulSet"]
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    wrong = stateful_set(declared(**POOLS["cpu"]))
    wrong["spec"]["template"]["spec"]["terminationGraceSeconds"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
