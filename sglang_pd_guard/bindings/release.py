"""Seams of the release guard: what belongs to a failed transfer is given back once no write to it can be under way.

decode shows SGLang a failed transfer as one that still runs until every prefill rank has said that its writes ended, so
pages, request slot, metadata slot and room stay where they are; prefill does the same with its source pages until its own
writes have returned. The client is answered at once.
"""

from __future__ import annotations

import contextlib
import threading
import time

from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.admission import guarded_room
from sglang_pd_guard.bindings.node import Node, on_all_ranks, rank_endpoint, verdict_of
from sglang_pd_guard.guards.admission import Endpoint, Verdict
from sglang_pd_guard.guards.release import batches
from sglang_pd_guard.guards.wire import Drain, encode

#: Seconds between two questions to a prefill rank that has not answered.
_ASK_EVERY_S = 1.0

#: Said on prefill, where nobody waits for an answer as a rule, to a request that decode has given up.
GIVEN_UP = Verdict(500, "The decode node has given this request up.")


def _answer(scheduler, req, reason: str) -> None:
    """Tells the client of a failed request now; SGLang will do so once more when it ends, which no client sees."""
    from sglang.srt.disaggregation.utils import prepare_abort

    if getattr(req, "finished_output", None):
        return
    prepare_abort(req, reason, status_code=500)
    req._pd_guard_verdict = verdict_of(req)
    getattr(scheduler, "output_streamer", scheduler).stream_output([req], req.return_logprob)


def _reason(manager, room: int) -> str:
    return manager.failure_records.get(room) or "The KV transfer failed."


# --- decode -------------------------------------------------------------------------------------------------------


def transfer_polls(original, queue, *args, **kwargs):
    from sglang.srt.disaggregation.base.conn import KVPoll

    polls = original(queue, *args, **kwargs)
    node = nodes.current()
    # Alike on all ranks, unlike what each has learnt of its prefill.
    failed = [i for i, poll in enumerate(polls) if poll == int(KVPoll.Failed) and guarded_room(queue.queue[i].req) is not None]
    if not node.settings.enforcing or not (failed or node.quarantined):  # alike on all ranks
        return polls
    free, calm = [], []
    for i in failed:
        entry = queue.queue[i]
        is_free = is_calm = not _is_held(entry)  # False beside a fault inside the guard: nothing is given back
        if not is_free:
            with node.shield("release", entry.req):
                is_free, is_calm = _hold(node, entry)
        free.append(is_free)
        calm.append(is_calm)
    agreed = iter(on_all_ranks(free + calm, queue.gloo_group))
    for i in failed:
        if next(agreed):
            if _is_held(queue.queue[i]):
                receiver = queue.queue[i].kv_receiver
                receiver._pd_guard_no_writer = True
                node.released(receiver._pd_guard_nonce)
        else:
            polls[i] = int(KVPoll.Transferring)
    node.quarantine(sum(_pages(node, queue.queue[i].req) for i in failed if not next(agreed)))
    with node.shield("release"):
        node.telemetry.held(node.holds.pages())
    return polls


def _is_held(entry) -> bool:
    """Whether prefill has told this rank that it says when its writes have ended."""
    return getattr(entry.kv_receiver, "_pd_guard_drains", False)


