"""Oracle Cloud's Core Services API (20160918), as the client in oracle/terraform-provider-oci 8.28.0 reads it, of what
modules/oci makes. The region is that of the provider block: this server stands for one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from provider_apis.server import Answer, Api, Body, Handler, Refused, Request, Routes, serving

BASE = "/20160918"
TENANCY = "ocid1.tenancy.oc1..aaaa"
# Tag defaults of every tenancy, which nobody declared.
MADE = {
    "timeCreated": "2026-11-25T12:00:00.000Z",
    # Maps are there where they are empty: the older SDK plans an update of each one that is not.
    **{each: {} for each in ("extendedMetadata", "securityAttributes", "systemTags")},
    "definedTags": {"Oracle-Tags": {"CreatedBy": "me", "CreatedOn": "2026-11-25"}},
}
STATES = {"instances": "RUNNING"}
# The rule by which everybody reaches port 22 of what stands in a network that was just made.
SSH = {
    "isStateless": False,
    "protocol": "6",
    "source": "0.0.0.0/0",
    "sourceType": "CIDR_BLOCK",
    "tcpOptions": {"destinationPortRange": {"min": 22, "max": 22}},
}


def refused(code: int, error: str, message: str) -> Refused:
    return Refused(code, {"code": error, "message": message})


def existing(api: Api, kind: str, key: str) -> Body:
    if key in api.gone:
        # What is ended can be asked for, for hours.
        return {**api.gone[key], "lifecycleState": "TERMINATED"}
    if key not in api.kind(kind):
        raise refused(404, "NotAuthorizedOrNotFound", "Authorization failed or requested resource not found.")
    return api.kind(kind)[key]


def stored(api: Api, kind: str, body: Body, **more: object) -> Body:
    """Makes one of a kind, with what the API fills in."""
    key = f"ocid1.{kind.lower()}.oc1.phx.{api.number()}"
    state = STATES.get(kind, "AVAILABLE")
    made = {
        "freeformTags": {},
        "displayName": f"{kind}-{key}",
        **body,
        **MADE,
        **more,
        "id": key,
        "lifecycleState": state,
    }
    if len(made["displayName"]) > 255:
        raise refused(400, "InvalidParameter", "displayName must be between 1 and 255 characters")
    api.kind(kind)[key] = made
    return made


def make(api: Api, request: Request) -> Answer:
    kind = request.parts[0]
    if "vcnId" in request.body:
        existing(api, "vcns", request.body["vcnId"])
    made = stored(api, kind, request.body)
    if kind == "internetGateways":
        made["isEnabled"] = made.get("isEnabled", True)
    if kind == "vcns":
        of = {"vcnId": made["id"], "compartmentId": made["compartmentId"]}
        made["cidrBlock"] = made["cidrBlocks"][0]
        made["defaultRouteTableId"] = stored(api, "routeTables", {"routeRules": []}, **of)["id"]
        rules = {"ingressSecurityRules": [SSH], "egressSecurityRules": []}
        made["defaultSecurityListId"] = stored(api, "securityLists", rules, **of)["id"]
        made["defaultDhcpOptionsId"] = "ocid1.dhcpoptions.oc1.phx.1"
    if kind == "subnets":
        vcn = existing(api, "vcns", made["vcnId"])
        made["routeTableId"], made["securityListIds"] = vcn["defaultRouteTableId"], [vcn["defaultSecurityListId"]]
        made |= {
            "dhcpOptionsId": vcn["defaultDhcpOptionsId"],
            "virtualRouterIp": "10.0.0.1",
            "virtualRouterMac": "00:00",
        }
        made |= {"prohibitPublicIpOnVnic": False, "prohibitInternetIngress": False}
    return 200, made


def get(api: Api, request: Request) -> Answer:
    return 200, existing(api, request.parts[0], request.parts[1])


def put(api: Api, request: Request) -> Answer:
    found = existing(api, request.parts[0], request.parts[1])
    found |= request.body
    return 200, found


def delete(api: Api, request: Request) -> Answer:
    kind, key = request.parts
    existing(api, kind, key)
    children = [
        each["id"]
        for kinds in api.objects.values()
        for each in kinds.values()
        if key in (each.get("vcnId"), each.get("subnetId"))
    ]
    own = {api.kind(kind)[key].get(each) for each in ("defaultRouteTableId", "defaultSecurityListId")}
    if set(children) - own:
        raise refused(409, "Conflict", f"{key} is in use by {children}")
    for each in own & {*api.kind("routeTables"), *api.kind("securityLists")}:
        api.lose("routeTables" if each in api.kind("routeTables") else "securityLists", each)
    api.lose(kind, key)
    return 204, None


def ends_with(api: Api, key: str) -> None:
    """The card and the boot volume of an instance, the rules of a group."""
    for vnic in [each for each, found in api.kind("vnics").items() if found["instanceId"] == key]:
        del api.kind("vnics")[vnic]
    api.kind("bootVolumes").pop(api.gone[key].get("bootVolumeId"), None)
    api.kind("rules").pop(key, None)


def launch(api: Api, request: Request) -> Answer:
    body = request.body
    vnic, source, number = body.pop("createVnicDetails"), body.pop("sourceDetails"), api.number()
    if len(json.dumps(body["metadata"]).encode()) > 32000:
        raise refused(400, "InvalidParameter", "metadata: at most 32,000 bytes")
    subnet = existing(api, "subnets", vnic["subnetId"])
    for group in vnic["nsgIds"]:
        existing(api, "networkSecurityGroups", group)
    size = source.pop("bootVolumeSizeInGBs", 47)
    of = {"compartmentId": body["compartmentId"], "availabilityDomain": body["availabilityDomain"]}
    volume = stored(api, "bootVolumes", {"sizeInGBs": size, "vpusPerGB": 10, "imageId": source["imageId"]}, **of)
    shape = {
        "ocpus": 15.0,
        "memoryInGBs": 240.0,
        "gpus": 1,
        "processorDescription": "x",
        "localDisks": 0,
        **(body.get("shapeConfig") or {}),
    }
    made = stored(
        api,
        "instances",
        body,
        **{"shapeConfig": shape, "imageId": source["imageId"], "region": "phx", "bootVolumeId": volume["id"]},
        **{"sourceDetails": source, "faultDomain": "FAULT-DOMAIN-1", "launchMode": "PARAVIRTUALIZED"},
        launchOptions={"bootVolumeType": "PARAVIRTUALIZED", "firmware": "UEFI_64", "networkType": "PARAVIRTUALIZED"},
        availabilityConfig={"isLiveMigrationPreferred": False, "recoveryAction": "RESTORE_INSTANCE"},
        instanceOptions={"areLegacyImdsEndpointsDisabled": False},
        agentConfig={"isMonitoringDisabled": False, "isManagementDisabled": False, "areAllPluginsDisabled": False},
    )
    card = {
        "isPrimary": True,
        "publicIp": f"203.0.113.{number}",
        "privateIp": f"10.0.0.{number}",
        "nsgIds": vnic["nsgIds"],
    }
    card |= {"skipSourceDestCheck": False, "hostnameLabel": None, "macAddress": "00:00"}
    stored(api, "vnics", card, **of, subnetId=subnet["id"], instanceId=made["id"])
    return 200, made


def attached(kind: str, name: str) -> Handler:
    """The attachments of an instance: its network card, its boot volume."""

    def listed(api: Api, request: Request) -> Answer:
        instance = request.query["instanceId"]
        if kind == "vnics":
            keys = [key for key, each in api.kind(kind).items() if each["instanceId"] == instance]
        else:
            keys = [each["bootVolumeId"] for key, each in api.kind("instances").items() if key == instance]
        common = {"instanceId": instance, "lifecycleState": "ATTACHED", "compartmentId": request.query["compartmentId"]}
        return 200, [{**common, "id": f"{key}.attachment", name: key} for key in keys]

    return listed


def rules(api: Api, request: Request) -> Answer:
    """The rules of a security group, as they are, with more of them, or without some."""
    group, how = request.parts[0], request.parts[1]
    existing(api, "networkSecurityGroups", group)
    found = api.kind("rules").setdefault(group, {})
    if how == "actions/addSecurityRules":
        added = [
            {"isStateless": False, **each, "id": f"{api.number():06}", "isValid": True}
            for each in request.body["securityRules"]
        ]
        found |= {each["id"]: {**each, "timeCreated": MADE["timeCreated"]} for each in added}
        return 200, {"securityRules": [found[each["id"]] for each in added]}
    if how == "actions/removeSecurityRules":
        for each in request.body["securityRuleIds"]:
            del found[each]
        return 204, None
    return 200, list(found.values())


_KIND = "vcns|internetGateways|subnets|networkSecurityGroups"
ROUTES: Routes = {
    ("POST", rf"{BASE}/({_KIND})/?"): make,
    ("POST", rf"{BASE}/instances/?"): launch,
    ("GET", rf"{BASE}/vnicAttachments/?"): attached("vnics", "vnicId"),
    ("GET", rf"{BASE}/bootVolumeAttachments/?"): attached("bootVolumes", "bootVolumeId"),
    ("GET", rf"{BASE}/ipv6/?"): lambda api, request: (200, []),
    ("GET", rf"{BASE}/networkSecurityGroups/([^/]+)/(securityRules)"): rules,
    ("POST", rf"{BASE}/networkSecurityGroups/([^/]+)/(actions/\w+SecurityRules)"): rules,
    ("GET", rf"{BASE}/({_KIND}|routeTables|securityLists|instances|vnics|bootVolumes)/([^/]+)"): get,
    ("PUT", rf"{BASE}/({_KIND}|routeTables|securityLists|instances)/([^/]+)"): put,
    ("DELETE", rf"{BASE}/({_KIND}|instances)/([^/]+)"): delete,
}
_CLIENTS = ("ComputeClient", "BlockstorageClient", "VirtualNetworkClient")


@contextmanager
def served() -> Iterator[Api]:
    """Serves the API of a region to the provider, which signs its questions with a key of its own."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with serving(ROUTES) as (api, address), tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "key.pem").write_bytes(pem)
        api.ends_with = ends_with
        user = {"tenancy_ocid": TENANCY, "user_ocid": "ocid1.user.oc1..aaaa", "fingerprint": ":".join(["00"] * 16)}
        user["private_key_path"] = str(Path(folder) / "key.pem")
        api.environment = {f"TF_VAR_{name}": value for name, value in user.items()}
        api.environment["CLIENT_HOST_OVERRIDES"] = ";".join(f"oci_core.{each}={address}" for each in _CLIENTS)
        yield api
