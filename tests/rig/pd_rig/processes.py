"""Server processes: started in a session of their own, watched, and ended with everything they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil

from pd_rig.home import RigError


class ServerProcess:
    """One server; its output goes to a log file. It leads a session, by which stray descendants are found as well."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.command = command
        self.env = env
        self.log = log
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._popen.poll()

    def wait(self, timeout: float) -> int:
        """Wait for it to end; the exit status."""
        return self._popen.wait(timeout)

    def check(self) -> None:
        """Raise with the exit status and the end of the log if the process has ended."""
        status = self.returncode()
        if status is not None:
            raise RigError(
                f"{self.name} ended with exit status {status}; its log ends so:\n{self.log_tail()}"
            )

    def tree(self) -> list[psutil.Process]:
        """The server and its descendants that live, also those whose parent is gone."""
        found: dict[int, psutil.Process] = {}
        try:
            if self.returncode() is None:
                leader = psutil.Process(self.pid)
                found = {p.pid: p for p in [leader, *leader.children(recursive=True)]}
        except psutil.NoSuchProcess:
            pass
        for process in psutil.process_iter():
            try:
                if process.pid not in found and os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
            except OSError:  # ended meanwhile
                continue
        return list(found.values())

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to the whole tree."""
        for process in self.tree():
            _signal(lambda process=process: process.send_signal(what))

    def memory(self) -> int:
        """Resident bytes of the whole tree (pages shared between its processes counted once for each)."""
        total = 0
        for process in self.tree():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total


def stop_all(servers: list[ServerProcess], patience: float = 0.5) -> None:
    """End the servers and all their descendants: TERM, and KILL for what is left after ``patience`` seconds."""
    victims = {p.pid: p for server in servers for p in server.tree()}
    for process in victims.values():
        _signal(process.terminate)
    psutil.wait_procs(list(victims.values()), timeout=patience)
    victims |= {p.pid: p for server in servers for p in server.tree()}
    for process in victims.values():
        if process.is_running():
            _signal(process.kill)
    for server in servers:
        server.wait(5)
    psutil.wait_procs(list(victims.values()), timeout=5)


def _signal(send) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        send()
