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

    def __init__(self, local_ip: str):
        import zmq

        self._zmq = zmq
        self._ipv6 = ":" in local_ip
        self._lock = threading.Lock()
        self._sockets: OrderedDict[Endpoint, object] = OrderedDict()

    @staticmethod
    def frames(message: wire.Message) -> list[bytes]:
        return wire.encode(message)

    def send(self, endpoint: Endpoint, message: wire.Message) -> bool:
        """Returns False where the message could not even be queued."""
        with self._lock:
            socket = self._sockets.get(endpoint) or self._connect(endpoint)
            self._sockets.move_to_end(endpoint)
            try:
                socket.send_multipart(wire.encode(message), flags=self._zmq.DONTWAIT)
            except self._zmq.ZMQError:
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
        socket.connect(f"tcp://{ip}:{port}")
        self._sockets[endpoint] = socket
        while len(self._sockets) > self._LIMIT:
            self._sockets.popitem(last=False)[1].close(linger=1000)
        return socket


class PrefillClient:
    """decode's view of prefill bootstrap servers.

    Args:
        on_drop: called with the room of a refusal that could not be delivered.
    """

    _TIMEOUT_S = 3.0
    _RETRY_UNGUARDED_S = 10.0
    _MAX_PENDING = 1024

    def __init__(self, on_drop: Callable[[int], None]):
        self._on_drop = on_drop
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pd-guard")
        self._pending = threading.BoundedSemaphore(self._MAX_PENDING)
        self._unguarded_until: OrderedDict[str, float] = OrderedDict()

    def is_guarded(self, bootstrap_addr: str) -> bool:
        """Asks the bootstrap server; blocks for up to 3 s. A "no" is believed for 10 s."""
        import requests

        if self._unguarded_until.get(bootstrap_addr, 0.0) > time.monotonic():
            return False
        try:
            answer = requests.get(f"http://{bootstrap_addr}{ROUTE}", timeout=self._TIMEOUT_S)
            guarded = answer.status_code == 200 and "pd_guard" in answer.json()
        except (requests.RequestException, ValueError):
            guarded = False
        if not guarded:
            self._unguarded_until[bootstrap_addr] = time.monotonic() + self._RETRY_UNGUARDED_S
            while len(self._unguarded_until) > 256:
                self._unguarded_until.popitem(last=False)
        return guarded

    def refuse(self, bootstrap_addr: str, refusal: wire.Refusal) -> None:
        """Delivers a refusal in the background. An unguarded prefill has no such route: nothing happens there."""
        if not self._pending.acquire(blocking=False):
            self._on_drop(refusal.room)
            return
        self._pool.submit(self._post, bootstrap_addr, refusal)

    def _post(self, bootstrap_addr: str, refusal: wire.Refusal) -> None:
        import requests

        try:
            answer = requests.post(
                f"http://{bootstrap_addr}{ROUTE}", json=dataclasses.asdict(refusal), timeout=self._TIMEOUT_S
            )
            if answer.status_code not in (200, 404):
                self._on_drop(refusal.room)
        except requests.RequestException:
            self._on_drop(refusal.room)
        finally:
            self._pending.release()
