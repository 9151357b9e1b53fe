"""Stacks as they were synthesized: the pools, the module inputs, and the fleets in Terraform's outputs."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyinfra.errors import (
    DeployInterrupted,
    FleetNotDeployed,
    InvalidManifest,
    PoolNotFound,
    ProjectError,
    TerraformFailed,
    did_you_mean,
)
from skyinfra.protocol.manifest import OUTPUT_PREFIX, Manifest
from skyinfra.terraform.expressions import unfolded
from skyinfra.terraform.program import Terraform, end_by
from skyinfra.terraform.state import (
    Resource,
    keep_private,
    read_outputs_file,
    read_state,
    read_state_file,
    refuse_shared,
)

_NO_LOCK_FILE = (
    "A lock file in the bucket needs Terraform 1.10. Install that or a later one, or declare another lock: "
    'sky.S3(..., use_lockfile=False, dynamodb_table="...")'
)


@dataclass(frozen=True)
class SynthesizedStack:
    """A synthesized stack.

    folder: where Terraform runs. pools: what was chosen for each pool. modules: the inputs of every module by its name,
    of a pool by that of the pool. providers: the configurations of every Terraform provider by its name. backend: where
    the state is kept, by the name of Terraform's backend. volumes: those that the stack declares.
    """

    name: str
    folder: Path
    pools: tuple[dict[str, Any], ...]
    modules: dict[str, dict[str, Any]]
    providers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    backend: dict[str, dict[str, Any]] = field(default_factory=dict)
    volumes: tuple[dict[str, Any], ...] = ()

    def configuration(self, pool: str) -> dict[str, Any]:
        """The configuration of the Terraform provider that the pool's module is given; empty where it is given none."""
        references = self.modules.get(pool, {}).get("providers", {}).values()
        return next((found for reference in references if (found := self.block(reference))), {})

    def block(self, reference: str) -> dict[str, Any]:
        """The configuration of a Terraform provider, by a reference such as ``aws.east``; empty where there is none."""
        name, _, alias = reference.partition(".")
        return next((each for each in self.providers.get(name, ()) if (each.get("alias") or "") == alias), {})

    @property
    def runs_elsewhere(self) -> bool:
        """Whether Terraform may run on another machine: a stack of HCP Terraform has no block of a backend."""
        return not self.backend or "remote" in self.backend

    def module_of(self, pool: str) -> str:
        """Returns the name of the module of a *pool*, which has that of a place in it where the pool has several."""
        return next((each.get("module", pool) for each in self.pools if each["name"] == pool), pool)

    def terraform(self) -> Terraform:
        """Terraform in the stack's folder. Raises `TerraformNotFound`."""
        return Terraform(self.folder)

    def prepared(self, *, anew: bool = False) -> Terraform:
        """Terraform in the stack's folder, set up where it is not yet, or *anew*.

        The versions of the providers are those of the file ``terraform.STACK.lock.hcl`` in the project's folder, which
        is for version control; it is made where there is none, and gets providers that are new. Raises
        `TerraformFailed`, `TerraformNotFound`.
        """
        terraform = self.terraform()
        # A folder of all stacks may be set up for another one.
        own = self.data_folder.resolve().is_relative_to(self.folder.resolve())
        if anew or not own or not self.data_folder.exists():
            kept, used = self.folder.parents[2] / f"terraform.{self.name}.lock.hcl", self.folder / ".terraform.lock.hcl"
            if kept.exists():
                shutil.copyfile(kept, used)
            try:
                terraform.prepare()
            except TerraformFailed as error:
                if kept.exists() and "-upgrade" in error.message:
                    error.hint = f"{kept} pins other versions. Remove it for the newest ones that are allowed."
                if "s3" in self.backend and "use_lockfile" in error.message:
                    error.hint = _NO_LOCK_FILE
                raise
            except DeployInterrupted as error:
                if anew:
                    raise
                end_by(error.exit_code - 128)  # there is no deploy: something is to be read
            # Terraform makes none where all providers are its own, and adds those that are new.
            if used.exists() and not (kept.exists() and kept.read_bytes() == used.read_bytes()):
                with suppress(OSError):
                    shutil.copyfile(used, kept)
        return terraform

    @property
    def data_folder(self) -> Path:
        """The folder in which Terraform keeps modules, providers and the selected workspace."""
        return self.folder / (os.environ.get("TF_DATA_DIR") or ".terraform")

    @property
    def workspace(self) -> str:
        """The workspace that Terraform is told to use."""
        selected = self.data_folder / "environment"
        return os.environ.get("TF_WORKSPACE") or (selected.read_text().strip() if selected.exists() else "default")

    @property
    def state_file(self) -> Path | None:
        """The file of the state, in the workspace that Terraform is told to use; None for other backends."""
        if "local" not in self.backend:
            return None
        settings: dict[str, str] = self.backend["local"]
        if self.workspace == "default":
            return self.folder / settings.get("path", "terraform.tfstate")
        return self.folder / settings.get("workspace_dir", "terraform.tfstate.d") / self.workspace / "terraform.tfstate"

    def keep_private(self) -> None:
        """Lets nobody else read the state's file and its backup. Raises `ProjectError`, also for folders of others."""
        refuse_shared(self.folder)
        if (file := self.state_file) is not None:
            refuse_shared(file.parent)
            keep_private(file)
            keep_private(file.with_name(f"{file.name}.backup"))

    def resources(self) -> tuple[Resource, ...]:
        """Returns the resources in the state. Raises `TerraformFailed`, `TerraformNotFound`, `ProjectError`."""
        if self.state_file is not None:
            return read_state_file(self.state_file)
        return read_state(self.prepared().pull_state(), source=f"the state of {self.name}")

    def fleets(self) -> dict[str, Manifest]:
        """The manifests of the deployed pools by name, in the order they are declared; empty where none is deployed.

        Raises `TerraformFailed`, `TerraformNotFound`, `InvalidManifest`.
        """
        found = {
            name.removeprefix(OUTPUT_PREFIX): Manifest.read(value, source=f"{self.name}.{name}")
            for name, value in self.prepared().outputs().items()
            if name.startswith(OUTPUT_PREFIX)
        }
        order = [pool["name"] for pool in self.pools]
        return {name: found[name] for name in sorted(found, key=lambda n: order.index(n) if n in order else len(order))}

    def known_fleets(self) -> dict[str, Manifest]:
        """The manifests in the file of the state, by pool, without asking Terraform; empty where there is none."""
        found = {}
        for name, value in read_outputs_file(self.state_file).items() if self.state_file is not None else ():
            if name.startswith(OUTPUT_PREFIX):
                with suppress(InvalidManifest):
                    found[name.removeprefix(OUTPUT_PREFIX)] = Manifest.read(value, source=f"{self.name}.{name}")
        return found

    @property
    def only_pool(self) -> str:
        """The name of the pool, where there is one only. Raises `PoolNotFound`."""
        declared = [each["name"] for each in self.pools]
        if not declared:
            raise PoolNotFound(
                f"the stack {self.name!r} has no pools", hint="Declare one: sky.FleetStack(..., pools=[...])."
            )
        if len(declared) > 1:
            names = ", ".join(f"{self.name}/{each}" for each in declared)
            raise PoolNotFound(f"the stack {self.name!r} has {len(declared)} pools", hint=f"Name one of: {names}.")
        return str(declared[0])

    def fleet(self, pool: str) -> Manifest:
        """Returns the manifest of a deployed pool. Raises `PoolNotFound`, `FleetNotDeployed`, and as `fleets` does."""
        declared = [p["name"] for p in self.pools]
        fleets = self.fleets()
        if pool in fleets:
            return fleets[pool]
        if declared and pool not in declared:
            raise PoolNotFound(
                f"the stack {self.name!r} has no such pool",
                field="pool",
                given=pool,
                hint=f"{did_you_mean(pool, declared)} Its pools: {', '.join(declared)}.".strip(),
            )
        raise FleetNotDeployed(
            f"{self.name}/{pool} is not deployed", hint=f"Deploy it with: skyinfra deploy {self.name}"
        )


def read_document(file: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ProjectError(
            f"cannot be read: {reason}", field=str(file), hint="Remove it, and make it anew with: skyinfra synth"
        ) from None
    return document


def read_stack(name: str, folder: Path, file: Path) -> SynthesizedStack:
    document = read_document(file)
    choices = document.get("//", {}).get("skyinfra", {})
    pools = {each.get("module", each["name"]): each["name"] for each in choices.get("pools", ())}
    return SynthesizedStack(
        name=name,
        folder=folder,
        pools=tuple(choices.get("pools", ())),
        volumes=tuple(choices.get("volumes", ())),
        modules={pools.get(name, name): unfolded(inputs) for name, inputs in document.get("module", {}).items()},
        providers=document.get("provider", {}),
        backend=document.get("terraform", {}).get("backend", {}),
    )
