"""What is known of SGLang's releases: their weaknesses without the guard, and what each transfer backend can do.

Pure data, one row for each fact; `doctor` prints it, and the README's table of versions is made of it
(``pd-guard doctor --markdown``).
"""

from __future__ import annotations

import dataclasses

from sglang_pd_guard.bindings import table
from sglang_pd_guard.bindings.table import order
from sglang_pd_guard.settings import GUARDS, Settings

ISSUES = "https://github.com/sgl-project/sglang/issues/"


@dataclasses.dataclass(frozen=True)
class Weakness:
    """Something that SGLang does wrong without the guard.

    Args:
        key: short name.
        what: what happens, in one sentence.
        guard: the guard that answers it.
        upstream: numbers of SGLang issues and pull requests; empty where none is known.
        seen: versions on which a test of this repository shows it; on the others of the range it was read in the source.
        since, until: first and last version that has it.
    """

    key: str
    what: str
    guard: str
    upstream: tuple[int, ...]
    seen: tuple[str, ...] = ()
    since: str = "0.5.11"
    until: str | None = None

    def concerns(self, version: str) -> bool:
        return order(self.since) <= order(version) and (self.until is None or order(version) <= order(self.until))

    def evidence(self, version: str) -> str:
        return "seen" if version in self.seen else "read"


WEAKNESSES: tuple[Weakness, ...] = (
    Weakness(
        "stub-transfer",
        "a prompt that prefill refuses and decode admits (longer than prefill's pool, say) is answered with HTTP 200 and text of "
        "the KV's former owner",
        "admission",
        (30233, 30325, 34208, 35421, 38704),
        seen=("0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.19"),
        until="0.5.19",
    ),
    Weakness(
        "silent-refusal",
        "prefill answers 400 and never tells decode: the client hangs, and while it waits its pages stay reserved",
        "admission",
        (9726, 36988),
        seen=("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
        since="0.5.20",
    ),
    Weakness(
        "silent-decode",
        "decode answers 400 and never tells prefill, whose client hangs",
        "admission",
        (9726,),
        seen=("0.5.23",),
    ),
    Weakness(
        "never-scheduled",
        "a prompt within one page of prefill's pool is admitted and never scheduled, and nobody behind it is",
        "admission",
        (),
        seen=("0.5.19", "0.5.23"),
    ),
    Weakness(
        "unknown-session",
        "a session id that decode does not know ends the decode scheduler",
        "admission",
        (),
        seen=("0.5.19",),
        until="0.5.20",
    ),
    Weakness(
        "no-count",
        "decode compares neither the tokens nor the pages of a transfer with what it reserved: a short one is answered from "
        "former owners' KV",
        "receipt",
        (38704,),
        seen=("0.5.22", "0.5.23"),
    ),
    Weakness(
        "stale-row",
        "a freed metadata row keeps its former request's room: transfers over TCP fail at random under load",
        "receipt",
        (27373, 27374),
        until="0.5.12.post1",
    ),
    Weakness(
        "shared-room",
        "two live requests with one bootstrap room: one is answered with the other's text, or hangs, or both schedulers crash",
        "room",
        (40125,),
        seen=("0.5.23",),
    ),
    Weakness(
        "several-samples",
        "n above 1 runs all samples in one bootstrap room: the client hangs",
        "room",
        (24223, 26486, 40297),
        seen=("0.5.23",),
    ),
    Weakness(
        "late-write",
        "pages of an aborted transfer are lent to others at once, while prefill may still write to them: wrong answers, no error",
        "release",
        (24527, 24578, 27372, 32564, 35049),
        seen=("0.5.18", "0.5.19", "0.5.20"),
        until="0.5.20",
    ),
    Weakness(
        "late-write-30s",
        'pages of an aborted transfer are lent to others after 30 s ("releasing anyway"), whether or not prefill has stopped writing',
        "release",
        (37077, 38961),
        seen=("0.5.21", "0.5.22", "0.5.23"),
        since="0.5.21",
    ),
    Weakness(
        "source-pages",
        "prefill gives the pages of an aborted transfer back while they are still read",
        "release",
        (38961,),
    ),
    Weakness(
        "pools-not-compared",
        "nothing compares the two pools, context lengths or --allow-auto-truncate, so decode admits what prefill cannot hold",
        "capacity",
        (24523, 35421),
    ),
    Weakness(
        "leaks-unseen",
        "request slots, metadata slots and rooms that an idle node still owns are in no metric",
        "audit",
        (26912,),
    ),
    Weakness(
        "plugins-fail-open",
        "a plugin or hook that does not load is one log line; the server starts without it",
        "core",
        (38464,),
    ),
)


def weaknesses(version: str) -> list[Weakness]:
    """What concerns this version, or the nearest that is known."""
    return [weakness for weakness in WEAKNESSES if weakness.concerns(table.nearest(version))]


def guards(version: str) -> list[str]:
    """The guards that run on this version, or the nearest that is known, if none is left out."""
    return table.guards(table.nearest(version), Settings())


@dataclasses.dataclass(frozen=True)
class Backend:
    """A transfer backend of SGLang.

    Args:
        holds: first version on which SGLang itself can hold the pages of a failed transfer until prefill acknowledges; None: on none.
        tested: whether this repository's tests run it.
        note: what else to know.
    """

    name: str
    holds: str | None
    tested: bool
    note: str


BACKENDS: tuple[Backend, ...] = (
    Backend("mooncake", "0.5.19", True, "tested over TCP; RDMA takes the same path and was not tested"),
    Backend("nixl", "0.5.19", False, "all guards are bound; a write that fails is not noticed, so its pages are not quarantined"),
    Backend("mori", "0.5.22", False, "all guards are bound; a write that fails is not noticed, so its pages are not quarantined"),
    Backend("ascend", "0.5.19", False, "as mooncake, whose engine it inherits"),
    Backend("fake", None, False, "transfers nothing: SGLang's warm-up and benchmarks; the guards leave it alone"),
)

#: From this version on SGLang holds such pages unless it is told not to; before, only if it is told to.
HOLDS_BY_DEFAULT = "0.5.21"
HOLDS_SWITCH = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"


def at_least(version: str, first: str | None) -> bool:
    """False also for a version that is no release number."""
    try:
        return first is not None and order(version) >= order(first)
    except ValueError:
        return False


def versions_table() -> str:
    """The README's table of versions, as Markdown."""
    rows = ["| SGLang | state | guards | known weaknesses without them |", "| --- | --- | --- | --- |"]
    for version, promise in table.SUPPORTED.items():
        state = "supported" if promise == "full" else "supported for admission and receipt; the others are bound"
        rows.append(f"| {version} | {state} | {_all_but(guards(version))} | {len(weaknesses(version))} |")
    rows.append("| any other | refused, unless `--pd-guard-allow-unverified` | | |")
    return "\n".join(rows)


def weaknesses_table() -> str:
    """The weaknesses in full, as Markdown."""
    rows = ["| weakness | SGLang | what happens | guard | upstream | shown by a test on |", "| --- | --- | --- | --- | --- | --- |"]
    for w in WEAKNESSES:
        span = f"from {w.since} on" if w.until is None else f"{w.since} to {w.until}"
        upstream = ", ".join(f"[#{n}]({ISSUES}{n})" for n in w.upstream) or "-"
        rows.append(f"| `{w.key}` | {span} | {w.what} | {w.guard} | {upstream} | {', '.join(w.seen) or 'none: read'} |")
    return "\n".join(rows)


def _all_but(bound: list[str]) -> str:
    out = [guard for guard in GUARDS if guard not in bound]
    return f"all but {', '.join(out)}" if out else "all"
