"""Seam of the audit."""

from __future__ import annotations

from sglang_pd_guard.bindings import node as nodes


def on_idle(result, scheduler) -> None:
    node = nodes.current()
    if not node.audit.due():
        return
    with node.shield("on_idle"):
        if not scheduler.is_fully_idle() or getattr(scheduler, "enable_hisparse", False):
            node.audit.busy()
            return
        owned = node.audit.look(_owned(node, scheduler))
        if owned is not None:
            node.telemetry.owned_when_idle(owned)


def _owned(node: nodes.Node, scheduler) -> dict[str, int]:
    stats = getattr(scheduler, "pool_stats_observer", scheduler).get_pool_stats()
    page_size = scheduler.token_to_kv_pool_allocator.page_size
    slots = scheduler.req_to_metadata_buffer_idx_allocator
    rooms = getattr(node.manager, "request_status", None)  # with pipeline parallelism, from 0.5.22 on, a store without a length
    known = node.occupied_rooms() if node.settings.runs("room") else 0
    return {
        "pages": -(-stats.get_kv_token_stats()[0] // page_size),
        "request_slots": scheduler.req_to_token_pool.size - scheduler.req_to_token_pool.available_size(),
        "metadata_slots": slots.size - slots.available_size(),
        "rooms": max(known, len(rooms) if isinstance(rooms, dict) else 0),
    }
