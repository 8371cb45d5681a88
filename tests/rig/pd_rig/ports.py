"""Free TCP ports that stay ours until they are given back, also against other clusters on the machine.

A port is taken below the kernel's ephemeral range, so that no outgoing connection can grab it between the check and
the server's bind, and a file lock marks it as taken for every other process that picks ports in this way.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

from pd_rig.home import RigError

_FIRST, _LAST = 20_000, 32_000


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


class PortPool:
    """Hands out ports and holds them until ``release``."""

    def __init__(self):
        self._locks: list[IO] = []
        self._folder = Path(tempfile.gettempdir()) / f"pd-rig-ports-{os.getuid()}"

    def take(self) -> int:
        self._folder.mkdir(exist_ok=True)
        for port in random.SystemRandom().sample(range(_FIRST, _LAST), 200):
            lock = open(self._folder / str(port), "w")  # noqa: SIM115 - held open on purpose
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            if _is_free(port):
                self._locks.append(lock)
                return port
            lock.close()
        raise RigError(f"no free TCP port found between {_FIRST} and {_LAST}")

    def release(self) -> None:
        while self._locks:
            self._locks.pop().close()
