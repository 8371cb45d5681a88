"""The state of one guarded scheduler process, shared by its hooks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sglang_pd_guard.bindings import status
from sglang_pd_guard.bindings.transport import BootstrapClient, Outbox
from sglang_pd_guard.guards import room as rooms
from sglang_pd_guard.guards.admission import Admissions, Endpoint, Verdict
from sglang_pd_guard.guards.audit import Audit
from sglang_pd_guard.guards.capacity import Finding, Limits, compare
from sglang_pd_guard.guards.receipt import digest
from sglang_pd_guard.guards.release import Holds, Writes, no_room_left
from sglang_pd_guard.guards.wire import Drain, Drained, Hello, Refusal, Wake, encode
from sglang_pd_guard.settings import Settings
from sglang_pd_guard.telemetry import Telemetry

#: Said to the client where the guard itself fails.
FAULT = Verdict(500, "The PD guard could not check this request and aborted it. Please retry; if it recurs, report the server log.")
#: A client abort carries no status; the peer's client must not take it for an answer.
_NO_STATUS = 500

_node: Node | None = None


def start(role: str, settings: Settings) -> None:
    """Called once, right before the scheduler is built."""
    global _node
    _node = Node(role, settings)


def current() -> Node:
    """The node of this process. Hooks run only after `start`."""
    assert _node is not None
    return _node


class _Recent:
    """The last `capacity` endpoints and what is known of each."""

    def __init__(self, capacity: int = 4096):
        self._capacity = capacity
        self._items: OrderedDict[Endpoint, object] = OrderedDict()

    def __setitem__(self, endpoint: Endpoint, value: object) -> None:
        self._items[endpoint] = value
        self._items.move_to_end(endpoint)
        while len(self._items) > self._capacity:
            self._items.popitem(last=False)

    def get(self, endpoint: Endpoint):
        return self._items.get(endpoint)


def on_all_ranks(flags: list[bool], *groups) -> list[bool]:
    """Each flag only where all ranks of the groups have it. Every rank passes flags of the same length."""
    import torch
    from torch import distributed

    if not any(group is not None and distributed.get_world_size(group) > 1 for group in groups):
        return flags
    agreed = torch.tensor(flags, dtype=torch.uint8)
    for group in groups:
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MIN, group=group)
    return agreed.bool().tolist()


class Node:
    """One rank of a prefill or decode node.

    Args:
        role: ``prefill`` or ``decode``.
        settings: what the operator asked for.
    """

    def __init__(self, role: str, settings: Settings):
        from sglang_pd_guard.__about__ import __version__
        from sglang_pd_guard.bindings import table
        from sglang_pd_guard.bindings.binder import effective_version, sglang_version
        from sglang_pd_guard.bindings.patches import carried

        self.role = role
        self.settings = settings
        self.telemetry = Telemetry(role)
        self.admissions = Admissions(on_change=self.telemetry.rooms)
        self.guards = table.guards(effective_version(settings), settings)
        self._holds_failed = "release" in self.guards and settings.enforcing
        #: The ownership guard takes from the receipt which pages have arrived.
        self.states_receipts = not {"receipt", "ownership"}.isdisjoint(self.guards)
        self.telemetry.start(__version__, settings.mode, settings.peer, self.guards, sglang_version(), carried())
        self.audit = Audit()
        self.holds = Holds()
        self.writes = Writes()
        self.quarantined = 0
        self._drain_asked: OrderedDict[int, dict[Endpoint, Drain]] = OrderedDict()
        self._drain_lock = threading.Lock()
        self.scheduler = None
        self.ownership = None
        self.manager = None
        self.incoming: object | None = None
        self.at_door: object | None = None
        #: decode: whether a request of a client was ever admitted, so that there is KV of somebody's.
        self.served = False
        self.handshake_steps = 0
        self._limits: Limits | None = None
        self._unfit_told = _Recent()
        self._uses = itertools.count()
        self._named: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._live: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
        self._live_lock = threading.Lock()
        #: prefill: senders of requests that SGLang has released without clearing them.
        self.abandoned: list = []
        self.guarded_peers = _Recent()
        self._outbox: Outbox | None = None
        self._client: BootstrapClient | None = None
        self._drains = False

    # --- the KV manager and its control socket ----------------------------------------------------------------

    def attach(self, manager) -> None:
        """Called when SGLang has built this rank's KV manager."""
        self.manager = manager
        self._outbox = Outbox()
        self._client = BootstrapClient(on_drop=self.telemetry.dropped_refusal)
        self._drains = _drains(manager, self.settings)

    @property
    def own_endpoint(self) -> Endpoint:
        return self.manager.local_ip, int(self.manager.rank_port)

    @property
    def is_entry_rank(self) -> bool:
        """Whether this rank marks a room Failed on a peer's word.

        It is the rank that answers the client, so it has the words when SGLang's MIN reduction over the
        attention-TP/CP group makes all ranks fail the room together.
        """
        return getattr(self.manager, "attn_tp_rank", 0) == 0 and getattr(self.manager, "attn_cp_rank", 0) == 0

    def send(self, endpoint: Endpoint, message: Refusal | Wake | Drained) -> None:
        if not self._outbox.send(endpoint, message):
            self.telemetry.dropped_refusal(message.room)

    # --- rooms ------------------------------------------------------------------------------------------------

    def track(self, room: int, transfer) -> None:
        """`transfer` is the sender (prefill) or receiver (decode) of the live request in `room`."""
        with self._live_lock:
            self._live[room] = transfer

    def occupied(self, room: int) -> bool:
        """Whether a request that has not ended owns `room` here: from its door until SGLang has cleared its sender, or
        dropped its receiver.

        The same on all ranks, unlike what a poll says.
        """
        with self._live_lock:
            transfer = self._live.get(room)
        return transfer is not None and not getattr(transfer, "_pd_guard_ended", False)

    def occupied_rooms(self) -> int:
        with self._live_lock:
            return sum(not getattr(transfer, "_pd_guard_ended", False) for transfer in self._live.values())

    def name_use(self, req, resumed: bool) -> None:
        """decode: chooses the nonce of this use of the request's room, the same on all ranks of the node; keeps it and the
        prompt's digest for `introduce`. A resumed request's prompt on prefill is longer by what it has generated.
        """
        seed = f"{self.scheduler.server_args.random_seed}:{next(self._uses)}:{req.rid}:{req.bootstrap_room}"
        nonce = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest()) >> 1 | 1
        self._named.pop(req.bootstrap_room, None)
        self._named[req.bootstrap_room] = nonce, 0 if resumed else digest(prompt_of(req))
        while len(self._named) > 65536:
            self._named.popitem(last=False)

    def admit(self, req) -> None:
        """prefill: SGLang has accepted this request and given it a sender."""
        room, sender, use = req.bootstrap_room, req.disagg_kv_sender, next(self._uses)
        sender._pd_guard_prompt, sender._pd_guard_use = digest(prompt_of(req)), use
        self.track(room, sender)
        weakref.finalize(sender, self.admissions.release, room, use).atexit = False
        verdict = self.admissions.admit(room, use, sender._pd_guard_prompt)
        if not self.settings.enforcing:
            return
        if verdict is not None:
            self.telemetry.peer_refusal("received", room, verdict.status)
            self.fail_live(room, verdict)
        if self.settings.runs("room"):
            clash = rooms.other_prompt(room)
            for endpoint, nonce in self.admissions.strangers(room, clash):
                self.refused_stranger(endpoint, room, nonce, clash, before_transfer=False)

    def strange(self, hello: Hello) -> bool:
        """prefill: whether this decode rank asks for another request than the one that owns the room here; it is told then."""
        if not self.settings.runs("room") or not self.settings.enforcing:
            return False
        clash = rooms.other_prompt(hello.room)
        owner_too = self.admissions.stranger(hello.room, hello.endpoint, hello.nonce, hello.prompt, clash)
        if owner_too is None:
            return False
        self.refused_stranger(hello.endpoint, hello.room, hello.nonce, clash, before_transfer=True, owner_too=owner_too)
        return True

    def refused_stranger(
        self, endpoint: Endpoint, room: int, nonce: int, clash: Verdict, *, before_transfer: bool, owner_too: bool = True
    ) -> None:
        self.telemetry.refused("room", "other-prompt", None, room, clash.status, True)
        self.tell_decode(endpoint, room, nonce, clash, before_transfer)
        if owner_too and self.live(room) is not None:
            self.fail_live(room, clash)

    def abandon(self, req) -> None:
        """prefill: SGLang has released this request, and leaves its sender, and so its room, as it is."""
        sender = getattr(req, "disagg_kv_sender", None)
        if sender is None or not self.settings.enforcing:
            return
        self.abandoned.append(sender)  # first: the list must be alike on all ranks, whatever `abort` does
        if getattr(sender, "conclude_state", None) is None:
            with self.shield("abandon", req):
                sender.abort()  # tells decode

    def live(self, room: int):
        """The sender or receiver of the request that lives in `room`, or None."""
        with self._live_lock:
            transfer = self._live.get(room)
        return transfer if transfer is not None and getattr(transfer, "conclude_state", None) is None else None

    def fail_live(self, room: int, verdict: Verdict, *, every_rank: bool = False) -> None:
        """Ends the live request in `room` with `verdict`, through SGLang's own poll: on the rank that answers the client, or,
        where each rank is told and none may start another write, on `every_rank`.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.admissions.peer_refused(room, verdict)
        self.manager.record_failure(room, verdict.message)
        if every_rank or self.is_entry_rank:
            self.manager.update_status(room, KVPoll.Failed)

    def forget_metadata(self, room: int):
        """prefill: drops what SGLang has stored of a request that it has not admitted, and returns decode's metadata.

        For the control thread, the only one that stores metadata, so that none can slip in between.
        """
        infos = self.manager.transfer_infos.pop(room, None)
        getattr(self.manager, "req_to_decode_prefix_len", {}).pop(room, None)
        self.manager.request_status.pop(room, None)
        return infos

    # --- refusals ---------------------------------------------------------------------------------------------

    def refused(self, req, verdict: Verdict, rule: str, *, guard: str = "admission", at_door: bool = False) -> None:
        """A request is refused here: count it and tell the peer.

        Args:
            req: SGLang's request.
            verdict: what its client is told.
            rule, guard: name the check and whose it is, for metrics and log.
            at_door: it has no sender or receiver yet; whatever lives in its room is another request's.
        """
        room = req.bootstrap_room
        self.count(req, verdict, rule, guard)
        if not self.settings.enforcing or self.manager is None or room is None or not self.settings.runs("admission"):
            return
        sender = getattr(req, "disagg_kv_sender", None)
        if (at_door or (self.role == "prefill" and sender is None)) and self.live(room) is not None:
            return  # the other request's peer must not hear of this one
        if self.role == "decode":
            if self.is_entry_rank:
                self._tell_prefill(req, verdict, at_door)
            return
        self.refuse_room(room, verdict, sender)
        if sender is None and getattr(self.manager.server_args, "dp_size", 1) > 1:
            # A sender's first act, without which decode may not find the rank that refused.
            self._client.register_dp_rank(f"{req.bootstrap_host}:{req.bootstrap_port}", room, self.manager.attn_dp_rank)

    def count(self, req, verdict: Verdict, rule: str, guard: str) -> None:
        """Counts and logs a refusal that all ranks come to by themselves, on one of them."""
        if self.is_entry_rank and getattr(self.manager, "pp_rank", 0) == 0:
            self.telemetry.refused(guard, rule, req.rid, req.bootstrap_room, verdict.status, self.settings.enforcing)

    def refused_double(self, req, prompt: int, verdict: Verdict) -> None:
        """A request is refused at the door since another one lives in its room. The peer may have seen the last of that
        one, or not the first of it: it is told which prompt is meant.
        """
        self.count(req, verdict, "in-use", "room")
        if not self.settings.enforcing:
            return
        if self.role == "prefill":
            self.admissions.double(req.bootstrap_room, prompt, verdict)
        elif self.is_entry_rank and req.bootstrap_host and req.bootstrap_port:
            from sglang.srt.disaggregation.decode import _bootstrap_addr

            self._client.refuse(_bootstrap_addr(req), Refusal(req.bootstrap_room, 0, True, verdict, prompt))

    def refuse_room(self, room: int, verdict: Verdict, sender) -> None:
        """prefill: tells every decode rank that asks or will ask for `room`.

        Args:
            sender: of the refused request; None where it never had one. Its first verdict counts: whoever asks after that
                asks for the next request in this room.
        """
        if getattr(sender, "_pd_guard_refused", False):
            return
        if sender is not None:
            sender._pd_guard_refused = True
        in_flight = sender is not None and handed_over(sender)
        for endpoint, nonce in self.admissions.refuse(room, verdict, admitted=sender is not None):
            peer = self.guarded_peers.get(endpoint)
            # decode would give pages back that a write may still target, unless it waits for the writes to drain.
            if not in_flight or (peer is not None and peer.drains):
                self.tell_decode(endpoint, room, nonce, verdict)
        if sender is None:
            self.send(self.own_endpoint, Wake(room))
        elif not in_flight:
            for endpoint in self.unguarded_askers(self.manager.transfer_infos.get(room)):
                self.tell_decode(endpoint, room, 0, verdict)

    def unguarded_askers(self, infos) -> list[Endpoint]:
        """The decode endpoints without a guard among SGLang's stored metadata of one room."""
        askers = [info for info in list((infos or {}).values()) if not _is_dummy(info)]
        endpoints = [(info.endpoint, int(info.dst_port)) for info in askers]
        return [endpoint for endpoint in endpoints if not self.guarded_peers.get(endpoint)]

    def tell_decode(
        self, endpoint: Endpoint, room: int, nonce: int, verdict: Verdict, before_transfer: bool = False
    ) -> None:
        """Sends one decode rank the verdict, in the words it understands.

        Args:
            before_transfer: its metadata for the room is dropped, so that nobody writes to its pages.
        """
        peer = self.guarded_peers.get(endpoint)
        if peer is not None and peer.mode == "enforce":
            self.send(endpoint, Refusal(room, nonce, before_transfer, verdict))
        else:
            self._tell_unguarded(endpoint, room)
        self.telemetry.peer_refusal("sent", room, verdict.status)

    def _tell_unguarded(self, endpoint: Endpoint, room: int) -> None:
        """SGLang's own failure message: no status and no words, but decode stops waiting."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        manager = self.manager
        try:
            if hasattr(manager, "send_kv_status_message"):
                manager.send_kv_status_message(targets=[endpoint], bootstrap_room=room, status=KVPoll.Failed)
            elif hasattr(manager, "sync_status_to_decode_endpoint"):
                manager.sync_status_to_decode_endpoint(*endpoint, room, KVPoll.Failed, 0)
        except Exception:
            self.telemetry.dropped_refusal(room)

    def _tell_prefill(self, req, verdict: Verdict, at_door: bool) -> None:
        from sglang.srt.disaggregation.decode import _bootstrap_addr

        if not req.bootstrap_host or not req.bootstrap_port:
            return
        receiver = getattr(req, "_pd_guard_receiver", None)  # set behind the door
        if receiver is None and not at_door and self.live(req.bootstrap_room) is not None:
            return  # another request lives in this room
        nonce = 0 if receiver is None else getattr(receiver(), "_pd_guard_nonce", 0)
        self._client.refuse(_bootstrap_addr(req), Refusal(req.bootstrap_room, nonce, receiver is None, verdict))
        self.telemetry.peer_refusal("sent", req.bootstrap_room, verdict.status)

    # --- writes that may be under way -------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        return self.scheduler.token_to_kv_pool_allocator.page_size

    def released(self, nonce: int) -> None:
        """decode: SGLang gives the pages of this request back now."""
        with self.shield("release"):
            self.telemetry.released(self.holds.release(nonce, time.monotonic()))

    def quarantine(self, pages: int) -> None:
        """decode: so many pages are quarantined now, as all ranks agree; beyond the limit this node admits nothing."""
        was_full = self.no_room_left() is not None
        self.quarantined = pages
        full = self.no_room_left() is not None
        if full != was_full:
            with self.shield("release"):
                self.telemetry.admitting(not full, pages)
                if self.is_entry_rank:
                    status.say(admitting=not full)

    def no_room_left(self) -> Verdict | None:
        pool = self.scheduler.token_to_kv_pool_allocator.size // self.page_size
        return no_room_left(self.quarantined, pool, self.settings.max_quarantined)

    def look_for_gone(self, bootstrap_addr: str, writers: Iterable[Endpoint]) -> None:
        """decode: a prefill that has started anew at this address has other ranks; the process behind a former one is gone."""

        def compare(ranks: frozenset[Endpoint]) -> None:
            for writer in set(writers) - ranks:
                self.holds.gone(writer)

        self._client.check_ranks(bootstrap_addr, compare)

    def write_key(self, room: int) -> int:
        """prefill: names the request that owns `room` in the ledger of writes: by its nonce, which decode knows as well."""
        key = self.admissions.nonce(room) or -1 - room
        with self._live_lock:
            sender = self._live.get(room)
        if sender is not None:
            sender._pd_guard_request = key
        return key

    def returned(self, senders: list, *groups) -> list[bool]:
        """prefill: of each sender, whether no write of its request is queued or under way on any rank of the groups."""
        return on_all_ranks([self.writes.returned(getattr(sender, "_pd_guard_request", None)) for sender in senders], *groups)

    def groups(self) -> tuple:
        """The groups of ranks that step together."""
        return tuple(getattr(self.scheduler, name, None) for name in ("attn_cp_cpu_group", "attn_tp_cpu_group"))

    def keeps_source(self, sender) -> bool:
        """prefill: whether the pages of this sender's request must stay, since a chunk of it is being written on some rank. A
        collective. Never with pipeline parallelism, where the stages would part.
        """
        if not self._holds_failed or self.scheduler.server_args.pp_size > 1:
            return False
        return not self.returned([sender], *self.groups())[0]

    def drain_asked(self, message: Drain) -> None:
        with self._drain_lock:
            self._drain_asked.setdefault(message.nonce, {})[message.endpoint] = message
            while len(self._drain_asked) > 65536:
                self._drain_asked.popitem(last=False)  # it will be asked again

    def is_drain_asked(self, nonce: int | None) -> bool:
        return nonce in self._drain_asked

    def answer_drained(self, nonce: int) -> None:
        """prefill: tells each decode rank that asked, once the last write of request `nonce` has returned here."""
        if not self.writes.returned(nonce):
            return
        with self._drain_lock:
            asked = self._drain_asked.pop(nonce, {})
        for endpoint, drain in asked.items():
            unknown = self.writes.unknown(nonce)
            self.send(endpoint, Drained(drain.room, nonce, drain.writer_ip, drain.writer_port, unknown))

    # --- decode: knowing the prefill --------------------------------------------------------------------------

    def introduce(self, receiver) -> None:
        """decode: introduces this request to its prefill ranks, or fails it where they may not serve it."""
        room = receiver.bootstrap_room
        infos = getattr(receiver, "bootstrap_infos", None)
        if not infos or room is None or receiver.conclude_state is not None:
            return
        self.track(room, receiver)
        receiver._pd_guard_nonce, prompt = self._named.pop(room, None) or (secrets.randbits(63) | 1, 0)
        ip, port = self.own_endpoint
        limits = self.limits()
        for info in infos:
            endpoint = rank_endpoint(info)
            guards = self._guards_of(endpoint, receiver.bootstrap_addr)
            receiver._pd_guard_receipts = guards is not None and not guards.isdisjoint(("receipt", "ownership"))
            receiver._pd_guard_drains = guards is not None and "release" in guards
            if guards is None:
                self._unguarded_prefill(receiver)
                return
            drains = self._drains or (self._holds_failed and receiver._pd_guard_drains)
            hello = Hello(
                room, receiver._pd_guard_nonce, ip, port, self.settings.mode, drains,
                limits.longest, limits.truncates, prompt,
            )  # fmt: skip
            # SGLang's own socket: the introduction arrives ahead of the metadata that follows on it.
            socket, lock = type(receiver)._connect_to_bootstrap_server(info)
            with lock:
                socket.send_multipart(encode(hello))

    def _guards_of(self, endpoint: Endpoint, bootstrap_addr: str) -> frozenset[str] | None:
        """The guards that run on this prefill; None where it has no guard at all."""
        known = self.guarded_peers.get(endpoint)
        if known is None:
            known = self._client.guards_of(bootstrap_addr)
            if known is not None:
                self.guarded_peers[endpoint] = known
        return known

    def refuses_unguarded(self, room: int, peer: str) -> bool:
        """Whether the unguarded `peer` of the request in `room` may not serve it; counted either way."""
        refuse = self.settings.peer == "require" and self.settings.enforcing
        self.telemetry.unguarded_peer("refused" if refuse else "served", room, peer)
        return refuse

    def _unguarded_prefill(self, receiver) -> None:
        if self.refuses_unguarded(receiver.bootstrap_room, receiver.bootstrap_addr):
            self.fail_receiver(receiver, unguarded(f"prefill {receiver.bootstrap_addr}"))

    # --- capacity ---------------------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """What this node admits, which never changes."""
        if self._limits is None:
            self._limits = _limits(self)
        return self._limits

    def _finding(self, hello: Hello) -> Finding | None:
        return compare(self.limits(), hello.limits) if self.settings.runs("capacity") else None

    def turned_away(self, hello: Hello) -> bool:
        """prefill: whether this decode's requests are refused for its capacity."""
        return self.settings.enforcing and not self.settings.allow_capacity_mismatch and self._finding(hello) is not None

    def unfit(self, hello: Hello) -> Verdict | None:
        """prefill: the verdict on a request of a decode that this prefill may not serve; what is found is counted."""
        found = self._finding(hello)
        if found is None:
            return None
        refuse = self.turned_away(hello)
        first = self._unfit_told.get(hello.endpoint) != hello.limits
        self._unfit_told[hello.endpoint] = hello.limits
        peer = f"{hello.ip}:{hello.port}"
        self.telemetry.finding(found.rule, refuse, peer, found.prefill, found.decode, first=first)
        return found.verdict if refuse else None

    def fail_receiver(self, receiver, verdict: Verdict) -> None:
        """decode: ends a request whose handshake is in progress, as SGLang's own handshake failures do."""
        from sglang.srt.disaggregation.base.conn import KVPoll

        room = receiver.bootstrap_room
        self.admissions.peer_refused(room, verdict)
        self.manager.record_failure(room, verdict.message)
        receiver.conclude_state = KVPoll.Failed
        self.manager.update_status(room, KVPoll.Failed)

    # --- faults -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shield(self, seam: str, req=None, room: int | None = None) -> Iterator[list[bool]]:
        """Turns an exception inside a hook into ``[True]``: the caller then aborts that one request."""
        fault = [False]
        try:
            yield fault
        except Exception:
            fault[0] = True
            with contextlib.suppress(Exception):
                self.telemetry.fault(seam, getattr(req, "rid", None), getattr(req, "bootstrap_room", room))


