"""The pools of a stack in its JSON: modules with their inputs, providers, outputs, and a description of each.

Pure, and without cdktf: what a `FleetStack` adds to the stack of its library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skyinfra.bootstrap import carries_runner, user_data
from skyinfra.compiler import Deployment
from skyinfra.errors import InvalidField
from skyinfra.places.candidates import account
from skyinfra.providers import Provider, TerraformProvider
from skyinfra.providers.volumes import Volume


def additions_of(
    stack: str,
    deployments: Sequence[Deployment],
    inputs: dict[str, dict[str, Any]],
    sources: dict[str, str],
    runners: dict[bool, str],
    volumes: Sequence[Volume] = (),
) -> dict[str, dict[str, Any]]:
    """Returns the additions of the pools to the stack's JSON, by its top-level sections.

    All pools cross to jsii as one value: a construct for each module and output would cost 5 ms a pool.
    """
    modules, outputs = {}, {}
    for deployment in deployments:
        pool, name = deployment.pool.name, deployment.module or deployment.pool.name
        source = sources[deployment.pool.provider.kind]
        modules[name] = {"source": source, **inputs[pool]}
        if carries_runner(deployment):
            modules[name]["runner_file"] = runners[packs_runner(deployment)]
        if providers := deployment.pool.provider.terraform():
            modules[name]["providers"] = {
                each.name: own_block(deployment.pool.provider, each) or f"{each.name}.{each.alias}"
                for each in providers
            }
        outputs[deployment.output] = {"value": f"${{module.{name}.fleet}}", "sensitive": True}
    choices = {"pools": [describe(deployment) for deployment in deployments]}
    if volumes:
        choices["volumes"] = [volume.describe() for volume in volumes]
    # `cdktf output` reads the names of the outputs from the comment that cdktf itself keeps.
    names = {stack: {name: name for name in outputs}} if outputs else {}
    sections: dict[str, dict[str, Any]] = {
        **provider_sections([*users(deployments), *((each.name, each.provider) for each in volumes)]),
        "module": modules,
        "output": outputs,
        "//.skyinfra": choices,
        "//.outputs": names,
    }
    return {section: content for section, content in sections.items() if content}


def users(deployments: Sequence[Deployment]) -> list[tuple[str, Provider]]:
    """Returns the providers of the pools, with the names of these; of every place, for what was made there before."""
    return [(each.pool.name, each.pool.provider) for pool in deployments for each in pool.places or (pool,)]


def provider_sections(using: Sequence[tuple[str, Provider]]) -> dict[str, dict[str, Any]]:
    """Returns the Terraform providers of pools and volumes, one for each configuration that differs."""
    configurations: dict[str, dict[str, dict[str, Any]]] = {}
    required = {}
    for name, user in using:
        for provider in user.terraform():
            required[provider.name] = {"source": provider.source, "version": provider.version}
            if own_block(user, provider):
                continue
            made = configurations.setdefault(provider.name, {}).setdefault(provider.alias, {})
            _refuse_two(name, provider, made)
            made.update(provider.configuration())
    blocks = {name: list(found.values()) for name, found in sorted(configurations.items())}
    return {"provider": blocks, "terraform.required_providers": required}


def own_block(user: Provider, provider: TerraformProvider) -> str | None:
    """Returns the name of the stack's own provider block that a pool is declared with; None where it gets one."""
    given: str | None = getattr(user, "provider", None)
    return given if given and given.partition(".")[0] == provider.name else None


def _refuse_two(user: str, provider: TerraformProvider, made: dict[str, Any]) -> None:
    """Raises `InvalidField` where a pool wants another setting of a provider block than one before it."""
    for name, value in provider.settings:
        if name in made and made[name] != value:
            raise InvalidField(
                f"a pool before it has {made[name]} with the same region and profile, which are one account",
                field=f"{user}.provider.{name}",
                given=value,
                hint="Give each account a profile of its own: sky.AWS(profile=...).",
            )


def packs_runner(deployment: Deployment) -> bool:
    """Returns whether the runner is compressed on its way: metadata have no room for it as it is."""
    return deployment.pool.provider.data.boot.delivery == "metadata"


