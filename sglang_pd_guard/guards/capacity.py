"""Capacity: decode must not admit a prompt that prefill cannot hold.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses

from sglang_pd_guard.guards.admission import Verdict

ALLOW = "--pd-guard-allow-capacity-mismatch"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one node admits.

    Args:
        longest: tokens of the longest prompt it admits and can schedule; 0 where that is not known.
        truncates: it runs with ``--allow-auto-truncate``.
    """

    longest: int = 0
    truncates: bool = False


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that a pair of nodes breaks, with the two numbers and what the operator can do."""

    rule: str
    prefill: int
    decode: int
    verdict: Verdict


def compare(prefill: Limits, decode: Limits) -> Finding | None:
    """Whether this prefill can serve that decode; the first rule that is broken, or None."""
    if prefill.truncates != decode.truncates:
        side = "prefill" if prefill.truncates else "decode"
        return Finding(
            "auto-truncate",
            int(prefill.truncates),
            int(decode.truncates),
            _refusal(
                f"--allow-auto-truncate is set on {side} alone, so a prompt that is too long has two lengths. "
                "Set it on both nodes or on none"
            ),
        )
    if prefill.longest and decode.longest > prefill.longest:
        return Finding(
            "capacity",
            prefill.longest,
            decode.longest,
            _refusal(
                f"decode admits prompts of {decode.longest} tokens, prefill can hold {prefill.longest}. Raise prefill's "
                "--max-total-tokens or --mem-fraction-static, or lower decode's --context-length or --max-total-tokens"
            ),
        )
    return None


def _refusal(what: str) -> Verdict:
    return Verdict(503, f"Refused by the PD guard: {what}, or start prefill with {ALLOW}.")
