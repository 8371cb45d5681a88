"""What is wrong with a set of prefill and decode servers, judged from what they say of themselves.

Pure: `audit` reads the servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from sglang_pd_guard.cli import known
from sglang_pd_guard.settings import GUARDS

Role = Literal["prefill", "decode"]

#: Worst first.
SEVERITIES = ("error", "warning", "info")

#: Clocks further apart than this make logs hard to match; HTTP dates tell whole seconds.
CLOCKS_APART_S = 5.0


@dataclasses.dataclass(frozen=True)
class Guard:
    """The guard of one node, as its metrics tell it."""

    version: str
    mode: str
    peer: str


@dataclasses.dataclass(frozen=True)
class Node:
    """What one server says of itself. None: it does not say.

    Args:
        role: what the operator calls it; `mode` is what it says.
        pool: tokens of its KV pool.
        context: longest sequence it advertises, ``max_model_len``.
        intake: from so many tokens on its intake refuses a prompt, ``max_req_input_len``.
        guard: None where it has none, or where that is not known: see `metrics`.
        metrics: whether its ``/metrics`` could be read, without which nothing of the guard is known.
        guards: the guards of a prefill, from its bootstrap server.
        owned: what it still owned when it was last idle, by kind.
        quarantined: pages that wait for a prefill that does not answer; `admitting` is False where they are too many.
        clock: seconds by which its clock is ahead of the reader's.
    """

    url: str
    role: Role
    mode: str | None = None
    sglang: str | None = None
    pool: int | None = None
    context: int | None = None
    intake: int | None = None
    page_size: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    page_major: bool | None = None
    backend: str | None = None
    bootstrap_port: int | None = None
    truncates: bool | None = None
    weights: str | None = None
    architectures: tuple[str, ...] | None = None
    checksum: bool | None = None
    canary: str | None = None
    metrics: bool = False
    guard: Guard | None = None
    guards: tuple[str, ...] | None = None
    owned: dict[str, int] = dataclasses.field(default_factory=dict)
    quarantined: int = 0
    admitting: bool = True
    faults: int = 0
    clock: float | None = None

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt that its intake admits."""
        if self.intake is not None:
            return self.intake - 1
        known_limits = [limit for limit in (self.pool, self.context) if limit is not None]
        return min(known_limits) - 7 if known_limits else None

    @property
    def kv(self) -> str | None:
        """The KV cache's type; ``auto`` is the model's own."""
        kind = self.dtype if self.kv_dtype in (None, "auto") else self.kv_dtype
        return None if kind == "auto" else kind

    @property
    def enforcing(self) -> bool:
        return self.guard is not None and self.guard.mode == "enforce"

    def runs(self, guard: str) -> bool:
        """Whether this node's guard acts, as far as is known: decode does not say which guards it runs."""
        return self.enforcing and (self.guards is None or guard in self.guards)


@dataclasses.dataclass(frozen=True)
class Worker:
    """A server that the router sends requests to."""

    url: str
    role: str
    bootstrap_port: int | None = None
    healthy: bool = True


@dataclasses.dataclass(frozen=True)
class Finding:
    """Args:
    rule: its name.
    nodes: URLs of those concerned.
    what: what is so, with the numbers.
    then: what can happen.
    change: what to change.
    """

    rule: str
    severity: Literal["error", "warning", "info"]
    nodes: tuple[str, ...]
    what: str
    then: str
    change: str


def examine(nodes: Sequence[Node], workers: Sequence[Worker] | None = None) -> list[Finding]:
    """All findings, the worst first.

    Args:
        workers: what the router knows, where there is one.
    """
    prefills = [node for node in nodes if node.role == "prefill"]
    decodes = [node for node in nodes if node.role == "decode"]
    found: list[Finding] = []
    for node in nodes:
        found += _alone(node)
    for prefill in prefills:
        for decode in decodes:
            found += _pair(prefill, decode)
    for role in (prefills, decodes):
        found += _siblings(role)
    found += _clocks(nodes)
    if workers is not None:
        found += _router(nodes, workers)
    return sorted(dict.fromkeys(found), key=lambda finding: SEVERITIES.index(finding.severity))


def worst(found: Iterable[Finding]) -> str | None:
    return min((finding.severity for finding in found), key=SEVERITIES.index, default=None)


# --- one node --------------------------------------------------------------------------------------------------


