"""Seams of the room guard. The refusal itself stands at the doors, in admission.py."""

from __future__ import annotations

from sglang_pd_guard.bindings.node import Node
from sglang_pd_guard.guards import room as rooms


def transfer_cleared(result, transfer) -> None:
    transfer._pd_guard_ended = True


def is_late(node: Node, frames: list[bytes]) -> bool:
    """decode: whether this is SGLang's status message for a room in which no request lives; it is dropped then.

    SGLang would store it (for ever, or until the room's number is used again).
    """
    if not node.settings.runs("room") or not node.settings.enforcing:
        return False
    room = rooms.status_message_room(frames)
    return room is not None and not node.occupied(room)
