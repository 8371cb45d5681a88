"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins``).

It decides by what the process was asked, so it can be called anywhere, any number of times:

- a scheduler process whose ``server_args`` demand the guard: bind the guards of the scheduler;
- any other process: offer the command line flags, and with ``SGLANG_PD_GUARD=1`` take part in the launch.
"""

from __future__ import annotations

import multiprocessing
import sys

from sglang_pd_guard import seal

_loaded = False


def load() -> None:
    """Called by SGLang. Raises SystemExit, never less, where the guard is asked for and cannot be had."""
    global _loaded
    _loaded = True
    try:
        _load()
    except Exception as error:
        if seal.demanded() is None and seal.settings_from_env() is None:
            raise  # nobody asked for the guard: SGLang logs it and goes on
        seal.refuse(f"the plugin failed while loading: {type(error).__name__}: {error}")


def _load() -> None:
    from sglang_pd_guard.bindings import binder

    if seal.demanded() is not None:
        if seal.SCHEDULER_MODULE in sys.modules:
            binder.bind("scheduler", seal.demanded())
            seal.arm()
        return
    settings = seal.settings_from_env()
    if settings is not None:
        binder.bind("launcher", settings)
        seal.arm()
    if multiprocessing.parent_process() is None:
        binder.bind("cli", settings)


def loaded() -> bool:
    """Whether SGLang has called the entry point in this process."""
    return _loaded