def _drains(manager, settings: Settings) -> bool:
    """Whether SGLang itself holds the pages of any failed transfer on this decode until the writes have drained: 0.5.21 and
    later or our patch for earlier ones, unless switched off."""
    from sglang_pd_guard.bindings.binder import effective_version
    from sglang_pd_guard.bindings.patches import carried
    from sglang_pd_guard.bindings.table import order

    held = getattr(manager, "enable_deferred_decode_kv_release", False)
    any_failure = order(effective_version(settings)) >= order("0.5.21") or "deferred-release" in carried()
    return bool(held) and any_failure


def slot_of(req) -> int | None:
    """The request's slot in SGLang's map of KV pages; None while it has none."""
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def prompt_of(req):
    """The token ids that both nodes know alike: those that stand for images are hashes of each node's own features."""
    return req.origin_input_ids if req.multimodal_inputs is None else req.origin_input_ids_unpadded


def _limits(node: Node) -> Limits:
    scheduler = node.scheduler
    truncates = bool(getattr(scheduler.server_args, "allow_auto_truncate", False))
    if getattr(scheduler, "enable_hisparse", False):  # its capacity is not the pool's
        return Limits(0, truncates)
    longest = scheduler.max_req_input_len - 1
    if node.role == "prefill" or node.settings.runs("admission"):
        longest = min(longest, pool_tokens(scheduler) - margin(scheduler, node.role))
    return Limits(longest, truncates)


