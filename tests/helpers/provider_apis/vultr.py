"""Vultr's API, as the client in vultr/terraform-provider-vultr f670e5bf (2026-07-21; govultr 3.32.0) reads it, of what
modules/vultr makes."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from provider_apis.server import Answer, Api, Body, Refused, Request, Routes, serving

WRAPPED = {"ssh-keys": "ssh_key", "vpcs": "vpc", "firewalls": "firewall_group", "instances": "instance"}
# By which the provider knows that something is gone.
GONE = {
    "ssh-keys": "Invalid SSH Key ID",
    "vpcs": "Invalid VPC ID",
    "firewalls": "Firewall group ID not found",
    "instances": "instance not found",
}
FILLED = {"ssh-keys": {}, "vpcs": {"v4_subnet": "10.1.96.0", "v4_subnet_mask": 20}, "firewalls": {"rule_count": 0}}
FIXED = {
    **{"os": "Ubuntu 24.04 LTS x64", "ram": 184320, "disk": 1200, "vcpu_count": 16, "app_id": 0, "image_id": ""},
    **{"status": "active", "power_status": "running", "server_status": "ok", "allowed_bandwidth": 10},
    **{"netmask_v4": "255.255.254.0", "gateway_v4": "203.0.113.1", "v6_network": "", "v6_main_ip": "", "kvm": ""},
    **{"v6_network_size": 0, "snapshot_id": "", "features": [], "user_scheme": "root", "default_password": "x"},
}


def refused(code: int, message: str) -> Refused:
    return Refused(code, {"error": message, "status": code})


def existing(api: Api, kind: str, key: str) -> Body:
    if key not in api.kind(kind):
        raise refused(404, GONE[kind])
    return api.kind(kind)[key]


def make(api: Api, request: Request) -> Answer:
    [kind] = request.parts
    key = str(uuid.uuid4())
    given = {name: each for name, each in request.body.items() if each not in ("", 0)}
    made = {**FILLED[kind], **given, "id": key, "date_created": "2026-11-25T12:00:00+00:00"}
    api.kind(kind)[key] = made
    return 201, {WRAPPED[kind]: made}


def launch(api: Api, request: Request) -> Answer:
    body, number, key = request.body, api.number(), str(uuid.uuid4())
    base64.b64decode(body["user_data"], validate=True)
    for each in body["sshkey_id"]:
        existing(api, "ssh-keys", each)
    for each in body["attach_vpc"]:
        existing(api, "vpcs", each)
    existing(api, "firewalls", body["firewall_group_id"])
    names = ("region", "plan", "os_id", "label", "hostname", "firewall_group_id")
    made = {**FIXED, **{name: body[name] for name in names}, "id": key, "tags": body.get("tags") or []}
    made |= {"main_ip": f"203.0.113.{number}", "internal_ip": f"10.1.96.{number}", "vpcs": body["attach_vpc"]}
    api.kind("instances")[key] = {**made, "date_created": "2026-11-25T12:00:00+00:00"}
    return 202, {"instance": {**api.kind("instances")[key], "status": "pending", "main_ip": "0.0.0.0"}}


def get(api: Api, request: Request) -> Answer:
    kind, key = request.parts
    return 200, {WRAPPED[kind]: existing(api, kind, key)}


def change(api: Api, request: Request) -> Answer:
    found = existing(api, "instances", request.parts[0])
    for each in request.body.get("detach_vpc") or []:
        found["vpcs"].remove(each)
    found |= {name: each for name, each in request.body.items() if name in found and each not in (None, "", 0)}
    return 202, {"instance": found}


def delete(api: Api, request: Request) -> Answer:
    kind, key = request.parts
    existing(api, kind, key)
    if kind == "vpcs" and any(key in each["vpcs"] for each in api.kind("instances").values()):
        raise refused(400, "The following servers are attached to this VPC network")
    api.lose(kind, key)
    return 204, None


def ends_with(api: Api, key: str) -> None:
    """The rules of a firewall group."""
    api.kind("rules").pop(key, None)


def attached(api: Api, request: Request) -> Answer:
    """The networks of an instance."""
    key, how = request.parts
    found = existing(api, "instances", key)["vpcs"] if how == "vpcs" else []
    addresses = [{"id": each, "mac_address": "00:00", "ip_address": "10.1.96.3"} for each in found]
    return 200, {"vpcs": addresses, "meta": {"total": len(found), "links": {"next": "", "prev": ""}}}


def rule(api: Api, request: Request) -> Answer:
    group, body = request.parts[0], request.body
    existing(api, "firewalls", group)
    number = api.number()
    made = {"source": "", "notes": "", **body, "id": number, "action": "accept"}
    api.kind("rules").setdefault(group, {})[str(number)] = made
    return 201, {"firewall_rule": made}


def one_rule(api: Api, request: Request) -> Answer:
    group, number = request.parts
    if number not in api.kind("rules").get(group, {}):
        raise refused(404, "Firewall rule ID not found")
    return 200, {"firewall_rule": api.kind("rules")[group][number]}


def no_rule(api: Api, request: Request) -> Answer:
    one_rule(api, request)
    del api.kind("rules")[request.parts[0]][request.parts[1]]
    return 204, None


ROUTES: Routes = {
    ("POST", r"/v2/(ssh-keys|vpcs|firewalls)"): make,
    ("POST", r"/v2/instances"): launch,
    ("GET", r"/v2/(ssh-keys|vpcs|firewalls|instances)/([^/]+)"): get,
    ("PATCH", r"/v2/instances/([^/]+)"): change,
    ("DELETE", r"/v2/(ssh-keys|vpcs|firewalls|instances)/([^/]+)"): delete,
    ("GET", r"/v2/instances/[^/]+/backup-schedule"): lambda api, request: (
        200,
        {"backup_schedule": {"enabled": False}},
    ),
    ("GET", r"/v2/instances/([^/]+)/(vpcs|vpc2)"): attached,
    ("POST", r"/v2/firewalls/([^/]+)/rules"): rule,
    ("GET", r"/v2/firewalls/([^/]+)/rules/(\d+)"): one_rule,
    ("DELETE", r"/v2/firewalls/([^/]+)/rules/(\d+)"): no_rule,
}


@contextmanager
def served() -> Iterator[Api]:
    """Serves Vultr's API. The provider has no way to ask another address than Vultr's: a build of it that reads this
    variable is needed."""
    with serving(ROUTES) as (api, address):
        api.ends_with = ends_with
        api.environment = {"VULTR_API_URL": address, "VULTR_API_KEY": "k"}
        yield api