def _alone(node: Node) -> Iterable[Finding]:
    at = (node.url,)
    if node.mode is not None and node.mode != node.role:
        yield Finding(
            "role", "error", at,
            f"it is called {node.role} and runs with --disaggregation-mode {node.mode}",
            "requests reach a server that does not do that part of the work", "give it to the other option, or start it anew",
        )  # fmt: skip
    if node.pool is not None and node.context is not None and node.pool < node.context:
        yield Finding(
            "window", "warning", at,
            f"this {node.role} advertises a context of {node.context} tokens and its KV pool holds {node.pool}",
            f"prompts of more than {node.longest} tokens are refused, though clients are told that they fit",
            f"--context-length {node.pool} at most, or a larger --max-total-tokens or --mem-fraction-static",
        )  # fmt: skip
    if node.backend == "fake":
        yield Finding("fake-backend", "error", at, "the transfer backend is fake", "no KV is transferred: answers are made up", "--disaggregation-transfer-backend mooncake")  # fmt: skip
    elif (backend := next((b for b in known.BACKENDS if b.name == node.backend), None)) is not None and not backend.tested and node.guard:
        yield Finding("untested-backend", "info", at, f"the guard was not tested with the transfer backend {node.backend}", backend.note, "-")  # fmt: skip
    if node.canary == "raise":
        yield Finding("canary", "warning", at, "--kv-canary raise", "one bad page ends the whole server", "--kv-canary log")  # fmt: skip
    yield from _guard(node)
    yield from _accounts(node)


def _guard(node: Node) -> Iterable[Finding]:
    at = (node.url,)
    if not node.metrics:
        yield Finding(
            "unknown-guard", "warning", at, "its /metrics cannot be read", "nothing can be said of its guard",
            "start it with --enable-metrics",
        )  # fmt: skip
        return
    if node.guard is None:
        keys = [w.key for w in known.weaknesses(node.sglang)] if node.sglang else []
        yield Finding(
            "unguarded", "warning", at, f"SGLang {node.sglang or 'of an unknown version'} runs without the guard",
            f"known weaknesses: {', '.join(keys)}" if keys else "known weaknesses of SGLang are open",
            "--enable-pd-guard",
        )  # fmt: skip
        yield from _holds(node)
        return
    if node.guard.mode == "observe":
        yield Finding("observe", "warning", at, "the guard only observes", "nothing is refused", "--pd-guard-mode enforce")  # fmt: skip
    if node.guard.peer == "prefer":
        yield Finding(
            "peer", "info", at, "--pd-guard-peer prefer", "an unguarded peer is served",
            "--pd-guard-peer require, once the rolling upgrade is over",
        )  # fmt: skip
    if node.guards is not None and (off := [guard for guard in GUARDS if guard not in node.guards]):
        yield Finding(
            "disabled", "warning", at, f"guards that do not run: {', '.join(off)}", "what they stop is not stopped",
            "leave them out of --pd-guard-disable, where this SGLang version has their seams",
        )  # fmt: skip
        if "release" in off:
            yield from _holds(node)


def _holds(node: Node) -> Iterable[Finding]:
    """Where no release guard runs: what SGLang does by itself with the pages of a failed transfer."""
    backend = next((b for b in known.BACKENDS if b.name == node.backend), None)
    if (node.role != "decode" and node.guard is None) or node.sglang is None or node.backend == "fake":
        return
    holds = backend is not None and known.at_least(node.sglang, backend.holds)
    if holds and known.at_least(node.sglang, known.HOLDS_BY_DEFAULT):
        what, change = f"SGLang {node.sglang} holds the pages of a failed transfer for 30 s at most", "--enable-pd-guard"
    elif holds:
        what = f"SGLang {node.sglang} holds the pages of a failed transfer only with {known.HOLDS_SWITCH}=1, which cannot be seen from here"
        change = f"--enable-pd-guard, or {known.HOLDS_SWITCH}=1"
    else:
        what = f"SGLang {node.sglang} with {node.backend or 'this backend'} never holds the pages of a failed transfer"
        change = "--enable-pd-guard" if "release" in known.guards(node.sglang) else "a newer SGLang, with --enable-pd-guard"
    yield Finding("release", "warning", (node.url,), what, "a late write lands in the KV of the pages' next owner", change)


