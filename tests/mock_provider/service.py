"""What a provider answers to Terraform, over the folder that is its cloud."""

from __future__ import annotations

import json
from typing import Any

from tf.gen import tfplugin_pb2 as pb
from tf.gen import tfplugin_pb2_grpc as rpc

from mock_provider.schema import Fields, Schema
from mock_provider.values import (
    Refused,
    attribute_path,
    decoded,
    encoded,
    filled,
    planned,
    refreshed,
    refused,
    refused_by_cloud,
    replacing,
    unanswered,
    updated,
)
from mock_provider.world import Failure, World, number


def error(summary: str, path: tuple[Any, ...] = ()) -> pb.Diagnostic:
    attribute = attribute_path(path) if path else None
    return pb.Diagnostic(severity=pb.Diagnostic.ERROR, summary=summary, attribute=attribute)


def _refused(schema: Fields, config: pb.DynamicValue) -> list[pb.Diagnostic]:
    return [error(summary, path) for path, summary in refused(schema, decoded(config))]


def _whole(schema: Fields, state: dict[str, Any]) -> dict[str, Any]:
    """*state* with what it lacks since its provider had fewer attributes, as those libraries read such a state."""
    return {name: [] if each.block is not None else None for name, each in schema.items()} | state


def _private(n: int) -> bytes:
    return json.dumps({"n": n}).encode()


