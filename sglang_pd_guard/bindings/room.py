"""Seams of the room guard: when a room is free again. The refusal itself stands at the doors, in admission.py."""

from __future__ import annotations

from sglang_pd_guard.bindings import node as nodes


def sender_cleared(result, sender) -> None:
    """prefill. On decode the room stays its request's until SGLang has dropped the receiver: it clears a failed one twice, and
    in between the pages may still be held for writes to drain."""
    sender._pd_guard_ended = True
    use = getattr(sender, "_pd_guard_use", None)
    if use is not None:
        nodes.current().admissions.ended(sender.bootstrap_room, use)


def ensure_abort_notified(original, receiver, *args, **kwargs) -> None:
    """decode. Nobody writes to the pages of a request whose metadata prefill has dropped, and the room is another's there."""
    if not getattr(receiver, "_pd_guard_no_writer", False):
        original(receiver, *args, **kwargs)
