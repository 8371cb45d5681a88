"""Seams of the receipt guard: prefill writes it, decode compares it before the request can enter a batch."""

from __future__ import annotations

import time
import weakref

from sglang_pd_guard.bindings import checksum
from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.admission import guarded_room
from sglang_pd_guard.bindings.node import FAULT, Node, prompt_of
from sglang_pd_guard.guards.admission import Verdict
from sglang_pd_guard.guards.receipt import SLOTS, Mismatch, Receipt, digest, read, verify

#: SGLang waits without end for a row that has not landed although the transfer has; prefill writes it first.
_ROW_WITHIN_S = 1.0


# --- prefill ------------------------------------------------------------------------------------------------------


def pop_decode_prefix_len(result: int, sender) -> None:
    sender._pd_guard_prefix = result


def set_buf(result, buffers, req) -> None:
    import torch

    node = nodes.current()
    row = buffers.bootstrap_room[req.metadata_buffer_index]
    words = [0] * (SLOTS - 1)
    if guarded_room(req) is not None and node.states_receipts:
        with node.shield("set_buf", req):  # without a receipt, decode refuses
            sender = req.disagg_kv_sender
            tokens, prefix = len(req.origin_input_ids), getattr(sender, "_pd_guard_prefix", 0)
            receipt = Receipt(
                tokens=tokens,
                # SGLang sends this row with the chunk that completes this number, and with no other.
                pages=sender.num_kv_indices,
                prefix=prefix,
                prompt=digest(prompt_of(req)),
                nonce=node.admissions.nonce(req.bootstrap_room),
                checksum=checksum.of_request(node.scheduler, req, prefix, tokens) if node.settings.checksum else 0,
            )
            words = receipt.words(req.bootstrap_room)
    row[1:].copy_(torch.tensor(words, dtype=torch.int64).to(row.dtype))


# --- decode -------------------------------------------------------------------------------------------------------


def watch(receiver) -> None:
    """Remembers what this receiver publishes: the pages it reserved, and the prefix it holds already.

    On the instance, since each transfer backend has a method of its own; a weak reference, since a cycle would keep
    the receiver alive.
    """
    send_metadata, this = type(receiver).send_metadata, weakref.ref(receiver)

    def publish(kv_indices, *args, **kwargs):
        receiver = this()
        receiver._pd_guard_published = len(kv_indices), int(kwargs.get("decode_prefix_len") or 0)
        return send_metadata(receiver, kv_indices, *args, **kwargs)

    receiver.send_metadata = publish


def metadata_gate(original, polls, decode_reqs, metadata_buffers, *args, **kwargs):
    from sglang.srt.disaggregation.base.conn import KVPoll

    landed = [i for i, poll in enumerate(polls) if poll == int(KVPoll.Success)]
    original(polls, decode_reqs, metadata_buffers, *args, **kwargs)
    node = nodes.current()
    for i in landed:
        if node.settings.runs("receipt") and _refused(decode_reqs[i], metadata_buffers):
            polls[i] = int(KVPoll.Failed)
        elif "ownership" in node.guards and polls[i] == int(KVPoll.Success):
            with node.shield("arrived", decode_reqs[i].req):
                _arrived(node, decode_reqs[i], metadata_buffers)


