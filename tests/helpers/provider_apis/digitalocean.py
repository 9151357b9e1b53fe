"""DigitalOcean's API, as digitalocean/openapi 7c1300c4 (2026-08-07) has it, of what modules/digitalocean makes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from provider_apis.server import Answer, Api, Body, Handler, Refused, Request, Routes, serving

# specification/resources/droplets/models/droplet_single_create.yml, firewalls/models/firewall.yml; of VPCs and tags
# their descriptions.
NAMES = {
    "droplets": r"[a-zA-Z0-9]?[a-z0-9A-Z.\-]{0,253}[a-z0-9A-Z]",
    "firewalls": r"[a-zA-Z0-9][a-zA-Z0-9.-]+",
    "vpcs": r"[a-zA-Z0-9.-]+",
    "tags": r"[a-zA-Z0-9:_-]{1,255}",
    "account/keys": r".{1,255}",
}
# specification/resources/tags/models/tags_resource.yml: how much has the tag, by kind of resource.
COUNTS = {each: {"count": 0} for each in ("droplets", "images", "volumes", "volume_snapshots", "databases")}
SIZE = {"slug": "", "price_hourly": 3.39, "price_monthly": 2522.16, "memory": 245760, "vcpus": 20, "disk": 720}


def refused(code: int, message: str) -> Refused:
    return Refused(code, {"id": "unprocessable_entity", "message": message, "request_id": "r"})


def named(api: Api, kind: str, body: Body) -> None:
    """Refuses a name that the cloud does not take, or that another one of a kind has where they are unique."""
    name = body["name"]
    if not re.fullmatch(NAMES[kind], name):
        raise refused(422, f"{kind}: name {name} is invalid")
    if kind in ("firewalls", "vpcs") and any(each["name"] == name for each in api.kind(kind).values()):
        raise refused(409 if kind == "firewalls" else 422, f"{kind}: name {name} is in use")


def existing(api: Api, kind: str, key: str) -> Body:
    if key not in api.kind(kind):
        raise Refused(404, {"id": "not_found", "message": "The resource you were accessing could not be found."})
    return api.kind(kind)[key]


def get(kind: str, wrapped: str) -> Handler:
    return lambda api, request: (200, {wrapped: existing(api, kind, request.parts[0])})


def delete(kind: str) -> Handler:
    def deleted(api: Api, request: Request) -> Answer:
        existing(api, kind, request.parts[0])
        members = (each for each in api.kind("droplets").values() if each["vpc_uuid"] == request.parts[0])
        if kind == "vpcs" and any(members):
            raise Refused(403, {"id": "forbidden", "message": "Can not delete VPC with members"})
        del api.kind(kind)[request.parts[0]]
        return 204, None

    return deleted


def make(api: Api, request: Request) -> Answer:
    """A key, a VPC, a tag."""
    [kind] = request.parts
    body = request.body
    named(api, kind, body)
    wrapped = {"account/keys": "ssh_key", "vpcs": "vpc", "tags": "tag"}[kind]
    if kind == "account/keys":
        if any(each["public_key"] == body["public_key"] for each in api.kind(kind).values()):
            raise refused(422, "SSH Key is already in use on your account")
        key = str(api.number())
        made = {**body, "id": int(key), "fingerprint": "00:11"}
    elif kind == "vpcs":
        key = str(uuid.uuid4())
        urn = f"do:vpc:{key}"
        made = {"description": "", "ip_range": "10.116.0.0/20", **body, "id": key, "urn": urn, "default": False}
        made["created_at"] = "2026-11-25T12:00:00Z"
    else:
        key, made = body["name"], {**body, "resources": {"count": 0, **COUNTS}}
    api.kind(kind)[key] = made
    return 201, {wrapped: made}


def firewall(api: Api, request: Request) -> Answer:
    body = request.body
    for tag in body.get("tags") or []:
        existing(api, "tags", tag)
    key = request.parts[0] if request.parts else str(uuid.uuid4())
    if not request.parts:
        named(api, "firewalls", body)
    for rule in [*(body["inbound_rules"] or []), *(body["outbound_rules"] or [])]:
        # firewalls/models/firewall_rule_base.yml: ports, for icmp always 0.
        rule["ports"] = "0" if rule["protocol"] == "icmp" else rule["ports"]
    made = {**body, "id": key, "status": "succeeded", "created_at": "2026-11-25T12:00:00Z", "pending_changes": []}
    made["droplet_ids"] = body.get("droplet_ids") or []
    api.kind("firewalls")[key] = made
    return (200 if request.parts else 202), {"firewall": made}


def droplet(api: Api, request: Request) -> Answer:
    body = request.body
    named(api, "droplets", body)
    if len(body.get("user_data", "").encode()) > 65536:
        raise refused(422, "user_data is too long (maximum is 64 KiB)")
    for key in body.get("ssh_keys") or []:
        existing(api, "account/keys", str(key))
    vpc = existing(api, "vpcs", body["vpc_uuid"])
    number = api.number()
    at = [
        {"ip_address": f"203.0.113.{number}", "netmask": "255.255.240.0", "gateway": "203.0.113.1", "type": "public"},
        {"ip_address": f"10.116.0.{number}", "netmask": "255.255.240.0", "gateway": "", "type": "private"},
    ]
    for tag in body.get("tags") or []:
        api.kind("tags").setdefault(tag, {"name": tag, "resources": {"count": 0, **COUNTS}})
    made = {
        **{name: SIZE[name] for name in ("memory", "vcpus", "disk")},
        "id": number,
        "name": body["name"],
        "locked": False,
        "status": "active",
        "created_at": "2026-11-25T12:00:00Z",
        "features": ["droplet_agent", "private_networking"],
        "volume_ids": [],
        "networks": {"v4": at, "v6": []},
        "region": {"slug": vpc["region"]},
        "size": {**SIZE, "slug": body["size"]},
        "size_slug": body["size"],
        "image": {"id": 1, "slug": body["image"]},
        "tags": list(body.get("tags") or []),
        "vpc_uuid": body["vpc_uuid"],
    }
    api.kind("droplets")[str(number)] = made
    return 202, {"droplet": {**made, "status": "new", "networks": {"v4": [], "v6": []}, "locked": True}}


def tagged(add: bool) -> Handler:
    def changed(api: Api, request: Request) -> Answer:
        for each in request.body["resources"]:
            tags = existing(api, "droplets", each["resource_id"])["tags"]
            tags.append(request.parts[0]) if add else tags.remove(request.parts[0])
        return 204, None

    return changed


ROUTES: Routes = {
    ("POST", r"/v2/(account/keys|vpcs|tags)"): make,
    ("GET", r"/v2/account/keys/(\d+)"): get("account/keys", "ssh_key"),
    ("DELETE", r"/v2/account/keys/(\d+)"): delete("account/keys"),
    ("GET", r"/v2/vpcs/([^/]+)"): get("vpcs", "vpc"),
    ("DELETE", r"/v2/vpcs/([^/]+)"): delete("vpcs"),
    ("GET", r"/v2/tags/([^/]+)"): get("tags", "tag"),
    ("DELETE", r"/v2/tags/([^/]+)"): delete("tags"),
    ("POST", r"/v2/tags/([^/]+)/resources"): tagged(True),
    ("DELETE", r"/v2/tags/([^/]+)/resources"): tagged(False),
    ("POST", r"/v2/firewalls"): firewall,
    ("GET", r"/v2/firewalls/([^/]+)"): get("firewalls", "firewall"),
    ("PUT", r"/v2/firewalls/([^/]+)"): firewall,
    ("DELETE", r"/v2/firewalls/([^/]+)"): delete("firewalls"),
    ("POST", r"/v2/droplets"): droplet,
    ("GET", r"/v2/droplets/(\d+)"): get("droplets", "droplet"),
    ("DELETE", r"/v2/droplets/(\d+)"): delete("droplets"),
}


@contextmanager
def served() -> Iterator[Api]:
    """Serves DigitalOcean's API."""
    with serving(ROUTES) as (api, address):
        api.environment = {
            "DIGITALOCEAN_API_URL": address,
            "DIGITALOCEAN_TOKEN": "t",
            "DIGITALOCEAN_HTTP_RETRY_MAX": "0",
        }
        yield api
