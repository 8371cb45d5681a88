"""Room: one bootstrap room, one request.

SGLang keys everything it knows of a transfer by the room's number, which clients choose. Two live requests in one
room get each other's KV, or wait for ever.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

from sglang_pd_guard.guards.admission import Verdict

_AGAIN = "Send this one again with a room of its own: a random 63-bit number, as the PD router chooses."


def in_use(room: int) -> Verdict:
    """Said to a request whose room belongs to another request that has not ended on this node."""
    return Verdict(
        400,
        f"Bootstrap room {room} is in use by another request. {_AGAIN}",
        "BadRequestError",
    )


def other_prompt(room: int) -> Verdict:
    """Said to both requests where prefill holds one in `room` and decode another."""
    return Verdict(
        400,
        f"Bootstrap room {room} is in use by another request: prefill and decode hold different prompts in it. {_AGAIN} If no "
        "two requests shared the room, one node truncated the prompt: set --allow-auto-truncate on both or on neither.",
        "BadRequestError",
    )


def several_samples(n: int) -> Verdict:
    """Said to a request for more than one sample: SGLang runs them all in the one room that the request has."""
    return Verdict(
        400,
        f"n={n} is not supported with prefill/decode disaggregation. Send {n} requests with n=1.",
        "BadRequestError",
    )
