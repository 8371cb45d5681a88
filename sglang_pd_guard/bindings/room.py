"""Seams of the room guard: when a room is free again. The refusal itself stands at the doors, in admission.py."""

from __future__ import annotations

import contextlib

from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.admission import guarded_room


def sender_cleared(result, sender) -> None:
    """prefill. On decode the room stays its request's until SGLang has dropped the receiver: it clears a failed one twice, and
    in between the pages may still be held for writes to drain."""
    sender._pd_guard_ended = True
    use = getattr(sender, "_pd_guard_use", None)
    if use is not None:
        nodes.current().admissions.ended(sender.bootstrap_room, use)


def waiting_aborted(original, scheduler, *args, **kwargs):
    """prefill. What SGLang takes out of its waiting queue otherwise than into a batch, it forgets."""
    waiting = list(scheduler.waiting_queue)
    result = original(scheduler, *args, **kwargs)
    if len(waiting) != len(scheduler.waiting_queue):
        node = nodes.current()
        left = set(map(id, scheduler.waiting_queue))
        for req in waiting:
            if id(req) not in left and guarded_room(req) is not None:
                node.abandon(req)
    return result


def chunked_aborted(original, scheduler) -> None:
    """prefill. So it does with a request that it ends between two chunks."""
    req = scheduler.chunked_req
    original(scheduler)
    if req is not None and scheduler.chunked_req is None and guarded_room(req) is not None:
        nodes.current().abandon(req)


def step(result, scheduler, *args, **kwargs) -> None:
    """prefill, once a step, alike on all ranks: clears what SGLang has forgotten once its last write has returned."""
    node = nodes.current()
    if not node.abandoned:
        return
    groups = (getattr(scheduler, name, None) for name in ("attn_cp_cpu_group", "attn_tp_cpu_group"))
    abandoned, node.abandoned = node.abandoned, []
    for sender, done in zip(abandoned, node.returned(abandoned, *groups), strict=True):
        if not done:
            node.abandoned.append(sender)
        elif not getattr(sender, "_pd_guard_ended", False):
            with contextlib.suppress(Exception):  # SGLang's own way to clear a failed sender, and to drop the reason
                sender.failure_exception()


def ensure_abort_notified(original, receiver, *args, **kwargs) -> None:
    """decode. Nobody writes to the pages of a request whose metadata prefill has dropped, and the room is another's there."""
    if not getattr(receiver, "_pd_guard_no_writer", False):
        original(receiver, *args, **kwargs)
