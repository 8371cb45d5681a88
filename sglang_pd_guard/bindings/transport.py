"""How guarded nodes reach each other: a push socket per control endpoint, and the prefill's bootstrap server."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sglang_pd_guard.guards import wire
from sglang_pd_guard.guards.admission import Endpoint

#: Added to the bootstrap server of a guarded prefill.
ROUTE = "/pd_guard"


class Outbox:
    """Push sockets to control endpoints. Never blocks; thread-safe; keeps at most 256 connections."""

    _LIMIT = 256

    def __init__(self):
        import zmq

        self._zmq = zmq
        self._lock = threading.Lock()
        self._sockets: OrderedDict[Endpoint, object] = OrderedDict()

    def send(self, endpoint: Endpoint, message: wire.Message) -> bool:
        """Returns False where the message could not even be queued."""
        with self._lock:
            try:
                socket = self._sockets.get(endpoint) or self._connect(endpoint)
                self._sockets.move_to_end(endpoint)
                socket.send_multipart(wire.encode(message), flags=self._zmq.DONTWAIT)
            except self._zmq.ZMQError:
                if endpoint in self._sockets:
                    self._sockets.pop(endpoint).close(linger=0)
                return False
            return True

    def _connect(self, endpoint: Endpoint):
        ip, port = endpoint
        socket = self._zmq.Context.instance().socket(self._zmq.PUSH)
        socket.setsockopt(self._zmq.LINGER, 0)
        if ":" in ip:
            socket.setsockopt(self._zmq.IPV6, 1)
            ip = f"[{ip.strip('[]')}]"
        self._sockets[endpoint] = socket
        socket.connect(f"tcp://{ip}:{port}")
        while len(self._sockets) > self._LIMIT:
            self._sockets.popitem(last=False)[1].close(linger=1000)
        return socket


class BootstrapClient:
    """Calls to prefill bootstrap servers.

    Args:
        on_drop: called with the room of a message that could not be delivered.
    """

    _TIMEOUT_S = 3.0
    _RETRY_S = {"unguarded": 10.0, "unreachable": 1.0}
    _MAX_PENDING = 1024

    def __init__(self, on_drop: Callable[[int], None]):
        self._on_drop = on_drop
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pd-guard")
        self._pending = threading.BoundedSemaphore(self._MAX_PENDING)
        self._unguarded_until: OrderedDict[str, float] = OrderedDict()

    def guards_of(self, bootstrap_addr: str) -> frozenset[str] | None:
        """Asks the bootstrap server which guards its prefill runs; None where it has no guard, or does not answer.

        Blocks for up to 3 s. A "no" is believed for 10 s, no answer for 1 s.
        """
        import requests

        if self._unguarded_until.get(bootstrap_addr, 0.0) > time.monotonic():
            return None
        try:
            answer = requests.get(f"http://{bootstrap_addr}{ROUTE}", timeout=self._TIMEOUT_S)
            if answer.status_code == 200 and "pd_guard" in answer.json():
                return frozenset(map(str, answer.json().get("guards", ())))
            retry = self._RETRY_S["unguarded"]
        except (requests.RequestException, ValueError, TypeError):
            retry = self._RETRY_S["unreachable"]
        self._unguarded_until[bootstrap_addr] = time.monotonic() + retry
        while len(self._unguarded_until) > 256:
            self._unguarded_until.popitem(last=False)
        return None

    def check_ranks(self, bootstrap_addr: str, on_answer: Callable[[frozenset[Endpoint]], None]) -> None:
        """Asks in the background which ranks the prefill at this address has now; calls `on_answer` only if it is complete."""
        if self._pending.acquire(blocking=False):
            self._pool.submit(self._ranks, bootstrap_addr, on_answer)

    def _ranks(self, bootstrap_addr: str, on_answer: Callable[[frozenset[Endpoint]], None]) -> None:
        import requests

        try:
            ranks = requests.get(f"http://{bootstrap_addr}{ROUTE}", timeout=self._TIMEOUT_S).json()["ranks"]
            if ranks:
                on_answer(frozenset((ip, int(port)) for ip, _, port in (rank.rpartition(":") for rank in ranks)))
        except (requests.RequestException, ValueError, TypeError, KeyError):
            pass  # nothing learnt
        finally:
            self._pending.release()

    def refuse(self, bootstrap_addr: str, refusal: wire.Refusal) -> None:
        """Delivers a refusal in the background. An unguarded prefill has no such route: nothing happens there."""
        self._post(f"http://{bootstrap_addr}{ROUTE}", dataclasses.asdict(refusal), refusal.room)

    def register_dp_rank(self, bootstrap_addr: str, room: int, dp_rank: int) -> None:
        """Tells the bootstrap server which DP rank has the request of this room, as SGLang's senders do."""
        body = {"bootstrap_room": room, "dp_rank": dp_rank}
        self._post(f"http://{bootstrap_addr}/register_dp_rank", body, room)

    def _post(self, url: str, body: dict, room: int) -> None:
        if self._pending.acquire(blocking=False):
            self._pool.submit(self._deliver, url, body, room)
        else:
            self._on_drop(room)

    def _deliver(self, url: str, body: dict, room: int) -> None:
        import requests

        try:
            if requests.post(url, json=body, timeout=self._TIMEOUT_S).status_code not in (200, 404):
                self._on_drop(room)
        except requests.RequestException:
            self._on_drop(room)
        finally:
            self._pending.release()
