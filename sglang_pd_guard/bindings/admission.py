"""The doors of both nodes, where the admission and the room guard refuse, and everything that aborts a request behind them."""

from __future__ import annotations

import weakref

from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.node import FAULT, Node, verdict_of
from sglang_pd_guard.guards import room as rooms
from sglang_pd_guard.guards.admission import Verdict, never_fits
from sglang_pd_guard.guards.receipt import digest

#: Said to a request that SGLang would wait for, or crash on, since nobody could ever match it with its peer.
NO_ROOM = Verdict(
    400,
    "This request has no bootstrap room. Send it through the PD router; sessions need SGLang 0.5.20 or later there.",
    "BadRequestError",
)

#: SGLang would write it into a row of unsigned 64-bit numbers, and die; 0 is what an empty row says.
BAD_ROOM = Verdict(
    400, "The bootstrap room must be a number from 1 to 2**63 - 1. Send this request through the PD router.", "BadRequestError"
)
#: Nothing is transferred for such a request: decode would answer from whatever lies in the pages that it is given.
FAKE_HOST = Verdict(
    400, "This bootstrap host is SGLang's own, for health checks. Send this request through the PD router.", "BadRequestError"
)
#: The peer, if there is one, sees the same and says the same: it is not told.
_BY_BOTH = {"bad-room": BAD_ROOM, "fake-host": FAKE_HOST}
#: Of a health check.
_FAKE_TOKENS = 1


def guarded_room(req) -> int | None:
    """The bootstrap room of a request whose KV really is transferred; None for health checks and warm-up."""
    return None if _is_fake(req) else req.bootstrap_room


def _is_fake(req) -> bool:
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    return req.bootstrap_host == FAKE_BOOTSTRAP_HOST


def generate_request(original, scheduler, recv_req, *args, **kwargs):
    node = nodes.current()
    node.incoming = recv_req
    try:
        return original(scheduler, recv_req, *args, **kwargs)
    finally:
        node.incoming = None


def prefill_door(original, queue, req, num_kv_heads):
    node = nodes.current()
    node.at_door = req
    if _rejected(node, "prefill_door", req, queue):
        return _retire(queue.scheduler, req)
    if guarded_room(req) is not None:
        with node.shield("prefill_door", req):
            node.admissions.begin(req.bootstrap_room)
    original(queue, req, num_kv_heads)
    sender = getattr(req, "disagg_kv_sender", None)
    if guarded_room(req) is None or sender is None or verdict_of(req) is not None:
        return None  # a health check, or refused by SGLang in between: prepare_abort has told decode
    with node.shield("prefill_door", req) as fault:
        node.admit(req)
    if fault[0] and node.settings.enforcing:
        sender.abort()
    return None


def decode_door(original, queue, req, *args, **kwargs):
    node = nodes.current()
    node.at_door = req
    resumed = any(args) or any(kwargs.values())  # is_retracted, is_rebootstrap: it has been admitted before
    if not resumed and _rejected(node, "decode_door", req, queue):
        return _retire(queue.scheduler, req)
    if guarded_room(req) is not None:
        with node.shield("decode_door", req):
            node.name_use(req, resumed)
    original(queue, req, *args, **kwargs)
    with node.shield("decode_door", req):
        if guarded_room(req) is not None and queue.queue and queue.queue[-1].req is req:
            receiver = queue.queue[-1].kv_receiver
            req._pd_guard_receiver = weakref.ref(receiver)
            node.track(req.bootstrap_room, receiver)
            node.served = True
    return None


def _rejected(node: Node, seam: str, req, queue) -> bool:
    """Whether the request at the door carries a verdict, SGLang's or ours; its peer has been told then."""
    with node.shield(seam, req) as fault:
        if _holds_resources(req):
            return False
        guard, rule, verdict = "admission", "unadmitted", verdict_of(req)
        if verdict is not None and (_is_fake(req) or not node.settings.runs("admission")):
            return False
        if verdict is None:
            guard, rule, verdict = _own_verdict(node, req, queue)
            if verdict is None:
                return False
            prompt = digest(nodes.prompt_of(req)) if rule == "in-use" else 0
            if node.settings.enforcing:
                req.set_finish_with_abort(verdict.message)
                _give_verdict(req, verdict)
            if rule == "in-use":
                node.refused_double(req, prompt, verdict)
                return node.settings.enforcing
            if rule in _BY_BOTH:
                node.count(req, verdict, rule, guard)
                return node.settings.enforcing
        if node.settings.enforcing:
            _adopt_room(node, req)
        node.refused(req, verdict, rule, guard=guard, at_door=True)
        return node.settings.enforcing
    if fault[0] and node.settings.enforcing:
        _give_verdict(req, FAULT)
        with node.shield(seam, req):
            node.refused(req, FAULT, "fault", at_door=True)
        return True
    return False


