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
    """prefill. So it does with a request that it ends between two chunks; not while a chunk of it is being written, for its pages go
    with it. SGLang asks again in every step; what is past its last chunk by then, `retire_aborted_result` keeps.
    """
    node, req = nodes.current(), scheduler.chunked_req
    sender = getattr(req, "disagg_kv_sender", None)
    if sender is None or guarded_room(req) is None or getattr(scheduler, "_pending_chunked_abort_req", None) is not req:
        original(scheduler)
        return
    if node.keeps_source(sender):
        if getattr(sender, "conclude_state", None) is None:
            with node.shield("chunked_aborted", req):
                sender.abort()  # tells decode, and no further write starts
        return
    original(scheduler)
    if scheduler.chunked_req is None:
        node.abandon(req)


def step(result, scheduler, *args, **kwargs) -> None:
    """prefill, once a step, alike on all ranks: clears what SGLang has forgotten once its last write has returned."""
    node = nodes.current()
    if not node.abandoned:
        return
    abandoned, node.abandoned = node.abandoned, []
    for sender, done in zip(abandoned, node.returned(abandoned, *node.groups()), strict=True):
        if not done:
            node.abandoned.append(sender)
        elif not getattr(sender, "_pd_guard_ended", False):
            with contextlib.suppress(Exception):  # SGLang's own way to clear a failed sender, and to drop the reason
                sender.failure_exception()


def ensure_abort_notified(original, receiver, *args, **kwargs) -> None:
    """decode. Nobody writes to the pages of a request whose metadata prefill has dropped, and the room is another's there."""
    if not getattr(receiver, "_pd_guard_no_writer", False):
        original(receiver, *args, **kwargs)
