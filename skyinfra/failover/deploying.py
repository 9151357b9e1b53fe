"""Deploys a stack whose pools have several places: where one refuses, the next is tried.

The order of the steps is that in which a process may be killed between any two of them: the refusal and the next
choice are written first, then what the refusing place has is removed, and only when that is gone the next one begins.
A deploy that is repeated finds the file, and what is left in the state, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from skyinfra.deploy.apply import carry_out
from skyinfra.errors import CloudRefused, FleetError, StateLocked, StateNotSaved, TerraformFailed
from skyinfra.failover.blocks import (
    PlaceState,
    aged,
    ago,
    cheapest_first,
    environment_of,
    moves,
    place_states,
    refused,
)
from skyinfra.failover.live_places import Known
from skyinfra.failover.strays import refuse_strays, stray_lines
from skyinfra.offers import usd
from skyinfra.places.choices import NAME, Choice, Choices, Refused
from skyinfra.providers import machines_of
from skyinfra.terraform.cloud_errors import Refusal, refusals
from skyinfra.terraform.program import Plan
from skyinfra.terraform.state import Resource
from skyinfra.terraform.synthesized import SynthesizedStack

Pool = Mapping[str, Any]


@dataclass
class Failover:
    """A deploy of *stack*. choices: of the project; synthesize: compiles the stack by them, anew.

    attempt: plans and applies a stack; returns None where a person said no. again: whether a person has been asked for
    this deploy already. ask: whether to go on, by a sentence. say: tells a person. look: asks the clouds what is known
    of the places of a pool now, for those that are ordered by price.
    """

    stack: SynthesizedStack
    choices: Choices
    synthesize: Callable[[], SynthesizedStack]
    attempt: Callable[..., Plan | None]
    ask: Callable[[str], bool]
    say: Callable[[str], object]
    look: Callable[[SynthesizedStack, Pool], Mapping[str, Known]] = lambda stack, pool: {}
    _known: dict[str, Mapping[str, Known]] = field(default_factory=dict)

    def deploy(self) -> Plan | None:
        """Deploys the stack at the first place that has room. Raises what `carry_out` does, for the last place.

        Raises `StrayMachine` where a deploy of before has made a machine that the state does not have.
        """
        refuse_strays(self.stack, self.say)
        if not self._pools():
            try:
                return self.attempt(self.stack)
            except TerraformFailed as error:
                self._look(error)
                raise
        if self.stack.runs_elsewhere:
            return self._once()
        self._begin()
        if not self._remove_left():
            return None
        again = False
        while True:
            try:
                done = self.attempt(self.stack, again=again)
            except TerraformFailed as error:
                self._move(error)
                again = True
                continue
            if done is not None:
                self._keep()
            return done

    def _once(self) -> Plan | None:
        """Deploys the stack at the place that counts; a person moves it. Raises what `carry_out` does."""
        try:
            return self.attempt(self.stack)
        except CloudRefused as error:
            if any(moves(each.cause) for each in refusals(error.diagnostics)):
                error.hint = _last(
                    error,
                    f"A run in HCP Terraform moves no pool: name another place in {NAME}, and deploy again. `skyinfra "
                    f"offers --for {self.stack.name}/POOL` lists them.",
                )
            raise

    def _look(self, error: TerraformFailed) -> None:
        """Adds the machines that an answer which never came has left outside of the state to the *error*.

        None where another run has the state, or it was not saved: they are that run's, or in the file that has it.
        """
        if isinstance(error, StateLocked | StateNotSaved):
            return
        if len(refusals(error.diagnostics)) < len(error.diagnostics):
            for line in stray_lines(self.stack):
                error.hint = _last(error, line)

    def _pools(self) -> dict[str, Pool]:
        """Returns the pools that have several places."""
        return {pool["name"]: pool for pool in self.stack.pools if pool.get("places")}

    def _states(self, pool: Pool, choice: Choice | None = None) -> list[PlaceState]:
        given = choice or self.choices.of(self._fleet(pool))
        return place_states(pool, given, datetime.now(UTC), environment=environment_of(self.stack))

    def _in_order(self, pool: Pool, found: Sequence[PlaceState]) -> list[PlaceState]:
        """Returns the places as they are tried: of `cheapest` by the prices of now, which are asked for once."""
        if not pool.get("by_price"):
            return list(found)
        if pool["name"] not in self._known:
            self._known[pool["name"]] = self.look(self.stack, pool)
        known = self._known[pool["name"]]
        return cheapest_first([replace(each, known=known.get(_name(each), each.known)) for each in found])

    def _fleet(self, pool: Pool) -> str:
        return f"{self.stack.name}/{pool['name']}"

    # Before the first try -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Says which places cannot be tried, and leaves those that are blocked still, where nothing serves there."""
        changed = False
        for pool in self._pools().values():
            found = self._states(pool)
            for each in found:
                if each.missing:
                    self.say(f"{pool['name']}: {_name(each)} cannot be tried: {each.missing}")
            current = next(each for each in found if each.selected)
            new = bool(pool.get("by_price")) and self._is_new(pool)
            if (current.until is None and not new) or self._serves(pool):
                continue
            found = self._in_order(pool, found)
            free = next((each for each in found if each.free), None)
            if new and free is not None:
                if free.selected:
                    continue
                self.say(f"{pool['name']}: {_name(free)} is the cheapest now, at {_price(free)}")
                self._choose(pool, free, self.choices.of(self._fleet(pool)).refused)
            elif free is None:
                # Whoever deploys again after all have refused wants them asked again.
                free = self._again(pool, found)
                self.say(f"{pool['name']}: every place has refused; they are tried again, {_name(free)} first")
                self._choose(pool, free, ())
            else:
                self.say(f"{pool['name']}: {_name(current)}: {blocked(current)}; next is {_name(free)}")
                self._choose(pool, free, self.choices.of(self._fleet(pool)).refused)
            changed = True
        if changed:
            self.stack = self.synthesize()

    def _again(self, pool: Pool, found: Sequence[PlaceState]) -> PlaceState:
        """Returns the first place to be tried again where none is free. Raises `FleetError` where all are too dear."""
        affordable = [each for each in found if not each.known.too_dear]
        if not affordable:
            lines = [f"{_name(each)}: {each.known.problem}" for each in found]
            raise FleetError(
                "no place costs as little as is declared\n" + "\n".join(lines),
                field=self._fleet(pool),
                hint="Raise max_hourly_cost, or deploy later. Nothing was made.",
            )
        return next((each for each in affordable if not each.missing), affordable[0])

    def _is_new(self, pool: Pool) -> bool:
        """Returns whether no place has been chosen for it, and nothing of it stands."""
        undecided = self.choices.of(self._fleet(pool)).place is None
        return undecided and all(each.module != pool["name"] for each in self.stack.resources())

    def _choose(self, pool: Pool, selected: PlaceState, given: Sequence[Any]) -> None:
        before = self.choices.of(self._fleet(pool))
        kept = aged(given, datetime.now(UTC))
        made = replace(before, place=selected.place["place"], first=before.first or _first(pool), refused=kept)
        self.choices = self.choices.having(self._fleet(pool), made)

    def _keep(self) -> None:
        """Writes the choice of pools whose order may be another one tomorrow, as prices are."""
        for pool in self._pools().values():
            choice = self.choices.of(self._fleet(pool))
            if choice.place is None and _first(pool) == _NOWHERE:
                selected = next(each for each in self._states(pool) if each.selected)
                self._choose(pool, selected, choice.refused)

    # What places have left ------------------------------------------------------------------------------------------

    def _remove_left(self) -> bool:
        """Removes what a deploy that did not end has left at other places. Returns whether a person let it."""
        pools = self._pools()
        left = {
            each.call: pools[each.module]
            for each in self.stack.resources()
            if each.module in pools and each.call != self.stack.module_of(each.module)
        }
        for call, pool in left.items():
            if self._serves(pool, call):
                continue  # a person has selected another place for it: the plan shows that, and asks
            if not self.ask(f"{pool['name']}: remove what {_named(pool, call)} has left?"):
                return False
            self._remove(pool, call)
        return True

    def _remove(self, pool: Pool, call: str) -> None:
        """Destroys the resources of a module, and proves it by the state. Raises `FleetError` where some are left."""
        if not self._of(call):
            return
        self.say(f"{pool['name']}: removing what {_named(pool, call)} has made")
        carry_out(self.stack, destroy=True, target=[f"module.{call}"])
        if left := self._of(call):
            raise FleetError(
                f"{len(left)} resources of {_named(pool, call)} are still there: {left[0].address}",
                field=self._fleet(pool),
                hint=f"The next place is not tried before they are gone: skyinfra deploy {self.stack.name} continues.",
            )

    def _of(self, call: str) -> list[Resource]:
        return [each for each in self.stack.resources() if each.call == call]

    def _serves(self, pool: Pool, call: str | None = None) -> bool:
        """Returns whether a machine that the manifest names stands there: then the fleet moves by no refusal."""
        resources = self._of(call or self.stack.module_of(pool["name"]))
        machines = [r for r in resources if machines_of(r.type, r.attributes) is not None and not r.tainted]
        if not machines:
            return False
        manifest = self.stack.fleets().get(pool["name"])
        named = {node.id for node in manifest.nodes} if manifest is not None else set()
        # Of which attribute a module takes the id is its own.
        return any(str(value) in named for each in machines for value in each.attributes.values())

    # After the loss of all nodes ------------------------------------------------------------------------------------

    def leave(self, name: str, why: str, begun: Callable[[], object] = lambda: None) -> bool:
        """Leaves the place where a pool has lost its nodes for the next one; `deploy` makes it there.

        A pool of one place, and one of whose others none is free, is made anew where it is. begun: is called once a
        person lets it, before anything changes. Returns whether a person does. Raises what removing it raises.
        """
        pool = self._pools().get(name)
        here = None if pool is None else next(each for each in pool["places"] if each["place"] == pool["place"])
        if pool is None or here is None or self.stack.runs_elsewhere:
            return self._let(f"{name}: {why}. Make it anew?", begun)
        lost = Refused(here["place"], datetime.now(UTC).isoformat(timespec="seconds"), LOST, {}, words=why)
        choice = self.choices.of(self._fleet(pool))
        records = (*(each for each in choice.refused if each.place != here["place"]), lost)
        found = self._in_order(pool, self._states(pool, replace(choice, refused=records)))
        free = next((each for each in found if each.free and not each.selected), None)
        if free is None:
            return self._let(f"{name}: {why}, and no other place is free. Make it anew at {here['place']}?", begun)
        self.say(f"{name}: {here['place']}: {why}")
        if not self._let(_question(pool, free), begun):
            return False
        self._choose(pool, free, records)
        self._remove(pool, self.stack.module_of(name))
        self.stack = self.synthesize()
        return True

    def _let(self, question: str, begun: Callable[[], object]) -> bool:
        if not self.ask(question):
            return False
        begun()
        return True

    def refuse_elsewhere(self) -> None:
        """Raises `FleetError` where the state has nodes that serve at another place than the file says: it is an old
        one, and going on by it would move them back."""
        for pool in self._pools().values():
            for call in {each.call for each in self.stack.resources() if each.module == pool["name"]}:
                if call != self.stack.module_of(pool["name"]) and self._serves(pool, call):
                    raise FleetError(
                        f"{NAME} has it at {pool['place']}, and its nodes are at {_named(pool, call)}",
                        field=self._fleet(pool),
                        hint=f"Take the {NAME} of who moved it there: it belongs into version control.",
                    )

    # After a refusal ------------------------------------------------------------------------------------------------

    def _move(self, error: TerraformFailed) -> None:
        """Goes to the next place of each pool that was refused. Raises *error* where that is not to be done."""
        found = refusals(error.diagnostics)
        pools = self._pools()
        if not isinstance(error, CloudRefused) or not found or not any(moves(each.cause) for each in found):
            self._look(error)
            raise error
        if len(found) < len(error.diagnostics) or not all(moves(e.cause) and e.pool in pools for e in found):
            error.hint = _last(
                error,
                "No other place is tried: not everything that was refused says that nothing was "
                f"made. `skyinfra deploy {self.stack.name}` looks at what there is, and continues.",
            )
            self._look(error)
            raise error
        texts = dict(error.diagnostics)
        steps = [
            self._step(pools[name], [e for e in found if e.pool == name], texts, error)
            for name in dict.fromkeys(str(each.pool) for each in found)
        ]
        for pool, _, selected in steps:
            if not self.ask(_question(pool, selected)):
                error.hint = _last(error, f"Nothing else was tried. {NAME} is as it was.")
                raise error
        for pool, records, selected in steps:
            self._choose(pool, selected, records)
        for pool, _, _ in steps:
            self._remove(pool, self.stack.module_of(pool["name"]))
        self.stack = self.synthesize()

    def _step(
        self, pool: Pool, found: Sequence[Refusal], texts: Mapping[str, str], error: TerraformFailed
    ) -> tuple[Pool, tuple[Any, ...], PlaceState]:
        """Returns the *pool*, its refusals and the place that is next. Raises *error* where there is none."""
        if self._serves(pool):
            error.hint = _last(
                error,
                f"{self._fleet(pool)} has nodes that serve, and stays where it is. To have all of "
                f"it elsewhere, name the place in {NAME}.",
            )
            raise error
        here, now = next(each for each in pool["places"] if each["place"] == pool["place"]), datetime.now(UTC)
        new = {r.where.get("zone"): r for r in (refused(e, here, texts.get(e.address, e.words), now) for e in found)}
        choice = self.choices.of(self._fleet(pool))
        records = (*(each for each in choice.refused if each.place != here["place"]), *new.values())
        state = self._states(pool, replace(choice, refused=records))
        for each in new.values():
            self.say(f"{pool['name']}: {here['place']} refuses{f' ({each.code})' if each.code else ''}: {each.words}")
        state = self._in_order(pool, state)
        free = next((each for each in state if each.free and not each.selected), None)
        if free is None:
            first = choice.first or _first(pool)
            made = replace(choice, refused=records, place=here["place"], first=first)
            self.choices = self.choices.having(self._fleet(pool), made)
            lines = [f"{_name(each)}: {each.missing or blocked(each)}" for each in state]
            error.message = f"{pool['name']} was refused in every place\n" + "\n".join(lines)
            raise error
        return pool, records, free


