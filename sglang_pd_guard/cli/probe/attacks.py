"""The attacks, as plans: what to send, when to go away, and what may come of it. Pure."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from sglang_pd_guard.cli.probe.prompts import Sizes
from sglang_pd_guard.cli.probe.secrets import new_secret
from sglang_pd_guard.cli.probe.verdict import Expects


@dataclasses.dataclass(frozen=True)
class Limits:
    """Args:
    admitted: tokens of the longest prompt that the endpoint admits; longer ones must be refused.
    served: tokens of the longest that it surely serves.
    """

    admitted: int
    served: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One request.

    Args:
        size: tokens of its prompt, as far as known.
        leave: seconds after which the client goes away.
        native: its requests go to SGLang's native API, in one bootstrap room with the others of its attack.
    """

    kind: str
    expects: Expects
    secret: str
    prompt: str
    size: int
    stream: bool = False
    leave: float | None = None
    native: bool = False
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Seconds that healthy requests take, by which clients choose when to go away."""

    first: float = 0.5
    total: float = 1.0


class Planner:
    """Makes requests of every kind, at random from a seed."""

    def __init__(self, rng: random.Random, sizes: Sizes, limits: Limits):
        self._rng = rng
        self._sizes = sizes
        self._limits = limits
        self.moments = Moments()
        smallest = round(sizes.base + sizes.line)
        if limits.served < 2 * smallest:
            raise ValueError(f"the endpoint serves prompts of {limits.served} tokens; the probe needs {2 * smallest} at least")
        self._smallest = smallest
        # Where sizes are estimates, stay clear of the limit.
        self.largest = limits.served if sizes.exact else int(limits.served * 0.85)

    def victim(self, *, long: bool = False, kind: str = "victim", share: float = 1.0) -> Plan:
        """A healthy request of random size, streamed.

        Args:
            long: nearly of the largest size, so that its KV reaches as far as an oversize prompt's.
            share: of the largest size, at most.
        """
        largest = max(self._smallest, int(self.largest * share))
        lowest = max(self._smallest, int(largest * 0.97)) if long else self._smallest
        size = self._rng.randint(lowest, largest)
        secret = new_secret(self._rng)
        return Plan(kind, "answer", secret, self._sizes.victim(secret, size), size, stream=True)

    def attack(self, kind: str) -> list[Plan]:
        """The requests of one attack, to be sent at once."""
        return ATTACKS[kind](self)

    def _oversize(self) -> list[Plan]:
        """One just above the limit, where freed pages hold KV of the very positions that its answer looks at; at times, or
        always where sizes are estimates, one up to twice the limit, which must be refused.
        """
        limit = self._limits.admitted
        plans = [self._sized("oversize", self._rng.choice([limit + 1, self._rng.randint(limit + 1, limit + 64)]))]
        if not self._sizes.exact or self._rng.random() < 1 / 4:
            plans.append(self._sized("oversize", self._rng.choice([2 * limit, self._rng.randint(limit + 65, 2 * limit)])))
        return plans

    def _edge(self) -> list[Plan]:
        return [self._sized("edge", self._limits.admitted + offset) for offset in (-1, 0, 1)]

    def _sized(self, kind: str, size: int) -> Plan:
        limit = self._limits.admitted
        surely = size > limit if self._sizes.exact else size > limit * 1.05
        secret = new_secret(self._rng)
        return Plan(kind, "refusal" if surely else "either", secret, self._sizes.oversize(secret, size), size)

    def _disconnect(self) -> list[Plan]:
        """Goes away before the first token: while the prompt is computed or transferred."""
        return [self._leaving("disconnect", self._rng.uniform(0, self.moments.first)) for _ in range(2)]

    def _abort(self) -> list[Plan]:
        """Goes away while the answer is streamed."""
        return [self._leaving("abort", self._rng.uniform(self.moments.first, self.moments.total)) for _ in range(2)]

    def _leaving(self, kind: str, after: float) -> Plan:
        return dataclasses.replace(self.victim(long=True, kind=kind), expects="nothing", leave=after)

    def _grammar(self) -> list[Plan]:
        broken: Sequence[dict[str, Any]] = (
            {"regex": "((("},
            {"ebnf": "root ::= ("},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no-such-type"}}}},
        )
        plan = self.victim(kind="grammar", share=0.5)
        return [dataclasses.replace(plan, expects="end", stream=False, extra=self._rng.choice(broken))]

    def _samples(self) -> list[Plan]:
        return [dataclasses.replace(self.victim(kind="samples", share=0.5), expects="either", stream=False, extra={"n": 2})]

    def _storm(self) -> list[Plan]:
        """Many at once: pages that have just been freed are used again at once."""
        return [self.victim(kind="storm", share=0.25) for _ in range(8)]

    def _room(self) -> list[Plan]:
        size = self._smallest + self._rng.randint(0, int(self.largest * 0.25))
        secrets = [new_secret(self._rng) for _ in range(2)]
        return [Plan("room", "either", secret, self._sizes.victim(secret, size), size, native=True) for secret in secrets]


ATTACKS: dict[str, Callable[[Planner], list[Plan]]] = {
    "oversize": Planner._oversize,
    "edge": Planner._edge,
    "disconnect": Planner._disconnect,
    "abort": Planner._abort,
    "grammar": Planner._grammar,
    "samples": Planner._samples,
    "storm": Planner._storm,
    "room": Planner._room,
}

#: How often each comes in a deck.
WEIGHTS = {"oversize": 4, "room": 2}


def deck(rng: random.Random, kinds: Sequence[str]) -> list[str]:
    """The next attacks: one of each, shuffled, then what is more frequent. The first is the one that leaks where anything does."""
    once = rng.sample(kinds, len(kinds))
    once.sort(key=lambda kind: kind != "oversize")
    more = [kind for kind in kinds for _ in range(WEIGHTS.get(kind, 1) - 1)]
    return once + rng.sample(more, len(more))
