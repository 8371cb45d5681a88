"""What a run of the probe has found.

Pure. Nothing here keeps a prompt or an answer: an answer may hold text of real users.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from sglang_pd_guard.cli.probe.secrets import Leak

#: A right answer; a refusal (4xx); either of them; any end; nothing, since the client goes away.
Expects = Literal["answer", "refusal", "either", "end", "nothing"]

#: Findings that fail a run, in the order of the report.
FAULTS = ("leak", "wrong-answer", "hang", "wrong-status", "failed", "pages")


@dataclasses.dataclass
class Request:
    """One request of the run and what came of it.

    Args:
        owner: its number.
        kind: ``victim`` or the name of an attack.
        phase: ``quiet``, ``attack`` or ``after``.
        expects: what may come of it.
        begin: seconds since the run's start.
        size: tokens of the prompt, as far as known.
        error: why there is no complete answer, in a word; ``timeout`` where it did not end in time.
        first, gaps, seconds: to the first piece of the answer, between pieces, and all of it.
        right: its own secret stands in the answer.
        fault: the first of `FAULTS` that applies.
    """

    owner: int
    kind: str
    phase: str
    expects: Expects
    begin: float
    size: int
    status: int | None
    finish: str | None
    error: str | None
    first: float | None
    gaps: list[float]
    seconds: float
    right: bool
    leaks: list[Leak]
    fault: str | None = None

    @property
    def answered(self) -> bool:
        """A complete answer, as far as status and finish reason tell."""
        return self.status == 200 and self.error is None and self.finish not in (None, "abort", "error")


def judge(request: Request, checkable: bool) -> str | None:
    """The fault of one request, or None.

    Args:
        checkable: this model answers the task right when it is left in peace, so a wrong answer is one.
    """
    if request.leaks:
        return "leak"
    if request.expects == "nothing":
        return None
    if request.error == "timeout":
        return "hang"
    answered = request.answered
    if request.expects == "answer" and not answered:
        return "failed"
    if request.expects == "refusal" and (request.status is None or not 400 <= request.status < 500):
        return "wrong-status"
    if request.expects == "either" and not answered and (request.status is None or not 400 <= request.status < 500):
        return "wrong-status"
    if answered and request.expects in ("answer", "either") and checkable and not request.right:
        return "wrong-answer"
    return None


def checkable(requests: Iterable[Request]) -> bool:
    """Whether wrong answers count: every answer of the quiet phase was right."""
    quiet = [r for r in requests if r.phase == "quiet" and r.status == 200]
    return bool(quiet) and all(r.right for r in quiet)


@dataclasses.dataclass(frozen=True)
class Finding:
    fault: str
    count: int
    what: str


def findings(requests: Sequence[Request], pages: dict[str, int]) -> list[Finding]:
    """The faults, worst first.

    Args:
        pages: tokens' worth of KV that each node has not got back, by URL.
    """
    found = []
    for fault in FAULTS[:-1]:
        these = [r for r in requests if r.fault == fault]
        if these:
            kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(r.kind for r in these).most_common())
            found.append(Finding(fault, len(these), f"{_WORDS[fault]}: {kinds}{_leaked(these)}"))
    lost = {url: tokens for url, tokens in pages.items() if tokens > 0}
    if lost:
        what = ", ".join(f"{tokens} tokens on {url}" for url, tokens in lost.items())
        found.append(Finding("pages", len(lost), f"{_WORDS['pages']}: {what}"))
    return found


_WORDS = {
    "leak": "answers with another request's secret",
    "wrong-answer": "answers without their own secret",
    "hang": "requests without an end",
    "wrong-status": "requests that had to be refused with a 4xx and were not",
    "failed": "healthy requests that were not answered",
    "pages": "KV that was not given back",
}


def _leaked(requests: Sequence[Request]) -> str:
    leaks = [leak for r in requests for leak in r.leaks]
    if not leaks:
        return ""
    kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(leak.kind for leak in leaks).most_common())
    return f"; {kinds}, longest {max(leak.letters for leak in leaks)} letters, {sum(leak.split for leak in leaks)} split over pieces"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank: the smallest value that at least this share of all do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def latencies(requests: Iterable[Request]) -> dict[str, dict[str, dict[str, float | None]]]:
    """TTFT and ITL percentiles of answered victims: quiet and under attack, in seconds."""
    chosen = [r for r in requests if r.kind == "victim" and r.first is not None and r.fault is None]
    out: dict[str, dict[str, dict[str, float | None]]] = {}
    for phase in ("quiet", "attack"):
        here = [r for r in chosen if r.phase == phase]
        values = {"ttft": [r.first for r in here if r.first is not None], "itl": [gap for r in here for gap in r.gaps]}
        out[phase] = {
            name: {"n": len(v)} | {f"p{int(100 * share)}": percentile(v, share) for share in (0.5, 0.9, 0.99)} for name, v in values.items()
        }
    return out


def by_kind(requests: Sequence[Request]) -> list[dict[str, object]]:
    """A row for each kind of request, in the order in which they came."""
    rows = []
    for kind in dict.fromkeys(r.kind for r in requests):
        these = [r for r in requests if r.kind == kind]
        faults = Counter(r.fault for r in these if r.fault)
        rows.append({
            "kind": kind, "sent": len(these), "answered": sum(r.answered for r in these),
            "refused": sum(r.status is not None and 400 <= r.status < 500 for r in these),
            "left": sum(r.expects == "nothing" and not r.answered for r in these),
            **{fault: faults[fault] for fault in FAULTS[:-1]},
        })  # fmt: skip
    return rows
