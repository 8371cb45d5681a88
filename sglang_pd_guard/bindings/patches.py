"""Which of this repository's patches the SGLang of this process carries (``pd-guard patch``)."""

from __future__ import annotations


def carried() -> frozenset[str]:
    """The names in the marker that each series ends with; empty on SGLang as published."""
    try:
        from sglang.srt.disaggregation._pd_guard_patches import PATCHES
    except ImportError:
        return frozenset()
    return frozenset(PATCHES)
