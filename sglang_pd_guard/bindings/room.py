"""Seams of the room guard: when a room is free again. The refusal itself stands at the doors, in admission.py."""

from __future__ import annotations


def transfer_cleared(result, transfer) -> None:
    transfer._pd_guard_ended = True