def _malformed(node: Node, req, queue) -> str | None:
    """The rule that a request breaks by what it says of where it comes from."""
    if not node.settings.runs("admission"):
        return None
    if _is_fake(req):
        backend = queue.scheduler.server_args.disaggregation_transfer_backend
        # Until the first request was served, there is nobody's KV, and SGLang's own warm-ups are of any length.
        stray = node.role == "decode" and node.served and len(req.origin_input_ids) > _FAKE_TOKENS and backend != "fake"
        return "fake-host" if stray else None
    room = req.bootstrap_room
    return None if room is None or 0 < room < 1 << 63 else "bad-room"


def _own_verdict(node: Node, req, queue) -> tuple[str, str, Verdict | None]:
    """Our own verdict on a request that SGLang admits and cannot serve, with the guard and the rule it breaks."""
    if rule := _malformed(node, req, queue):
        return "admission", rule, _BY_BOTH[rule]
    if _is_fake(req):
        return "", "", None
    if node.quarantined:
        verdict = node.no_room_left()
        if verdict is not None:
            return "release", "quarantine", verdict
    if node.settings.runs("room") and node.manager is not None and req.bootstrap_room is not None:
        if (getattr(req.sampling_params, "n", 1) or 1) > 1:
            return "room", "several-samples", rooms.several_samples(req.sampling_params.n)
        if node.occupied(req.bootstrap_room):
            return "room", "in-use", rooms.in_use(req.bootstrap_room)
    if not node.settings.runs("admission"):
        return "", "", None
    if req.bootstrap_room is None and node.manager is not None:
        return "admission", "no-room", NO_ROOM
    if getattr(queue.scheduler, "enable_hisparse", False):  # its capacity is not the pool's
        return "", "", None
    pool, margin = nodes.pool_tokens(queue.scheduler), nodes.margin(queue.scheduler, node.role)
    return "admission", "never-fits", never_fits(node.role, len(req.origin_input_ids), pool, margin)


def _adopt_room(node: Node, req) -> None:
    """SGLang builds the request of an unknown session (before 0.5.20: of any) without its room: take it from the wire."""
    source = node.incoming
    if req.bootstrap_room is None and source is not None and source.rid == req.rid:
        req.bootstrap_host, req.bootstrap_room = source.bootstrap_host, source.bootstrap_room
        req.bootstrap_port = source.bootstrap_port


def _holds_resources(req) -> bool:
    """A preempted or resumed request with an abort pending: its queue owns what it still holds."""
    kv = getattr(req, "kv", None)
    return bool(
        req.is_retracted
        or getattr(req, "req_pool_idx", None) is not None
        or getattr(kv, "holds_kv", False)
        or getattr(kv, "req_pool_idx", None) is not None
    )


def _give_verdict(req, verdict: Verdict) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.to_finish = FINISH_ABORT(verdict.message, verdict.status, verdict.err_type)


def _retire(scheduler, req) -> None:
    """Answers the client of a request that owns nothing, with the verdict it carries."""
    if hasattr(scheduler, "retire_unadmitted_request"):  # 0.5.21 and later
        scheduler.retire_unadmitted_request(req)
        return
    session = getattr(req, "session", None)
    if session is not None and getattr(session, "streaming", False):
        session.abort_req()
        req.session = None
    if hasattr(scheduler, "_release_aborted_request"):  # 0.5.20
        scheduler._release_aborted_request(req)
    elif getattr(scheduler, "enable_hicache_storage", False):
        scheduler.tree_cache.release_aborted_request(req.rid)
    (req.update_finish_state if hasattr(req, "update_finish_state") else req.check_finished)()
    stream = getattr(scheduler, "output_streamer", scheduler).stream_output
    stream([req], req.return_logprob)


#: Every so many scheduler steps. All ranks count alike, for they step together.
_STARVED_EVERY = 16


def handshake_waiters(original, queue, *args, **kwargs):
    node = nodes.current()
    node.handshake_steps += 1
    if node.handshake_steps % _STARVED_EVERY == 0 and node.settings.enforcing:
        _notice_refused_among_starved(queue)  # unshielded: it is a collective, all ranks or none
    return original(queue, *args, **kwargs)


