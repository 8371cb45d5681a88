"""Metrics on SGLang's own /metrics and one structured log line per event. Never a token, a prompt or a page."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from pathlib import Path

logger = logging.getLogger("sglang_pd_guard")

PREFIX = "sglang:pd_guard_"
_BINDINGS = Path(__file__).parent / "bindings"

#: name -> (kind, help, labels); a counter appears on /metrics with the suffix _total.
METRICS = {
    "info": ("gauge", "1 on a guarded scheduler, with its configuration as labels.", ("version", "role", "mode", "peer")),
    "refused": ("counter", "Requests refused by a guard of this node.", ("role", "guard", "rule")),
    "observed": ("counter", "Requests that a guard in observe mode would have refused.", ("role", "guard", "rule")),
    "peer_refusals": ("counter", "Refusals exchanged with peers.", ("role", "direction")),
    "unguarded_peers": ("counter", "Requests whose peer runs without a guard.", ("role", "action")),
    "rooms": ("gauge", "Rooms this rank remembers: asked for, refused here, refused by the peer.", ("role", "state")),
    "faults": ("counter", "Faults inside the guard itself; each aborted its request.", ("role",)),
    "findings": ("counter", "Requests whose peer's capacity does not fit this node's.", ("role", "rule", "action")),
    "owned_when_idle": ("gauge", "What an idle scheduler still owns: more than 0 is a leak.", ("role", "kind")),
    "held_pages": ("gauge", "KV pages of failed transfers that prefill may still write to, by state.", ("role", "state")),
    "admitting": ("gauge", "0 while more pages are quarantined than the limit allows, so that every request is refused.", ("role",)),
    "hold_seconds": ("histogram", "How long such pages were held.", ("role",)),
    "late_acks": ("counter", "Words that a request's writes have ended, for a request that does not wait for them.", ("role",)),
    "dropped_refusals": ("counter", "Refusals that could not be sent to the peer.", ("role",)),
}


#: The counters that alerts watch are on /metrics at 0 from the start: Prometheus' increase() does not see a counter that is born at 1.
AT_ZERO: dict[str, list[tuple[str, ...]]] = {
    "refused": [
        *(("receipt", rule) for rule in ("absent", "checksum", "damaged", "nonce", "pages", "prefix", "prompt", "room", "tokens")),
        *(("ownership", rule) for rule in ("foreign", "freed", "other-rank", "plan", "prefix", "stale", "unwritten")),
        *(("room", rule) for rule in ("in-use", "other-prompt", "several-samples")),
    ],
    "unguarded_peers": [("served",), ("refused",)],
    "findings": [(rule, action) for rule in ("auto-truncate", "capacity") for action in ("served", "refused")],
    "faults": [()],
    "dropped_refusals": [()],
}

#: How SGLang's ranks, one process each, make one number of a gauge. The others say the same on each rank.
_OF_RANKS = {"owned_when_idle": "max", "held_pages": "max", "rooms": "max", "admitting": "min"}


@functools.cache
def _metric(name: str):
    from prometheus_client import Counter, Gauge, Histogram

    kind, text, labels = METRICS[name]
    if kind == "histogram":
        return Histogram(PREFIX + name, text, labels, buckets=(0.001, 0.01, 0.1, 1, 3, 10, 30, 100, 300, 1000, 3600))
    if kind == "gauge":
        return Gauge(PREFIX + name, text, labels, multiprocess_mode=_OF_RANKS.get(name, "mostrecent"))
    return Counter(PREFIX + name, text, labels)


class Telemetry:
    """The metrics and events of one scheduler process."""

    def __init__(self, role: str):
        self.role = role

    def start(
        self, version: str, mode: str, peer: str, guards: list[str], sglang: str, patches: frozenset[str]
    ) -> None:
        _metric("info").labels(version, self.role, mode, peer).set(1)
        _metric("admitting").labels(self.role).set(1)
        for name, sets in AT_ZERO.items():
            for labels in sets:
                _metric(name).labels(self.role, *labels)
        logger.info(
            "pd-guard bound version=%s sglang=%s role=%s mode=%s peer=%s guards=%s%s",
            version, sglang, self.role, mode, peer, ",".join(guards) or "none",
            f" patches={','.join(sorted(patches))}" if patches else "",
        )  # fmt: skip

    def rooms(self, count: dict[str, int]) -> None:
        for state, number in count.items():
            _metric("rooms").labels(self.role, state).set(number)

    def refused(
        self, guard: str, rule: str, rid: str | None, room: int | None, status: int, enforced: bool, numbers: str = ""
    ) -> None:
        """Args:
        numbers: `` expected=... found=...``, where the rule compares two.
        """
        _metric("refused" if enforced else "observed").labels(self.role, guard, rule).inc()
        logger.warning(
            "pd-guard %s guard=%s rule=%s role=%s rid=%s room=%s status=%s%s",
            "refused" if enforced else "would-refuse", guard, rule, self.role, rid, room, status, numbers,
        )  # fmt: skip

    def finding(self, rule: str, refused: bool, peer: str, prefill: int, decode: int, *, first: bool) -> None:
        """A peer's capacity does not fit; logged for the first request of each peer, counted for all."""
        action = "refused" if refused else "served"
        _metric("findings").labels(self.role, rule, action).inc()
        if first:
            logger.warning(
                "pd-guard finding guard=capacity rule=%s action=%s role=%s peer=%s prefill=%s decode=%s",
                rule, action, self.role, peer, prefill, decode,
            )  # fmt: skip

    def held(self, pages: dict[str, int]) -> None:
        for state, number in pages.items():
            _metric("held_pages").labels(self.role, state).set(number)

    def quarantined(self, rid: str, room: int, pages: int, peer: str) -> None:
        logger.warning("pd-guard quarantined guard=release role=%s rid=%s room=%s pages=%s peer=%s", self.role, rid, room, pages, peer)

    def admitting(self, admitting: bool, pages: int) -> None:
        _metric("admitting").labels(self.role).set(admitting)
        logger.warning("pd-guard admitting=%s guard=release role=%s quarantined_pages=%s", admitting, self.role, pages)

    def released(self, seconds: float) -> None:
        _metric("hold_seconds").labels(self.role).observe(seconds)

    def late_ack(self) -> None:
        _metric("late_acks").labels(self.role).inc()

    def owned_when_idle(self, owned: dict[str, int]) -> None:
        for kind, number in owned.items():
            _metric("owned_when_idle").labels(self.role, kind).set(number)
        what = " ".join(f"{kind}={number}" for kind, number in owned.items())
        logger.log(
            logging.WARNING if any(owned.values()) else logging.INFO,
            "pd-guard audit guard=audit role=%s idle node owns %s", self.role, what,
        )  # fmt: skip

    def peer_refusal(self, direction: str, room: int, status: int) -> None:
        _metric("peer_refusals").labels(self.role, direction).inc()
        logger.info("pd-guard peer-refusal direction=%s role=%s room=%s status=%s", direction, self.role, room, status)

    def unguarded_peer(self, action: str, room: int | None, peer: str) -> None:
        _metric("unguarded_peers").labels(self.role, action).inc()
        logger.warning("pd-guard unguarded-peer action=%s role=%s room=%s peer=%s", action, self.role, room, peer)

    def fault(self, seam: str, rid: str | None, room: int | None) -> None:
        _metric("faults").labels(self.role).inc()
        # The exception's text may quote the request: only its type and place are logged.
        kind, _, trace = sys.exc_info()
        frames = traceback.extract_tb(trace)
        ours = next((path for frame in frames if (path := Path(frame.filename)).parent == _BINDINGS and path.stem != "node"), None)
        logger.error(
            "pd-guard fault guard=%s seam=%s role=%s rid=%s room=%s error=%s at=%s:%s",
            ours.stem if ours else "core", seam, self.role, rid, room, kind and kind.__name__,
            frames[-1].filename if frames else None, frames[-1].lineno if frames else None,
        )  # fmt: skip

    def dropped_refusal(self, room: int) -> None:
        _metric("dropped_refusals").labels(self.role).inc()
        logger.warning("pd-guard dropped-refusal role=%s room=%s", self.role, room)
