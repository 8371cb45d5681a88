"""Audit: an idle node owns nothing.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 1.0


class Audit:
    """Looks at an idle node's accounts at most once a second, and believes what it has seen twice in a row.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._due = 0.0
        self._seen: dict[str, int] = {}
        self._reported: dict[str, int] = {}

    def due(self) -> bool:
        """Whether it is time to look again. Costs a clock reading."""
        now = self._clock()
        if now < self._due:
            return False
        self._due = now + EVERY_S
        return True

    def busy(self) -> None:
        """The node is not idle: whatever it owns now may be in use."""
        self._seen = {}

    def look(self, owned: dict[str, int]) -> dict[str, int] | None:
        """Takes what an idle node owns, by kind.

        Returns:
            It, where it was the same the last time and has not been reported yet; else None. A node that owns nothing again
            is reported too, with zeros, and at once: that needs no second look.
        """
        steady, self._seen = owned == self._seen, owned
        if owned == self._reported or (any(owned.values()) and not steady):
            return None
        had = any(self._reported.values())
        self._reported = owned
        return owned if had or any(owned.values()) else None