def _notice_refused_among_starved(queue) -> None:
    """Lets SGLang poll again where it skips the poll because every request in the queue merely waits for memory."""
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.utils import poll_and_all_reduce

    waiting = queue.queue
    if not waiting or getattr(queue, "pp_size", 1) > 1 or not all(entry.waiting_for_input for entry in waiting):
        return
    polls = poll_and_all_reduce([entry.kv_receiver for entry in waiting], queue.gloo_group)
    for entry, poll in zip(waiting, polls, strict=True):
        if poll == KVPoll.Failed:  # on all ranks alike, so all will poll
            entry.waiting_for_input = False


def add_request(original, scheduler, req, *args, **kwargs):
    node = nodes.current()
    node.at_door = None
    original(scheduler, req, *args, **kwargs)
    reached, node.at_door = node.at_door is req, None
    if reached or guarded_room(req) is None:
        return
    with node.shield("add_request", req):
        verdict = verdict_of(req) or Verdict(
            503, f"The {node.role} node refused this request before admission; its own answer says why."
        )
        node.refused(req, verdict, "unadmitted", at_door=True)


def prepare_abort(original, req, error_message, status_code=None):
    node = nodes.current()
    room = guarded_room(req)
    if room is None:
        return original(req, error_message, status_code)
    known = None
    with node.shield("prepare_abort", req):
        if node.settings.enforcing:
            known = getattr(req, "_pd_guard_verdict", None) or node.admissions.take_peer_verdict(room)
    if known is not None:
        original(req, known.message, known.status)
        req.finished_reason.err_type = known.err_type
        return None
    original(req, error_message, status_code)
    if not node.settings.runs("admission"):
        return None
    with node.shield("prepare_abort", req):
        node.refused(req, verdict_of(req), "aborted")
    return None


def sender_abort(original, sender):
    node = nodes.current()
    with node.shield("sender_abort", room=sender.bootstrap_room):
        room = sender.bootstrap_room
        # Where prepare_abort or retire_aborted_result was faster, they knew the reason.
        if node.settings.enforcing and node.admissions.refused(room) is None and node.live(room) is sender:
            node.refuse_room(room, Verdict(500, "The request was aborted on the prefill node."), sender)
    return original(sender)


def retire_aborted_result(original, scheduler, req):
    node = nodes.current()
    if guarded_room(req) is None:
        return original(scheduler, req)
    if node.settings.runs("admission"):
        with node.shield("retire_aborted_result", req):
            node.refused(req, verdict_of(req) or FAULT, "forward")
    if req.disagg_kv_sender is not None and node.keeps_source(req.disagg_kv_sender):
        with node.shield("retire_aborted_result", req) as fault:
            _keep_in_flight(scheduler, req)
        if not fault[0]:
            return False
    retired = original(scheduler, req)
    if retired and node.settings.runs("room"):
        node.abandon(req)
    return retired


def _keep_in_flight(scheduler, req) -> None:
    """Lets an aborted request wait in SGLang's in-flight queue until the writes of its earlier chunks have returned (`sender_polls`).
    Its client is answered at once, and nothing of it enters the prefix cache.
    """
    req.disagg_kv_sender.abort()
    if req.to_finish is not None and not req.finished():
        req.update_finish_state()
    req._pd_guard_verdict = verdict_of(req)
    req._pd_guard_tainted = req.skip_radix_cache_insert = True
    req.pending_bootstrap = False
    scheduler.clear_pending_chunk_send(req)
    if all(other is not req for other in scheduler.disagg_prefill_inflight_queue):
        scheduler.disagg_prefill_inflight_queue.append(req)


def send_kv_chunk(original, scheduler, req, *args, **kwargs):
    node = nodes.current()
    judged = node.settings.runs("admission") or getattr(req, "_pd_guard_tainted", False)
    if guarded_room(req) is None or not node.settings.enforcing or not judged:
        return original(scheduler, req, *args, **kwargs)
    verdict = FAULT
    with node.shield("send_kv_chunk", req) as fault:
        verdict = verdict_of(req)
    if verdict is None:
        return original(scheduler, req, *args, **kwargs)
    if fault[0]:
        _give_verdict(req, FAULT)
    if getattr(req.disagg_kv_sender, "conclude_state", None) is None:  # or an earlier chunk said so
        with node.shield("send_kv_chunk", req):
            node.refused(req, verdict, "hand-off")
    req.disagg_kv_sender.abort()  # its next poll is Failed, and the in-flight queue retires it
    if hasattr(scheduler, "clear_pending_chunk_send"):
        scheduler.clear_pending_chunk_send(req)
    return None
