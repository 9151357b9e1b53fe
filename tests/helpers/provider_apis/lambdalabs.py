"""Lambda's API, as elct9620/terraform-provider-lambdalabs 0.8.2 reads it, of what modules/lambda makes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from provider_apis.server import Answer, Api, Refused, Request, Routes, serving

# As an account is made, and with the port of the scheduler, which its owner has opened.
RULES = [
    {"protocol": "tcp", "port_range": [port, port], "source_network": "0.0.0.0/0", "description": ""}
    for port in (22, 8786)
]


def refused(code: int, name: str, message: str) -> Refused:
    return Refused(code, {"error": {"code": name, "message": message, "suggestion": ""}})


def key(api: Api, request: Request) -> Answer:
    # https://docs.lambda.ai/api/cloud: addSSHKey, at most 64 characters.
    if len(request.body["name"]) > 64:
        raise refused(400, "global/invalid-parameters", "name: at most 64 characters")
    if any(each["name"] == request.body["name"] for each in api.kind("ssh-keys").values()):
        raise refused(400, "ssh-keys/key-in-use", "The SSH key name is in use.")
    made = {**request.body, "id": uuid.uuid4().hex}
    api.kind("ssh-keys")[made["id"]] = made
    return 200, {"data": made}


def no_key(api: Api, request: Request) -> Answer:
    del api.kind("ssh-keys")[request.parts[0]]
    return 200, {"data": {}}


def launch(api: Api, request: Request) -> Answer:
    body, number, name = request.body, api.number(), uuid.uuid4().hex
    known = {each["name"] for each in api.kind("ssh-keys").values()}
    # One key, and no more: https://docs.lambda.ai/api/cloud, launchInstance.
    if len(body["ssh_key_names"]) != 1 or not known.issuperset(body["ssh_key_names"]):
        raise refused(400, "global/object-does-not-exist", "Specified SSH key does not exist.")
    api.kind("instances")[name] = {
        "id": name,
        "name": body.get("name"),
        "ip": f"203.0.113.{number}",
        "status": "active",
        "ssh_key_names": body["ssh_key_names"],
        "file_system_names": [],
        "region": {"name": body["region_name"], "description": ""},
        "instance_type": {"name": body["instance_type_name"], "description": "", "price_cents_per_hour": 249},
    }
    return 200, {"data": {"instance_ids": [name]}}


def instance(api: Api, request: Request) -> Answer:
    if request.parts[0] not in api.kind("instances"):
        raise refused(404, "global/object-does-not-exist", "Specified instance does not exist.")
    return 200, {"data": api.kind("instances")[request.parts[0]]}


def terminate(api: Api, request: Request) -> Answer:
    ended = [api.kind("instances").pop(each) for each in request.body["instance_ids"]]
    return 200, {"data": {"terminated_instances": ended}}


ROUTES: Routes = {
    ("GET", r"/firewall-rules"): lambda api, request: (200, {"data": RULES}),
    ("GET", r"/ssh-keys"): lambda api, request: (200, {"data": list(api.kind("ssh-keys").values())}),
    ("POST", r"/ssh-keys"): key,
    ("DELETE", r"/ssh-keys/(\w+)"): no_key,
    ("POST", r"/instance-operations/launch"): launch,
    ("GET", r"/instances/(\w+)"): instance,
    ("POST", r"/instance-operations/terminate"): terminate,
}


@contextmanager
def served() -> Iterator[Api]:
    """Serves Lambda's API."""
    with serving(ROUTES) as (api, address):
        api.environment = {"LAMBDALABS_BASE_URL": address, "LAMBDALABS_API_KEY": "k"}
        yield api
