"""What the answers of HCP Terraform's API look like (JSON:API), for the server of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Answer: TypeAlias = tuple[int, bytes]
# A pattern of paths, a method, whether whoever knows the address is let in, and what answers.
Route: TypeAlias = tuple[str, str, bool, Callable[..., Answer]]


def one(
    kind: str,
    id: str,
    attributes: Mapping[str, Any],
    relationships: Mapping[str, Any] | None = None,
    included: list[Any] | None = None,
) -> bytes:
    data = {"id": id, "type": kind, "attributes": attributes, "relationships": relationships or {}}
    return json.dumps({"data": data, **({"included": included} if included else {})}).encode()


def listed(items: list[Any]) -> bytes:
    page = {"current-page": 1, "total-pages": 1, "total-count": len(items), "page-size": 100}
    return json.dumps({"data": items, "meta": {"pagination": page}}).encode()


def errors(code: int, title: str) -> bytes:
    return json.dumps({"errors": [{"status": str(code), "title": title}]}).encode()