def _accounts(node: Node) -> Iterable[Finding]:
    at = (node.url,)
    if any(node.owned.values()):
        owned = ", ".join(f"{number} {kind}" for kind, number in sorted(node.owned.items()) if number)
        yield Finding("leak", "error", at, f"it owned {owned} while idle", "capacity is lost until it is restarted", "restart it; report the log")  # fmt: skip
    if node.quarantined:
        full = not node.admitting
        yield Finding(
            "quarantine", "error" if full else "warning", at,
            f"{node.quarantined} pages are quarantined" + (", more than --pd-guard-max-quarantined allows" if full else ""),
            "every request is refused, and /health is 503" if full else "they are not used: their prefill is gone or its writes fail",
            "start a prefill at the same address, or restart this decode",
        )  # fmt: skip
    if node.faults:
        yield Finding("faults", "warning", at, f"{node.faults} faults inside the guard", "each aborted its request", "report the log")  # fmt: skip


# --- two nodes -------------------------------------------------------------------------------------------------


def _pair(prefill: Node, decode: Node) -> Iterable[Finding]:
    at = (prefill.url, decode.url)
    yield from _capacity(prefill, decode)
    yield from _truncation(prefill, decode)
    for rule, severity, mine, theirs, what, then, change in (
        ("page-size", "error", prefill.page_size, decode.page_size, "pages of {} tokens on prefill, {} on decode",
         "KV is written to the wrong places, or no transfer succeeds", "the same --page-size on both"),
        ("kv-dtype", "error", prefill.kv, decode.kv, "KV of type {} on prefill, {} on decode",
         "decode reads KV that it cannot understand", "the same --kv-cache-dtype on both"),
        ("kv-layout", "error", prefill.page_major, decode.page_major, "--enable-page-major-kv-layout is {} on prefill, {} on decode",
         "decode reads KV that it cannot understand", "the same on both"),
        ("backend", "error", prefill.backend, decode.backend, "transfer backend {} on prefill, {} on decode",
         "no transfer succeeds", "the same --disaggregation-transfer-backend on both"),
        ("model", "error", prefill.architectures, decode.architectures, "model {} on prefill, {} on decode",
         "decode reads KV of another model", "the same model on both"),
        ("weights", "warning", prefill.weights, decode.weights, "weight version {} on prefill, {} on decode",
         "the KV is of other weights than those that read it", "update both"),
        ("sglang", "warning", prefill.sglang, decode.sglang, "SGLang {} on prefill, {} on decode",
         "the rows of metadata that they exchange differ between releases", "the same version on both"),
        ("checksum", "warning", prefill.checksum, decode.checksum, "--disaggregation-enable-kv-checksum is {} on prefill, {} on decode",
         "nothing is compared, or every request fails", "the same on both"),
        ("canary", "error", _canary(prefill), _canary(decode), "--kv-canary is {} on prefill, {} on decode",
         "the canary adds buffers to what is transferred: the lists of buffers differ", "the same on both"),
    ):  # fmt: skip
        if mine is not None and theirs is not None and mine != theirs:
            yield Finding(rule, severity, at, what.format(_word(mine), _word(theirs)), then, change)
    yield from _guards(prefill, decode)


def _capacity(prefill: Node, decode: Node) -> Iterable[Finding]:
    mine, theirs = prefill.longest, decode.longest
    if mine is None or theirs is None or theirs <= mine:
        return
    what = f"prefill admits prompts of up to {mine} tokens ({_numbers(prefill)}), decode of up to {theirs} ({_numbers(decode)})"
    if prefill.runs("admission") and decode.enforcing:
        severity = "warning"
        then = (
            f"the guard refuses prompts of {mine + 1} tokens and more, and without --pd-guard-allow-capacity-mismatch on prefill "
            "every request (503)"
        )
    elif prefill.sglang is not None and any(w.key == "stub-transfer" for w in known.weaknesses(prefill.sglang)):
        severity = "error"
        then = f"a prompt of {mine + 1} to {theirs} tokens is answered from the KV of others, with HTTP 200"
    else:
        severity = "error"
        then = f"a prompt of {mine + 1} to {theirs} tokens is refused by prefill and waits on decode, with its pages, until it times out"
    bound = f"{decode.pool} or more" if decode.pool is not None and (decode.context is None or decode.pool <= decode.context) else "more"
    yield Finding(
        "capacity", severity, (prefill.url, decode.url), what, then,
        f"raise prefill's --max-total-tokens to {bound} (or its --mem-fraction-static), or give both "
        f"--context-length {prefill.pool if prefill.pool is not None else mine} at most",
    )  # fmt: skip


def _numbers(node: Node) -> str:
    return ", ".join(
        f"{name} {value} tokens" for name, value in (("KV pool", node.pool), ("context", node.context)) if value is not None
    )


