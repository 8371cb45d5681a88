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

from pd_rig.model import LAG

logger = logging.getLogger(__name__)

_WRITE = (
    "sglang.srt.distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_transfer_sync"
)

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
    """Delay the transfer engine's writes. Control file: ``SECONDS [MIN_BYTES]``, smaller writes are not delayed.

    A delay ends when the file goes.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def batch_transfer_sync(
        original, self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs
    ):
        words = control("slow_write")
        size = sum(lengths)
        if words and size >= (int(words[1]) if len(words) > 1 else 0):
            logger.warning("slow_write: %d bytes to %s wait %s s", size, session_id, words[0])
            end = time.monotonic() + float(words[0])
            while time.monotonic() < end and control("slow_write"):
                time.sleep(0.01)
            logger.warning("slow_write: %d bytes to %s go now", size, session_id)
        return original(self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs)

    HookRegistry.register(_WRITE, batch_transfer_sync, HookType.AROUND)


@fault
def slow_wire() -> None:
    """Write no faster than a wire would, below whatever hooks the engine. Control file: ``MIB_PER_SECOND``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    class Wire:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def batch_transfer_sync_write(self, session_id, buffers, peer_buffer_addresses, lengths):
            if words := control("slow_wire"):
                time.sleep(sum(lengths) / 2**20 / float(words[0]))
            return self._engine.batch_transfer_sync_write(session_id, buffers, peer_buffer_addresses, lengths)

    def initialize(result, engine, *args, **kwargs):
        engine.engine = Wire(engine.engine)

    HookRegistry.register(_WRITE.replace("batch_transfer_sync", "initialize"), initialize, HookType.AFTER)


@fault
def wrong_bytes() -> None:
    """Let each block of a large write arrive four bytes late. Control file: ``MIN_BYTES``, smaller writes are right.

    Whole pages in another order would not do: a key carries its position, so attention reads the same from them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def batch_transfer_sync(original, self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs):
        result = original(self, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs)
        words = control("wrong_bytes")
        if words and sum(lengths) >= int(words[0]):
            for source, target, length in zip(buffers, peer_buffer_addresses, lengths, strict=True):
                original(self, session_id, [source], [target + 4], [length - 4], *args, **kwargs)
        return result

    HookRegistry.register(_WRITE, batch_transfer_sync, HookType.AROUND)


@fault
def short_transfer() -> None:
    """Let prefill promise and transfer one page less than the prompt has. Control file: any word."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def init(original, sender, num_kv_indices, *args, **kwargs):
        return original(sender, num_kv_indices - bool(control("short_transfer")), *args, **kwargs)

    def send(original, sender, kv_indices, *args, **kwargs):
        return original(sender, kv_indices[: sender.num_kv_indices - sender.curr_idx], *args, **kwargs)

    conn = "sglang.srt.disaggregation."
    HookRegistry.register(conn + "common.conn.CommonKVSender.init", init, HookType.AROUND)
    HookRegistry.register(conn + "mooncake.conn.MooncakeKVSender.send", send, HookType.AROUND)


@fault
def receipt_row() -> None:
    """Spoil words 1 to 7 of the metadata row just before it is transferred.

    Control file: ``stale`` (those of the request before), ``damage`` (one bit of the token count) or ``wipe`` (zeros).
    """
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    known: dict = {}

    def set_buf(result, buffers, req):
        known["rows"] = buffers.bootstrap_room

    def add_transfer_request(original, manager, room, kv_indices, index_slice, is_last_chunk, *args, **kwargs):
        if is_last_chunk and "rows" in known:
            row = known["rows"][kwargs.get("aux_index", args[0] if args else None)]
            words = row.tolist()
            word = (control("receipt_row") or [""])[0]
            if word == "stale":
                words[1:] = known["former"]
            elif word == "damage":
                words[2] ^= 1
            elif word == "wipe":
                words[1:] = [0] * 7
            known["former"] = words[1:]
            row.copy_(torch.tensor(words, dtype=torch.int64).to(row.dtype))
        return original(manager, room, kv_indices, index_slice, is_last_chunk, *args, **kwargs)

    srt = "sglang.srt.disaggregation."
    HookRegistry.register(srt + "utils.MetadataBuffers.set_buf", set_buf, HookType.AFTER)
    HookRegistry.register(
        srt + "mooncake.conn.MooncakeKVManager.add_transfer_request", add_transfer_request, HookType.AROUND
    )


@fault
def late_status() -> None:
    """Send decode a success of each room whose transfer it has just cleared. Control file: any word."""
    import zmq
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    sockets: dict = {}

    def clear(result, receiver):
        if control("late_status"):
            manager = receiver.kv_mgr
            if not sockets:
                sockets[0] = zmq.Context.instance().socket(zmq.PUSH)
                sockets[0].connect(f"tcp://{manager.local_ip}:{manager.rank_port}")
            words = (receiver.bootstrap_room, int(KVPoll.Success), 0)
            sockets[0].send_multipart([str(word).encode() for word in words])
            logger.warning("late_status: sent")

    HookRegistry.register(
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver.clear", clear, HookType.AFTER
    )