class Service(rpc.ProviderServicer):  # type: ignore[misc]
    def __init__(self, schema: Schema, world: World) -> None:
        self.schema, self.world = schema, world

    def GetProviderSchema(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.schema.told()

    def ValidateProviderConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ValidateProviderConfig.Response(diagnostics=_refused(self.schema.provider, request.config))

    def ValidateResourceConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = _refused(self.schema.resources[request.type_name], request.config)
        return pb.ValidateResourceConfig.Response(diagnostics=found)

    def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = _refused(self.schema.data[request.type_name], request.config)
        return pb.ValidateDataResourceConfig.Response(diagnostics=found)

    def ConfigureProvider(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ConfigureProvider.Response()

    def StopProvider(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.StopProvider.Response()

    def UpgradeResourceState(self, request: Any, context: Any) -> Any:  # noqa: N802
        state = _whole(self.schema.resources[request.type_name], json.loads(request.raw_state.json))
        return pb.UpgradeResourceState.Response(upgraded_state=encoded(state))

    def ReadDataSource(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, config = request.type_name, decoded(request.config)
        failure = self._failure("read", f"data.{kind}", config)
        if failure:
            return pb.ReadDataSource.Response(diagnostics=[error(failure.says)])
        schema, answers = self.schema.data[kind], self.world.answers(f"data.{kind}", config)
        state = filled(schema, planned(schema, config), number(kind, config), answers)
        return pb.ReadDataSource.Response(state=encoded(state))

    def ReadResource(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind, state = request.type_name, decoded(request.current_state)
        failure = self._failure("read", kind, state)
        if failure:
            return pb.ReadResource.Response(diagnostics=[error(failure.says)])
        found = self.world.get(kind, self._number(kind, request.private, state))
        gone = self._failure("gone", kind, state) if found is None else None
        if gone:
            return pb.ReadResource.Response(diagnostics=[error(gone.says)])
        found = found and refreshed(self.schema.resources[kind], _whole(self.schema.resources[kind], found))
        return pb.ReadResource.Response(new_state=encoded(found), private=request.private)

    def PlanResourceChange(self, request: Any, context: Any) -> Any:  # noqa: N802
        schema = self.schema.resources[request.type_name]
        prior, proposed = decoded(request.prior_state), decoded(request.proposed_new_state)
        legacy = not self.schema.framework
        if proposed is None:
            return pb.PlanResourceChange.Response(
                planned_state=encoded(None), planned_private=request.prior_private, legacy_type_system=legacy
            )
        plan = planned(schema, proposed)
        if prior is not None and plan != prior:
            plan = updated(schema, decoded(request.config), prior, plan, legacy)
        try:
            paths = list(replacing(schema, prior, plan)) if prior is not None else []
        except Refused as no:
            return pb.PlanResourceChange.Response(diagnostics=[error(str(no))])
        return pb.PlanResourceChange.Response(
            planned_state=encoded(plan),
            requires_replace=[attribute_path(path) for path in paths],
            planned_private=request.prior_private,
            legacy_type_system=legacy,
        )

    def ApplyResourceChange(self, request: Any, context: Any) -> Any:  # noqa: N802
        prior, plan, config = (decoded(each) for each in (request.prior_state, request.planned_state, request.config))
        if plan is None:
            state, private, said = self._delete(request.type_name, prior, request.planned_private)
        elif prior is None:
            state, private, said = self._create(request.type_name, plan, config)
        else:
            state, private, said = self._update(request.type_name, prior, plan, config, request.planned_private)
        return pb.ApplyResourceChange.Response(
            new_state=encoded(state),
            private=private,
            diagnostics=[error(said)] if said else [],
            legacy_type_system=not self.schema.framework,
        )

    def _create(self, kind: str, plan: dict[str, Any], config: dict[str, Any]) -> tuple[Any, bytes, str | None]:
        schema = self.schema.resources[kind]
        failure = self._failure("create", kind, plan)
        said = failure.says if failure else refused_by_cloud(schema, config)
        if said and (failure is None or failure.leaves == "nothing"):
            return None, b"", said
        left = unanswered(schema, plan)
        if left and not said:
            # It stands, and Terraform takes it for one that failed.
            said = f"the provider still indicated an unknown value for {kind}.{', '.join(left)} after the apply"
        n = self.world.make(kind)
        state = filled(schema, plan, n, self.world.answers(kind, config))
        self.world.put(kind, n, state, config)
        if failure and failure.leaves == "outside":
            return None, b"", said
        return state, _private(n), said

    def _update(
        self, kind: str, prior: dict[str, Any], plan: dict[str, Any], config: dict[str, Any], private: bytes
    ) -> tuple[Any, bytes, str | None]:
        n = self._number(kind, private, prior)
        state = filled(self.schema.resources[kind], plan, n, self.world.answers(kind, config))
        failure = self._failure("update", kind, plan)
        if failure:
            # The older SDK keeps what was planned, unless the provider says otherwise; the next refresh finds out.
            return (prior if self.schema.framework else state), private, failure.says
        self.world.put(kind, n, state, config)
        return state, private, None

    def _delete(self, kind: str, prior: dict[str, Any], private: bytes) -> tuple[Any, bytes, str | None]:
        failure = self._failure("delete", kind, prior)
        if failure:
            return prior, private, failure.says
        self.world.remove(kind, self._number(kind, private, prior))
        return None, b"", None

    def _failure(self, on: str, kind: str, value: dict[str, Any]) -> Failure | None:
        always = [each for each in self.schema.failures if (each.on, each.resource) == (on, kind)]
        return always[0] if always else self.world.failure(on, kind, value)

    def _number(self, kind: str, private: bytes, state: dict[str, Any]) -> int:
        """Which resource of its type it is. Terraform keeps that beside the state, but for the end of a tainted one."""
        if private:
            return int(json.loads(private)["n"])
        same = [name for name, value in self.world.existing(kind).items() if value.get("id") == state.get("id")]
        return int(same[0].split(".")[1]) if len(same) == 1 else 0

    def ImportResourceState(self, request: Any, context: Any) -> Any:  # noqa: N802
        kind = request.type_name
        n = self._number(kind, b"", {"id": request.id})
        if not n:
            return pb.ImportResourceState.Response(diagnostics=[error(f"{kind} {request.id} was not found")])
        found = pb.ImportResourceState.ImportedResource(
            type_name=kind, state=encoded(self.world.get(kind, n)), private=_private(n)
        )
        return pb.ImportResourceState.Response(imported_resources=[found])
