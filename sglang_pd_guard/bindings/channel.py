"""Seams of the control channel, in the scheduler processes.

Guarded nodes talk over the sockets that SGLang's KV managers already have: the guard's messages are taken out
before SGLang's control thread sees them, and a refused room's metadata is answered instead of stored.
"""

from __future__ import annotations

from sglang_pd_guard import seal
from sglang_pd_guard.__about__ import __version__
from sglang_pd_guard.bindings import checksum, ownership, receipt, release
from sglang_pd_guard.bindings import node as nodes
from sglang_pd_guard.bindings.node import Node, unguarded
from sglang_pd_guard.guards import wire
from sglang_pd_guard.guards.admission import Verdict
from sglang_pd_guard.seal import ATTRIBUTE

ATTESTATION = ATTRIBUTE


def get_init_info(result: dict, scheduler) -> dict:
    node = nodes.current()
    node.scheduler = scheduler
    if node.settings.checksum:
        try:
            checksum.buffers(scheduler)
        except TypeError as error:
            seal.refuse(str(error), built=True)
    if "ownership" in node.guards and (found := ownership.unsupported(scheduler)):
        what = f"the ownership guard cannot follow {', '.join(found)}; leave that out, or add --pd-guard-disable ownership"
        seal.refuse(what, built=True)
    return {**result, ATTESTATION: __version__}


def manager_init(result, manager, *args, **kwargs) -> None:
    node = nodes.current()
    node.attach(manager)
    handle = _prefill_message if node.role == "prefill" else _decode_message
    socket = manager.server_socket
    receive = socket.recv_multipart

    def recv_multipart(*recv_args, **recv_kwargs):
        while True:
            frames = receive(*recv_args, **recv_kwargs)
            consumed = False
            with node.shield("control"):
                consumed = handle(node, frames)
            if not consumed and not wire.is_guard_message(frames):
                return frames

    socket.recv_multipart = recv_multipart


def receiver_init(result, receiver, *args, **kwargs) -> None:
    node = nodes.current()
    with node.shield("introduce", room=receiver.bootstrap_room) as fault:
        if node.states_receipts:
            receipt.watch(receiver)
        node.introduce(receiver)
    if fault[0] and node.settings.enforcing:
        node.fail_receiver(receiver, nodes.FAULT)


def _decode_message(node: Node, frames: list[bytes]) -> bool:
    """Returns whether the message was the guard's."""
    if not wire.is_guard_message(frames):
        return False
    message = wire.decode(frames)
    if isinstance(message, wire.Refusal) and node.settings.enforcing:
        receiver = node.live(message.room)
        # A refusal of an earlier request that used the same room number brings another nonce back.
        if receiver is not None and getattr(receiver, "_pd_guard_nonce", None) == message.nonce:
            node.telemetry.peer_refusal("received", message.room, message.verdict.status)
            receiver._pd_guard_no_writer = message.before_transfer
            node.fail_live(message.room, message.verdict)
    elif isinstance(message, wire.Drained):
        if message.unknown:
            node.holds.unknown(message.nonce, message.writer)
        elif not node.holds.drained(message.nonce, message.writer):
            node.telemetry.late_ack()
    return True


def _prefill_message(node: Node, frames: list[bytes]) -> bool:
    """Returns whether the message was the guard's, or was answered by it."""
    if not wire.is_guard_message(frames):
        sender = wire.metadata_sender(frames)
        return sender is not None and _metadata(node, *sender)
    message = wire.decode(frames)
    if isinstance(message, wire.Hello):
        node.guarded_peers[message.endpoint] = message
        unfit = node.unfit(message)
        if unfit is not None:
            _refuse_peer(node, message.room, message.endpoint, message.nonce, unfit)
            return True
        if node.strange(message):
            return True
        verdict = node.admissions.hello(message.room, message.endpoint, message.nonce, message.prompt)
        if verdict is not None:
            dropped = node.admissions.turned_away(message.room, message.endpoint, peek=True)
            node.tell_decode(message.endpoint, message.room, message.nonce, verdict, dropped)
    elif isinstance(message, wire.Refusal) and node.settings.enforcing:
        _refused_by_decode(node, message)
    elif isinstance(message, wire.Drain):
        release.drain(node, message)
    elif isinstance(message, wire.Wake):
        _clear_refused(node, message.room)
    return True


def _metadata(node: Node, room: int, endpoint: tuple[str, int]) -> bool:
    """A decode rank has reserved pages for `room`. Returns whether SGLang must not see it."""
    peer = node.guarded_peers.get(endpoint)
    if peer is None and node.refuses_unguarded(room, f"{endpoint[0]}:{endpoint[1]}"):
        _refuse_peer(node, room, endpoint, 0, unguarded(f"decode {endpoint[0]}:{endpoint[1]}"))
        return True
    if peer is not None and (node.turned_away(peer) or node.admissions.turned_away(room, endpoint)):
        return True  # it was told when it said hello
    verdict = node.admissions.refused(room)
    if verdict is None or node.live(room) is not None:
        return False
    if peer is None:  # a guarded one was told when it said hello
        node.tell_decode(endpoint, room, 0, verdict)
    return True


def _refuse_peer(node: Node, room: int, endpoint: tuple[str, int], nonce: int, verdict: Verdict) -> None:
    """This prefill may not serve that decode: both clients of the request in `room` are told."""
    node.tell_decode(endpoint, room, nonce, verdict)
    if node.live(room) is not None:
        node.fail_live(room, verdict)
    else:
        node.admissions.peer_refused(room, verdict)


def _clear_refused(node: Node, room: int) -> None:
    """`room` was refused after SGLang had stored a decode rank's metadata for it: answer and drop it."""
    verdict = node.admissions.refused(room)
    if verdict is None or node.live(room) is not None:
        return
    for endpoint in node.unguarded_askers(node.forget_metadata(room)):
        node.tell_decode(endpoint, room, 0, verdict)


def _refused_by_decode(node: Node, message: wire.Refusal) -> None:
    sender = node.live(message.room)
    if message.prompt:
        mine = sender is not None and sender._pd_guard_prompt == message.prompt and not node.admissions.nonce(message.room)
        if mine:  # nobody has asked for it, so it is the one that decode refused
            node.fail_live(message.room, message.verdict)
        else:
            node.admissions.peer_double(message.room, message.prompt, message.verdict)
        return
    if sender is None:
        if message.before_transfer and node.admissions.refused(message.room) is None:
            node.admissions.peer_refused(message.room, message.verdict)
        return
    if not message.before_transfer and not node.admissions.asked_with(message.room, message.nonce):
        return  # late, of a former use of the room
    # Once pages were handed to the transfer, SGLang's own ABORT ends it in order.
    if not nodes.handed_over(sender):
        node.telemetry.peer_refusal("received", message.room, message.verdict.status)
        node.fail_live(message.room, message.verdict)