@fault
def lost_slot() -> None:
    """Lose one metadata slot for each word in the control file, at the next request."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    lost: list = []

    def alloc(original, slots):
        while len(lost) < len(control("lost_slot") or ()):
            lost.append(original(slots))
        return original(slots)

    def free(original, slots, index):
        if control("lost_slot") is None:
            while lost:
                original(slots, lost.pop())
        return original(slots, index)

    target = "sglang.srt.disaggregation.utils.ReqToMetadataIdxAllocator."
    HookRegistry.register(target + "alloc", alloc, HookType.AROUND)
    HookRegistry.register(target + "free", free, HookType.AROUND)


@fault
def stray_page() -> None:
    """Corrupt, once for each time that the control file appears, who owns a page that a running request is about to look at.

    Control file: ``row`` (its row of SGLang's map points at the same page of another request), ``freed`` (the page is freed
    under it), ``lent`` (the next abort of another request gives the page back, and the next new request is given it),
    ``twice`` (the next two requests are given one page), ``chunk`` (prefill: the row of a prompt points at a free page when its next chunk
    comes) or ``retracted`` (the next request that is retracted has another's page in its row). A number after the word: on that tensor
    parallel rank only. A page that stands twice among the free ones is logged.
    """
    import torch
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    state = {"done": False, "batch": None, "given_back": None}

    def word(*which: str) -> str | None:
        words = control("stray_page")
        if words is None:
            state["done"] = False
        found = words and words[0] in which and not state["done"]
        found = found and (len(words) == 1 or int(words[1]) == get_tensor_model_parallel_rank())
        return words[0] if found else None

    def alloc_for_decode(result, batch, token_per_req):
        size, rows = batch.tree_cache.page_size, batch.req_to_token_pool.req_to_token
        state["batch"] = batch
        what = word("row", "freed")
        if what is None or len(batch.reqs) < (2 if what == "row" else 1):
            return
        slots, lengths = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        begin = (lengths[0] - LAG + size) // size * size
        page = slice(begin, begin + size)
        if what == "row":
            if lengths[1] < page.stop:
                return
            rows[slots[0], page] = rows[slots[1], page]
        else:
            batch.token_to_kv_pool_allocator.free(rows[slots[0], page].long())
        state["done"] = True
        logger.warning("stray_page: %s of rid=%s", what, batch.reqs[0].rid)

    def alloc_for_extend(result, batch):
        size, rows = batch.tree_cache.page_size, batch.req_to_token_pool.req_to_token
        for prefix, slot in zip(batch.prefix_lens, result[1].tolist(), strict=True):
            if prefix > size and word("chunk"):
                page = int(batch.token_to_kv_pool_allocator.free_pages[-1])
                rows[slot, size : 2 * size] = page * size + torch.arange(size, dtype=rows.dtype, device=rows.device)
                state["done"] = True
                logger.warning("stray_page: chunk")

    def release_req(original, batch, idx, *args, **kwargs):
        if len(batch.reqs) > 1 and word("retracted"):
            size, rows = batch.tree_cache.page_size, batch.req_to_token_pool.req_to_token
            slots = [getattr(req, "kv", req) if not hasattr(req, "req_pool_idx") else req for req in batch.reqs]
            one, other = slots[idx].req_pool_idx, slots[idx - 1].req_pool_idx
            rows[one, :size] = rows[other, :size]
            state["done"] = True
            logger.warning("stray_page: retracted, of rid=%s", batch.reqs[idx].rid)
        return original(batch, idx, *args, **kwargs)

    def release_kv_cache(result, req, *args, **kwargs):
        batch = state["batch"]
        if batch is None or not isinstance(req.finished_reason, FINISH_ABORT) or not word("lent"):
            return
        size, rows = batch.tree_cache.page_size, batch.req_to_token_pool.req_to_token
        for running, slot, length in zip(batch.reqs, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            if running is not req and not running.finished():
                place = length - LAG + 2 * size  # read some steps later
                state["given_back"] = rows[slot, place : place + 1].long() // size
                state["done"] = True
                logger.warning("stray_page: lent, of rid=%s", running.rid)
                return

    def pre_alloc(original, queue, req, *args, **kwargs):
        allocator, page = queue.token_to_kv_pool_allocator, state["given_back"]
        if page is not None or word("twice"):
            allocator.merge_and_sort_free()  # or it does so itself, and the page is not the first any more
        if word("twice"):
            page = allocator.free_pages[:1]
            state["done"] = True
            logger.warning("stray_page: twice")
        free = allocator.free_pages
        if len(free.unique()) != len(free):
            logger.error("stray_page: a page is free twice")
        if page is not None:
            state["given_back"] = None
            allocator.free_pages = torch.cat([page.to(allocator.free_pages.dtype), allocator.free_pages])
        return original(queue, req, *args, **kwargs)

    HookRegistry.register("sglang.srt.mem_cache.allocation.alloc_for_decode", alloc_for_decode, HookType.AFTER)
    HookRegistry.register("sglang.srt.mem_cache.allocation.alloc_for_extend", alloc_for_extend, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.release_req", release_req, HookType.AROUND)
    HookRegistry.register("sglang.srt.mem_cache.common.release_kv_cache", release_kv_cache, HookType.AFTER)
    HookRegistry.register("sglang.srt.disaggregation.decode.DecodePreallocQueue._pre_alloc", pre_alloc, HookType.AROUND)


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
        try:
            FAULTS[name]()
        except Exception as error:  # SGLang logs a plugin's error and goes on, and the test would see a healthy server
            raise SystemExit(f"PD_RIG_FAULT: {name} can't be armed: {error!r}") from error
        logger.warning("fault armed: %s", name)
