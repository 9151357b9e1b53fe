"""Azure Resource Manager, as hashicorp/azurerm 5.2.0 reads it, of what modules/azure makes.

Every resource has a path for an id, is made and changed by PUT, and says how far it is in its ``provisioningState``.
Names, references and what must go first: https://learn.microsoft.com/en-us/azure/azure-resource-manager/management/
(resource-name-rules, tag-resources) and .../virtual-network/virtual-networks-faq (2026-11-27).
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hcp.server import certificate

from provider_apis.server import Answer, Api, Body, Refused, Request, Routes, serving

SUBSCRIPTION, TENANT = (f"{each}0000000-0000-0000-0000-000000000000" for each in "12")
NAMES = {
    "resourceGroups": r"[\w.()-]{1,89}[\w()-]",
    "virtualNetworks": r"[A-Za-z0-9][\w.-]{0,62}\w",
    "virtualMachines": r"[A-Za-z0-9][\w.-]{0,62}\w",
}
OPERATIONS = "providers/Microsoft.Compute/locations/eastus/operations"
OTHER_NAMES = r"[A-Za-z0-9]([\w.-]{0,78}\w)?"
# Where a body names another resource.
REFERENCES = ("subnet", "networkSecurityGroup", "publicIPAddress", "availabilitySet")
TRUSTED = {"securityType": "TrustedLaunch", "uefiSettings": {"secureBootEnabled": True, "vTpmEnabled": True}}


def refused(code: int, error: str, message: str) -> Refused:
    return Refused(code, {"error": {"code": error, "message": message}})


def _kind(path: str) -> str:
    return path.split("/")[-2]


def _key(api: Api, path: str) -> str | None:
    """Returns the key of what has the path for an id, which nobody else ever has: a path comes again."""
    return next((key for key, each in api.kind(_kind(path)).items() if each["id"].lower() == path.lower()), None)


def existing(api: Api, path: str) -> Body:
    key = _key(api, path)
    if key is None:
        raise refused(404, "ResourceNotFound", f"The Resource '{path}' was not found.")
    return api.kind(_kind(path))[key]


def below(api: Api, path: str) -> list[Body]:
    """Returns what stands directly below a path: the subnets of a network, the rules of a group."""
    found = [each for kind in list(api.objects) for each in api.kind(kind).values()]
    return [each for each in found if each["id"].lower().rsplit("/", 2)[0] == path.lower()]


def users(api: Api, path: str) -> list[str]:
    """Returns the ids of what names a resource."""
    return [
        each["id"]
        for kinds in api.objects.values()
        for each in kinds.values()
        if each["id"] != path and f'"id": "{path}"' in json.dumps(each["properties"])
    ]


def shown(api: Api, found: Body) -> Body:
    """Returns a resource as it is read, with what stands below it and what uses it."""
    properties, path = dict(found["properties"]), found["id"]
    if _kind(path) == "virtualNetworks":
        properties["subnets"] = [shown(api, each) for each in below(api, path)]
    if _kind(path) == "networkSecurityGroups":
        properties["securityRules"] = below(api, path)
    if _kind(path) == "networkInterfaces":
        for machine in (each for each in users(api, path) if _kind(each) == "virtualMachines"):
            properties["virtualMachine"] = {"id": machine}
    return {**found, "properties": properties}


def _kept(body: Any) -> Any:
    """Returns what Azure keeps of a body: an object without anything in it is as none."""
    if not isinstance(body, dict):
        return [_kept(each) for each in body] if isinstance(body, list) else body
    return {name: _kept(each) for name, each in body.items() if each not in (None, {})}


def _check(api: Api, path: str, body: Body) -> None:
    kind, name = _kind(path), path.rsplit("/", 1)[1]
    if not re.fullmatch(NAMES.get(kind, OTHER_NAMES), name):
        raise refused(400, "InvalidResourceName", f"Resource name {name} is invalid.")
    for tag, value in (body.get("tags") or {}).items():
        if len(body["tags"]) > 50 or not re.fullmatch(r"[^<>%&\\?/]{1,512}", tag) or len(value) > 256:
            raise refused(400, "InvalidTagNameCharacters", f"The tag {tag} is invalid.")
    if kind != "resourceGroups":
        existing(api, path.split("/providers/")[0])
    for field, other in re.findall(r'"(\w+)": \{"id": "([^"]+)"', json.dumps(body)):
        if field in REFERENCES and _key(api, other) is None:
            raise refused(400, "InvalidResourceReference", f"Resource {other} referenced by {path} was not found.")


def put(api: Api, request: Request) -> Answer:
    """Makes or changes a resource: what a body leaves out of an existing one is taken away."""
    path, body = request.parts[0], _kept(request.body)
    _check(api, path, body)
    key = _key(api, path)
    kind, fresh = _kind(path), key is None
    key = key or str(uuid.uuid5(uuid.NAMESPACE_URL, str(api.number())))
    before = {} if fresh else api.kind(kind)[key]["properties"]
    properties = dict(body.get("properties") or {})
    fill = {"networkInterfaces": card, "publicIPAddresses": address, "virtualMachines": machine}.get(kind)
    if fill:
        fill(api, path, properties, before)
    properties |= {"provisioningState": "Succeeded", "resourceGuid": key}
    made = {**body, "id": path, "name": path.rsplit("/", 1)[1], "etag": f'W/"{api.number()}"', "properties": properties}
    if kind == "virtualMachines":
        properties["vmId"] = key
    api.kind(kind)[key] = made
    if fresh and kind in api.failing:
        # It is taken, and asked after elsewhere; what failed is there until somebody ends it.
        properties["provisioningState"] = "Failed"
        where = f"https://{api.environment['ARM_METADATA_HOSTNAME']}/subscriptions/{SUBSCRIPTION}/{OPERATIONS}/{kind}"
        taken = {**made, "properties": {**properties, "provisioningState": "Creating"}}
        return 201, taken, {"Azure-AsyncOperation": f"{where}?api-version=2024-07-01"}
    return 201 if fresh else 200, shown(api, made)


def address(api: Api, path: str, properties: Body, before: Body) -> None:
    properties["ipAddress"] = before.get("ipAddress") or f"203.0.113.{api.number() % 256}"


def card(api: Api, path: str, properties: Body, before: Body) -> None:
    """A network interface: its addresses are free ones of its subnet, of which Azure keeps the first four."""
    properties["macAddress"] = before.get("macAddress") or "00-0D-3A-00-00-00"
    others = json.dumps([each for each in api.kind("networkInterfaces").values() if each["id"] != path])
    for each in properties["ipConfigurations"]:
        each["id"], of = f"{path}/ipConfigurations/{each['name']}", each["properties"]
        network = ipaddress.ip_network(existing(api, of["subnet"]["id"])["properties"]["addressPrefixes"][0])
        inside = ipaddress.ip_address(of["privateIPAddress"])
        if inside not in network or int(inside) - int(network.network_address) < 4 or f'"{inside}"' in others:
            raise refused(400, "PrivateIPAddressInReservedRange", f"{inside} is not free in {network}")
        of |= {"primary": True, "provisioningState": "Succeeded"}


def machine(api: Api, path: str, properties: Body, before: Body) -> None:
    """A virtual machine, with its disk; what is secret is not read again."""
    system, storage = properties["osProfile"], properties["storageProfile"]
    if len(base64.b64decode(system.pop("customData", ""))) > 65535:
        raise refused(400, "InvalidParameter", "Custom data in OSProfile must be in Base64 encoding and at most 64 KB.")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?", system["computerName"]):
        raise refused(400, "InvalidParameter", f"Linux host name {system['computerName']} is invalid.")
    for each in properties["networkProfile"]["networkInterfaces"]:
        if [user for user in users(api, each["id"]) if user != path]:
            raise refused(409, "NicInUse", f"{each['id']} is used by another machine.")
    # Of a machine of the second generation that asks for nothing; the provider sends nothing of secure boot off.
    properties.setdefault("securityProfile", TRUSTED)
    if before:
        storage |= before["storageProfile"]
        return
    disk = f"{path.rsplit('/', 1)[1]}_OsDisk_1_{uuid.uuid5(uuid.NAMESPACE_URL, str(api.number())).hex}"
    disk = f"{path.split('/providers/')[0]}/providers/Microsoft.Compute/disks/{disk}"
    asked = storage["osDisk"]
    body = {"sku": {"name": asked["managedDisk"]["storageAccountType"]}, "id": disk, "name": disk.rsplit("/", 1)[1]}
    body["properties"] = {"diskSizeGB": asked["diskSizeGB"], "diskState": "Attached", "provisioningState": "Succeeded"}
    api.kind("disks")[str(api.number())] = body
    asked |= {"name": body["name"], "osType": "Linux", "managedDisk": {"id": disk, **asked["managedDisk"]}}
    storage["dataDisks"] = []


def operation(api: Api, request: Request) -> Answer:
    code, message = api.failing[request.parts[0]]
    return 200, {"status": "Failed", "error": {"code": code, "message": message}}


def get(api: Api, request: Request) -> Answer:
    return 200, shown(api, existing(api, request.parts[0]))


def delete(api: Api, request: Request) -> Answer:
    path = request.parts[0]
    found = existing(api, path)
    kind = _kind(path)
    if kind == "resourceGroups":
        inside = [each["id"] for kinds in api.objects.values() for each in kinds.values() if each["id"] != path]
        for each in [each for each in inside if each.startswith(f"{path}/")]:
            api.lose(_kind(each), str(_key(api, each)))
    else:
        # The ends of a network are named by what is below it, too.
        named = [each for each in users(api, path) if not each.startswith(f"{path}/")]
        named += [each["id"] for each in below(api, path) if kind == "virtualNetworks"]
        if named:
            raise refused(400, f"InUse{kind}CannotBeDeleted", f"{found['id']} is in use by {', '.join(named)}.")
    api.kind(kind).pop(str(_key(api, path)))
    return 200, None


def evict(api: Api, key: str) -> None:
    """With a machine that Azure takes, whose eviction policy is Delete, goes its disk; its network interface stays."""
    disk = api.gone[key]["properties"].get("storageProfile", {}).get("osDisk", {}).get("managedDisk")
    if disk and (gone := _key(api, disk["id"])):
        del api.kind("disks")[gone]


def listed(api: Api, request: Request) -> Answer:
    """What a resource group holds: of what has a group for a parent."""
    found = [each for kind in list(api.objects) for each in api.kind(kind).values()]
    of = [
        each
        for each in found
        if re.fullmatch(rf"{re.escape(request.parts[0])}/providers/[^/]+/[^/]+/[^/]+", each["id"])
    ]
    return 200, {"value": [{"id": each["id"]} for each in of]}


def token(api: Api, request: Request) -> Answer:
    claims = {"tid": TENANT, "oid": str(uuid.UUID(int=3)), "appid": str(uuid.UUID(int=4)), "scp": ""}
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in ({}, claims, {})]
    return 200, {"access_token": ".".join(parts), "token_type": "Bearer", "expires_in": 3600}


_GROUP = r"/subscriptions/[^/]+/resourceGroups/[^/]+"
_RESOURCE = rf"({_GROUP}(?:/providers/Microsoft\.(?:Network|Compute)/\w+/[^/]+(?:/(?:subnets|securityRules)/[^/]+)?)?)"


@contextmanager
def served() -> Iterator[Api]:
    """Serves Azure's API and its login, over TLS alone, as the provider asks for them."""
    routes: Routes = {
        ("GET", rf"({_GROUP})/resources"): listed,
        ("GET", rf"/subscriptions/[^/]+/{OPERATIONS}/(\w+)"): operation,
        ("POST", rf"/{TENANT}/oauth2/v2.0/token"): token,
        ("PUT", _RESOURCE): put,
        ("GET", _RESOURCE): get,
        ("DELETE", _RESOURCE): delete,
    }
    with tempfile.TemporaryDirectory() as folder:
        pem, key = certificate(Path(folder))
        # Where there is nothing to wait for, the provider need not.
        headers = {"X-Go-Azure-Sdk-Skip-Polling-Delay": "true"}
        with serving(routes, tls=(pem, key), headers=headers) as (api, address):
            host = address.removeprefix("https://")
            routes["GET", "/metadata/endpoints"] = lambda api, request: (200, _endpoints(address))
            api.ends_with = evict
            api.environment = {
                "ARM_METADATA_HOSTNAME": host,
                "ARM_SUBSCRIPTION_ID": SUBSCRIPTION,
                "ARM_TENANT_ID": TENANT,
                "ARM_CLIENT_ID": str(uuid.UUID(int=4)),
                "ARM_CLIENT_SECRET": "s",
                "SSL_CERT_FILE": str(pem),
            }
            yield api


def _endpoints(address: str) -> Body:
    """The cloud that a provider is led to: its login, and the names by which it knows services."""
    return {
        "name": "AzureCloud",
        "resourceManager": address,
        "microsoftGraphResourceId": address,
        "authentication": {
            "loginEndpoint": address,
            "audiences": [address],
            "tenant": "common",
            "identityProvider": "AAD",
        },
        "suffixes": {"storage": "core.example", "keyVaultDns": "vault.example"},
    }