def _truncation(prefill: Node, decode: Node) -> Iterable[Finding]:
    if not (prefill.truncates or decode.truncates):
        return
    at = (prefill.url, decode.url)
    hang = "the lengths that they compute with differ: the request hangs, or is refused where the guard runs"
    if prefill.truncates != decode.truncates:
        side = "prefill" if prefill.truncates else "decode"
        yield Finding("auto-truncate", "error", at, f"--allow-auto-truncate is set on {side} alone", hang, "set it on both or on none")  # fmt: skip
    elif None not in (prefill.longest, decode.longest) and prefill.longest != decode.longest:
        yield Finding(
            "auto-truncate", "error", at,
            f"both truncate, prefill to {prefill.longest} tokens and decode to {decode.longest}", hang,
            "the same --context-length on both, within both pools; or no --allow-auto-truncate",
        )  # fmt: skip


def _guards(prefill: Node, decode: Node) -> Iterable[Finding]:
    if not (prefill.metrics and decode.metrics):
        return
    at = (prefill.url, decode.url)
    if (prefill.guard is None) != (decode.guard is None):
        guarded, bare = (prefill, decode) if prefill.guard else (decode, prefill)
        refuses = guarded.guard.peer == "require" and guarded.enforcing
        yield Finding(
            "one-sided", "error" if refuses else "warning", at, f"only {guarded.role} runs the guard",
            f"{guarded.role} refuses every request of its peer (503)" if refuses else "what needs both sides is not guarded",
            f"--enable-pd-guard on {bare.role}; during a rolling upgrade --pd-guard-peer prefer on {guarded.role}",
        )  # fmt: skip
    elif prefill.guard and decode.guard and prefill.guard.version != decode.guard.version:
        yield Finding(
            "guard-version", "warning", at,
            f"guard {prefill.guard.version} on prefill, {decode.guard.version} on decode",
            "what only one of them knows is not guarded", "the same version on both",
        )  # fmt: skip


# --- more than two ---------------------------------------------------------------------------------------------


def _siblings(nodes: Sequence[Node]) -> Iterable[Finding]:
    pools = {node.pool for node in nodes if node.pool is not None}
    if len(pools) > 1:
        yield Finding(
            "unequal-pools", "info", tuple(node.url for node in nodes),
            f"{nodes[0].role} pools of {', '.join(map(str, sorted(pools)))} tokens",
            "whether a long prompt is served depends on where it lands", "the same --max-total-tokens on all",
        )  # fmt: skip


def _clocks(nodes: Sequence[Node]) -> Iterable[Finding]:
    clocks = [(node.clock, node.url) for node in nodes if node.clock is not None]
    if len(clocks) > 1:
        (early, behind), (late, ahead) = min(clocks), max(clocks)
        if late - early > CLOCKS_APART_S:
            yield Finding(
                "clocks", "warning", (behind, ahead), f"their clocks are {late - early:.0f} s apart",
                "the two logs of a request cannot be matched by time", "NTP",
            )  # fmt: skip


def _router(nodes: Sequence[Node], workers: Sequence[Worker]) -> Iterable[Finding]:
    by_url = {node.url: node for node in nodes}
    for worker in workers:
        node = by_url.pop(worker.url, None)
        if not worker.healthy:
            yield Finding("router", "warning", (worker.url,), "the router holds it for unhealthy", "it gets no requests", "look at its log")  # fmt: skip
        if node is None:
            yield Finding("router", "warning", (worker.url,), f"the router sends to it as {worker.role}; it was not audited", "-", f"add --{worker.role} {worker.url}")  # fmt: skip
        elif worker.role != node.role:
            yield Finding("router", "error", (worker.url,), f"the router sends to it as {worker.role}, it is {node.role}", "requests hang", "correct the router's options")  # fmt: skip
        elif node.role == "prefill" and None not in (worker.bootstrap_port, node.bootstrap_port) and worker.bootstrap_port != node.bootstrap_port:
            yield Finding(
                "router", "error", (worker.url,),
                f"the router names bootstrap port {worker.bootstrap_port}, prefill has {node.bootstrap_port}",
                "decode does not find its prefill: requests hang", "correct the router's --prefill",
            )  # fmt: skip
    for url in by_url:
        yield Finding("router", "info", (url,), "the router does not know it", "it gets no requests from this router", "-")


def _canary(node: Node) -> str | None:
    return None if node.canary is None else "off" if node.canary == "none" else "on"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "set" if value else "not set"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