def _pages(node: Node, req) -> int:
    return -(-len(req.origin_input_ids) // node.page_size)


def _hold(node: Node, entry) -> tuple[bool, bool]:
    """Asks those prefill ranks that may still write to this failed request's pages.

    Returns whether there is none, and whether the pages are in no quarantine.
    """
    req, receiver, now = entry.req, entry.kv_receiver, time.monotonic()
    nonce, pages = receiver._pd_guard_nonce, _pages(node, req)
    writers = {rank_endpoint(info): info for info in receiver.bootstrap_infos}
    node.holds.hold(nonce, pages, writers, now)
    _answer(node.scheduler, req, _reason(node.manager, req.bootstrap_room))
    missing = node.holds.missing(nonce)
    if not missing:
        return True, True
    if now - getattr(receiver, "_pd_guard_asked", float("-inf")) > _ASK_EVERY_S:
        receiver._pd_guard_asked = now
        for writer in missing:
            _ask(node, receiver, writers[writer], writer)
        node.look_for_gone(receiver.bootstrap_addr, missing)
    quarantined = node.holds.quarantined(nonce, now)
    if quarantined and not hasattr(receiver, "_pd_guard_quarantined"):
        receiver._pd_guard_quarantined = True
        node.telemetry.quarantined(req.rid, req.bootstrap_room, pages, receiver.bootstrap_addr)
    return False, not quarantined


def _ask(node: Node, receiver, info, writer: Endpoint) -> None:
    """On SGLang's own socket: the question cannot overtake the metadata that tells prefill where to write."""
    import zmq

    ip, port = node.own_endpoint
    socket, lock = type(receiver)._connect_to_bootstrap_server(info)
    with lock:
        message = encode(Drain(receiver.bootstrap_room, receiver._pd_guard_nonce, ip, port, *writer))
        with contextlib.suppress(zmq.Again):  # its queue is full since it does not read; it is asked again
            socket.send_multipart(message, flags=zmq.NOBLOCK)


# --- prefill ------------------------------------------------------------------------------------------------------


def queue_put(original, queue, chunk):
    node = nodes.current()
    with node.shield("queue_put", room=getattr(chunk, "room", None)):
        if hasattr(chunk, "room"):
            chunk._pd_guard_request = node.write_key(chunk.room)
            node.writes.queued(chunk._pd_guard_request)
    return original(queue, chunk)


def queue_get(original, queue):
    node = nodes.current()
    worker = threading.get_ident()
    with node.shield("queue_get"):
        ended = node.writes.finished(worker)
        if ended is not None:
            node.answer_drained(ended)
    chunk = original(queue)
    request = getattr(chunk, "_pd_guard_request", None)
    if request is not None:
        node.writes.taken(worker, request)
    return chunk


def batch_transfer_sync(original, engine, session_id, buffers, peer_buffer_addresses, lengths, *args, **kwargs):
    node = nodes.current()
    request = node.writes.in_hand(threading.get_ident())
    limit = node.settings.max_batch_mib << 20
    result = 0
    for batch in batches(buffers, peer_buffer_addresses, lengths, limit):
        if node.is_drain_asked(request):
            break  # decode has given the request up: what is left need not be written, and nobody hears of this success
        result = original(engine, session_id, *batch, *args, **kwargs)
        if result < 0:
            node.writes.failed()
            break
    return result


def sender_polls(original, pollers, *groups, **kwargs):
    from sglang.srt.disaggregation.base.conn import KVPoll

    polls = original(pollers, *groups, **kwargs)
    node = nodes.current()
    failed = [i for i, poll in enumerate(polls) if poll == int(KVPoll.Failed)]
    if not failed or node.role != "prefill" or not node.settings.enforcing:
        return polls
    returned = node.returned([pollers[i] for i in failed], *groups, *kwargs.values())
    held = [i for i, done in zip(failed, returned, strict=True) if not done]
    waiting = {id(req.disagg_kv_sender): req for req in node.scheduler.disagg_prefill_inflight_queue} if held else {}
    for i in held:
        polls[i] = int(KVPoll.Transferring)
        req = waiting.get(id(pollers[i]))
        if req is not None:
            with node.shield("release", req):
                _answer(node.scheduler, req, _reason(node.manager, req.bootstrap_room))
    return polls


def drain(node: Node, message: Drain) -> None:
    """prefill: decode has given a request up and asks when the last write for it has ended."""
    room = message.room
    sender = node.live(room)
    if sender is not None and node.admissions.asked_with(room, message.nonce):
        node.fail_live(room, GIVEN_UP, every_rank=True)
    elif sender is None and node.admissions.withdraw(room, message.endpoint, message.nonce):
        node.admissions.peer_refused(room, GIVEN_UP)
        node.forget_metadata(room)
    node.drain_asked(message)
    node.answer_drained(message.nonce)