# The cause of a place that was left as all nodes of the pool there were gone.
LOST = "NodesLost"
# In the place of the first, where no module is named like the pool: no place has this name.
_NOWHERE = "none"


def _name(state: PlaceState) -> str:
    return str(state.place["place"])


def _first(pool: Pool) -> str:
    return next((each["place"] for each in pool["places"] if each["module"] == pool["name"]), _NOWHERE)


def _named(pool: Pool, call: str) -> str:
    found = (each["place"] for each in pool["places"] if each["module"] == call)
    return str(next(found, call.partition("__")[2] or call))


def blocked(state: PlaceState) -> str:
    """Says why, when and until when a place is blocked; a place that is not was not tried."""
    why, until = state.why, state.until
    if why is None or until is None:
        return f"not tried: {state.known.problem}" if state.known.too_dear else "not tried"
    kind = "quota" if why.cause == "QuotaExceeded" else "capacity"
    if why.cause == LOST:
        return f"left at {why.at[11:16]} UTC, {ago(why, datetime.now(UTC))}: {why.words}; until {until:%H:%M}"
    by = "" if why.place == state.place["place"] else f", as {why.place} was,"
    words = why.words.rstrip(".")
    old = ago(why, datetime.now(UTC))
    return (
        f"refused{by} at {why.at[11:16]} UTC, {old}, for {kind}: {words}; it is tried again from {until:%H:%M} UTC on"
    )


def _question(pool: Pool, selected: PlaceState) -> str:
    before = PlaceState(next(each for each in pool["places"] if each["place"] == pool["place"]), selected=True)
    words = f"{pool['name']}: go on with {selected.place['place']}, {selected.place['machine_types'][0]}"
    if before.usd_per_hour is not None or selected.usd_per_hour is not None:
        words += f", at {_price(selected)} in place of {_price(before)}"
    return f"{words}?"


def _price(state: PlaceState) -> str:
    price = state.usd_per_hour
    return "a price that is not known" if price is None else f"{usd(price)}/h"


def _last(error: TerraformFailed, sentence: str) -> str:
    return f"{error.hint}\n{sentence}" if error.hint else sentence