def _arrived(node: Node, entry, buffers) -> None:
    """Tells the ownership guard, once, which pages the transfer has brought: as many as the receipt says."""
    receiver, req = entry.kv_receiver, entry.req
    if receiver.__dict__.setdefault("_pd_guard_arrived", False):
        return
    receiver._pd_guard_arrived = True
    size = node.ownership.tables.page_size
    pages, prefix = getattr(receiver, "_pd_guard_published", (-(-len(req.origin_input_ids) // size), 0))
    if guarded_room(req) is not None and hasattr(receiver, "bootstrap_infos"):  # no fake transfer
        found = read(buffers.bootstrap_room[entry.metadata_buffer_index].tolist(), req.bootstrap_room)
        if isinstance(found, Receipt):
            pages = min(pages, found.pages)
        elif found.rule != "absent" or not _peer_may_be_silent(node, receiver):
            pages = 0
    node.ownership.brought(req, prefix // size, pages)


def pop_transferred(original, queue, *args, **kwargs):
    from sglang.srt.disaggregation.base.conn import KVPoll

    entries = list(queue.queue)
    for entry in entries:
        if entry.kv_receiver.poll() == KVPoll.Success and _refused(entry, queue.metadata_buffers):
            entry.kv_receiver.conclude_state = KVPoll.Failed
    result = original(queue, *args, **kwargs)
    kept = {id(entry) for entry in queue.queue}
    for entry in entries:
        if id(entry) not in kept:
            queue.metadata_buffers.bootstrap_room[entry.metadata_buffer_index] = 0
    return result


def _refused(entry, buffers) -> bool:
    """Whether the transfer to this decode request has ended and is not believed. Says so once, and why."""
    node, req = nodes.current(), entry.req
    if guarded_room(req) is None:
        return False
    judged = getattr(entry.kv_receiver, "_pd_guard_refused", None)
    if judged is not None:
        return judged
    mismatch = None
    with node.shield("receipt", req) as fault:
        mismatch = _mismatch(entry, buffers)
        if mismatch is None:
            return False
        if mismatch.rule == "absent" and _peer_may_be_silent(node, entry.kv_receiver):
            node.telemetry.unguarded_peer("served", req.bootstrap_room, entry.kv_receiver.bootstrap_addr)
            mismatch = None
    verdict = FAULT if fault[0] else mismatch and _verdict(mismatch)
    with node.shield("receipt", req):
        if mismatch is not None:
            numbers = f" expected={mismatch.expected} found={mismatch.found}"
            enforcing = node.settings.enforcing
            node.telemetry.refused(
                "receipt", mismatch.rule, req.rid, req.bootstrap_room, verdict.status, enforcing, numbers
            )
        if verdict is not None and node.settings.enforcing:
            req._pd_guard_verdict = verdict
            node.manager.record_failure(req.bootstrap_room, verdict.message)
            entry.kv_receiver._pd_guard_refused = True
            return True
    entry.kv_receiver._pd_guard_refused = fault[0] and node.settings.enforcing
    return fault[0] and node.settings.enforcing


def _mismatch(entry, buffers) -> Mismatch | None:
    """None also where the row has yet to land: SGLang goes on waiting then."""
    req, receiver = entry.req, entry.kv_receiver
    published = getattr(receiver, "_pd_guard_published", None)
    if published is None and not hasattr(receiver, "bootstrap_infos"):
        return None  # a fake transfer, configured for the whole node
    row = buffers.bootstrap_room[entry.metadata_buffer_index].tolist()
    if row[0] == 0:
        since = receiver.__dict__.setdefault("_pd_guard_landed", time.monotonic())
        return Mismatch("absent", req.bootstrap_room, 0) if time.monotonic() - since > _ROW_WITHIN_S else None
    expected = _expected(req, receiver, published)
    mismatch = verify(row, req.bootstrap_room, expected)
    if mismatch is None and nodes.current().settings.checksum:
        kv = checksum.of_request(nodes.current().scheduler, req, expected.prefix, expected.tokens)
        if kv != read(row, req.bootstrap_room).checksum:
            mismatch = Mismatch("checksum", expected.tokens, expected.tokens)  # no log line holds anything of the KV
    if mismatch is None:
        receiver._pd_guard_refused = False
    return mismatch


def _expected(req, receiver, published: tuple[int, int]) -> Receipt:
    pages, prefix = published
    scheduler = nodes.current().scheduler
    prompt = prompt_of(req)
    tokens = len(req.origin_input_ids)
    if getattr(req, "pd_rebootstrap_in_progress", False):  # prefill computes what was generated so far as well
        prompt = [*prompt, *req.output_ids]
        tokens += len(req.output_ids)
    if getattr(scheduler, "enable_hisparse", False):  # pages of another size than prefill's
        pages = None
    return Receipt(tokens, pages, prefix, digest(prompt), receiver._pd_guard_nonce)


def _peer_may_be_silent(node: Node, receiver) -> bool:
    """Whether this prefill is known to write no receipts, and is served all the same."""
    return node.settings.peer == "prefer" and not getattr(receiver, "_pd_guard_receipts", True)


def _verdict(mismatch: Mismatch) -> Verdict:
    words = (
        "Refused by the PD guard: the KV cache that prefill transferred is not this request's "
        f"(rule {mismatch.rule}). Nothing was generated. Please retry; if it recurs, report both nodes' server logs."
    )
    if mismatch.rule == "checksum":
        words += " --pd-guard-checksum must be set on both nodes or on none, and both need the same --tp-size."
    return Verdict(500, words)
