"""Faults injected into a running SGLang on purpose.

``PD_RIG_FAULT`` (a comma list) names the faults a process arms when it loads its plugins; unset, nothing is hooked. An
armed fault does nothing either until a test writes its control file ``$PD_RIG_FAULT_DIR/<fault>``, which is read again
at every use, so that a test can start and end a fault while the servers run.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

#: Fault name -> function that hooks it into SGLang.
FAULTS: dict[str, Callable[[], None]] = {}


def fault(arm: Callable[[], None]) -> Callable[[], None]:
    """Register a fault under the name of its function."""
    FAULTS[arm.__name__] = arm
    return arm


def control(name: str) -> list[str] | None:
    """The words in a fault's control file; None while there is no such file."""
    try:
        return (Path(os.environ["PD_RIG_FAULT_DIR"]) / name).read_text().split()
    except FileNotFoundError:
        return None


@fault
def slow_write() -> None:
    """Delay the transfer engine's writes. Control file: ``SECONDS [MIN_BYTES]``, smaller writes are not delayed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def batch_transfer_sync(
        original, self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs
    ):
        words = control("slow_write")
        size = sum(lengths)
        if words and size >= (int(words[1]) if len(words) > 1 else 0):
            logger.warning("slow_write: %d bytes to %s wait %s s", size, session_id, words[0])
            time.sleep(float(words[0]))
            logger.warning("slow_write: %d bytes to %s go now", size, session_id)
        return original(self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs)

    HookRegistry.register(
        "sglang.srt.distributed.device_communicators.mooncake_transfer_engine"
        ".MooncakeTransferEngine.batch_transfer_sync",
        batch_transfer_sync,
        HookType.AROUND,
    )


@fault
def guard_raises() -> None:
    """Make the guard itself fail on requests whose rid begins with ``fault-``. Control file: any word."""
    import sglang_pd_guard.bindings.admission as admission

    original = admission.verdict_of

    def verdict_of(req):
        if control("guard_raises") and str(req.rid).startswith("fault-"):
            raise RuntimeError("a fault inside the guard")
        return original(req)

    admission.verdict_of = verdict_of


def load() -> None:
    """Entry point of the group ``sglang.srt.plugins``: arm the faults that ``PD_RIG_FAULT`` names."""
    for name in filter(None, (word.strip() for word in os.environ.get("PD_RIG_FAULT", "").split(","))):
        if name not in FAULTS:
            raise SystemExit(f"PD_RIG_FAULT: no fault {name!r}, there are {', '.join(sorted(FAULTS))}")
        if "PD_RIG_FAULT_DIR" not in os.environ:
            raise SystemExit("PD_RIG_FAULT is set, PD_RIG_FAULT_DIR is not")
        FAULTS[name]()
        logger.warning("fault armed: %s", name)