def pool_tokens(scheduler) -> int:
    return scheduler.max_total_num_tokens * getattr(scheduler, "kv_shard_widening", 1)


def margin(scheduler, role: str) -> int:
    """Tokens of the pool that SGLang's scheduler keeps free beside a prompt, or it never runs it."""
    if role == "decode":  # DecodePreallocQueue.pop_preallocated
        return scheduler.disagg_decode_prealloc_queue.num_reserved_decode_tokens
    # PrefillAdder.add_one_req keeps a page for alignment and takes prompt + 1 < pool.
    return scheduler.token_to_kv_pool_allocator.page_size + 2


def handed_over(sender) -> bool:
    """Whether anything of this request was given to the transfer; a request without pages sends its metadata all the same."""
    return getattr(sender, "curr_idx", 1) > 0 or getattr(sender, "num_kv_indices", None) == 0


def rank_endpoint(info) -> Endpoint:
    """The control endpoint of a prefill rank, from what SGLang's bootstrap server says of it."""
    return str(info["rank_ip"]), int(info["rank_port"])


def _is_dummy(info) -> bool:
    return info.is_dummy() if callable(info.is_dummy) else bool(info.is_dummy)


def unguarded(peer: str) -> Verdict:
    """Said to a client whose request would need an unguarded peer under ``--pd-guard-peer require``."""
    return Verdict(
        503,
        f"Refused by the PD guard: {peer} runs without the guard. Start it with --enable-pd-guard, or start this "
        "node with --pd-guard-peer prefer while you upgrade.",
    )


def verdict_of(req) -> Verdict | None:
    """The abort that SGLang has decided for this request, or None."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for reason in (req.to_finish, req.finished_reason):
        if isinstance(reason, FINISH_ABORT):
            return Verdict(reason.status_code or _NO_STATUS, reason.message, reason.err_type)
    return None