def module_inputs(deployment: Deployment, project: str) -> dict[str, Any]:
    """Returns the inputs of the pool's module: the core ones of every provider, then the provider's own."""
    pool, selection, data = deployment.pool, deployment.selection, user_data(deployment)
    data_file = pool.provider.data
    inputs = {
        "name": pool.name,
        "stack": deployment.stack,
        "node_count": pool.most_nodes,
        **({"min_nodes": pool.range.min} if pool.range is not None else {}),
        "machine_types": list(selection.machine_types),
        **({"image": selection.image} if selection.image else {}),
        "disk_gb": pool.disk_gb or 0,
        "spot": pool.spot,
        "user_data_head": data.head,
        "user_data_worker": data.worker,
        "labels": dict(sorted(pool.labels.items())),
        "slots": [{k: v for k, v in vars(slot).items() if v is not None} for slot in deployment.slots],
        **selection.inputs,
        **(data_file.idle.inputs if data_file.idle and deployment.worker.ends_itself else {}),
        **({"user_data_revision": data.revision} if data.revision else {}),
        **({"versions": data.versions} if data.versions else {}),
        **{key: f"{project}/{path}" for key, path in selection.project_paths.items()},
    }
    # What a place has none of, its module does not ask for.
    return {name: value for name, value in inputs.items() if data_file.takes(name)}


def describe(deployment: Deployment) -> dict[str, Any]:
    """Returns the choices for a pool, for programs that show the stack; kept as a comment in the synthesized JSON.

    cdktf drops what is None: no accelerator means CPU nodes, no hourly cost local nodes, or that the price is not
    known.
    """
    pool, selection = deployment.pool, deployment.selection
    accelerator = selection.accelerator
    return {
        "name": pool.name,
        "provider": pool.provider.kind,
        "region": getattr(pool.provider, "region", None),
        "nodes": pool.most_nodes,
        **({"min_nodes": pool.range.min} if pool.range is not None else {}),
        **({"scale": [deployment.scale.min, deployment.scale.max]} if deployment.scale is not None else {}),
        "vcpus": pool.vcpus,
        "memory_gb": pool.memory_gb,
        "machine_types": list(selection.machine_types),
        "accelerator": str(accelerator) if accelerator else None,
        "preferences": list(map(str, pool.accelerators)) if len(pool.accelerators) > 1 else None,
        "accelerators_per_node": selection.count * selection.hosts,
        "slots_per_node": len(deployment.slots) * selection.hosts,
        "spot": pool.spot,
        "hourly_cost": selection.hourly_cost,
        "max_hourly_cost": pool.max_hourly_cost,
        "stop_after_idle": pool.stop_after_idle if deployment.worker.idle_seconds else None,
        "max_lifetime": pool.max_lifetime if deployment.worker.lifetime_seconds else None,
        "prices": {machine: asdict(price) for machine, price in selection.prices.items()} or None,
        "price_note": selection.price_note,
        "head": selection.head_machine,
        "head_price": asdict(selection.head_price) if selection.head_price else None,
        "simulated": selection.simulated,
        "drain_seconds": pool.worker.drain_seconds,
        **({"layouts_follow": True} if pool.layout is not None else {}),
        **({"replace_sick": True} if pool.replace_sick else {}),
        **({"budget": pool.budget.model_dump()} if pool.budget is not None else {}),
        **({"module": deployment.module} if deployment.module else {}),
        **({"place": deployment.place, "places": _places(deployment)} if deployment.places else {}),
        **({"by_price": True} if pool.places is not None and pool.places.by_price else {}),
        **({"volumes": [{**v.describe(), "path": path} for path, v in pool.volumes.items()]} if pool.volumes else {}),
    }


def _places(deployment: Deployment) -> list[dict[str, Any]]:
    """Returns the places of a pool in order, for programs that choose one of them."""
    return [
        {
            "place": each.place,
            "module": each.module or each.pool.name,
            "provider": each.pool.provider.kind,
            "region": getattr(each.pool.provider, "region", None),
            "zones": list(getattr(each.pool.provider, "zones", ())),
            "account": account(each.pool.provider),
            **_profile(each.pool.provider),
            "own": getattr(each.pool.provider, "provider", None),
            "machine_types": list(each.selection.machine_types),
            "accelerator": str(each.selection.accelerator) if each.selection.accelerator else None,
            "accelerators_per_node": each.selection.count * each.selection.hosts,
            "grouped": each.selection.grouped,
            "head": each.selection.head_machine,
            "hourly_cost": each.selection.hourly_cost,
            "usd_per_hour": each.usd_per_hour,
            "price_note": each.selection.price_note,
        }
        for each in deployment.places
    ]


def _profile(provider: Provider) -> dict[str, str]:
    """Returns the profile and the account of a place of AWS, where it declares the account."""
    id: str | None = getattr(provider, "account_id", None)
    return {"profile": getattr(provider, "profile", None) or "", "account_id": id} if id is not None else {}
