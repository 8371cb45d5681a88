"""What a scheduler says to the HTTP server of its node: whether it admits requests. ``/health`` is 503 while it does not.

By a file in a folder that both know: the HTTP server asks at each health check, and a scheduler writes when that changes.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

_FOLDER = "_SGLANG_PD_GUARD_STATUS"
_HEALTH = ("/health", "/health_generate")


class _Health:
    """ASGI middleware."""

    def __init__(self, app, folder: str):
        self._app = app
        self._folder = folder

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] in _HEALTH and any(Path(self._folder).glob("*")):
            from starlette.responses import PlainTextResponse

            text = "The PD guard admits no requests: too many KV pages are quarantined, see sglang:pd_guard_held_pages."
            return await PlainTextResponse(text, 503)(scope, receive, send)
        return await self._app(scope, receive, send)


def serve() -> None:
    """Launcher: makes the folder and puts the middleware in front of SGLang's HTTP server, where there is one."""
    folder = os.environ[_FOLDER] = tempfile.mkdtemp(prefix="pd-guard-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = sys.modules.get("sglang.srt.entrypoints.http_server")
    if server is not None:
        server.app.add_middleware(_Health, folder=folder)


def say(*, admitting: bool) -> None:
    """Scheduler."""
    file = Path(os.environ[_FOLDER], str(os.getpid()))
    if admitting:
        file.unlink(missing_ok=True)
    else:
        file.touch()
