"""Requests to an OpenAI-compatible endpoint, streamed or not, that may be left at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

#: Bytes of an answer that are read at most.
_MOST = 4 << 20


@dataclasses.dataclass
class Reply:
    """One answer.

    Args:
        status: HTTP status; None where none came.
        pieces: the text, in the pieces in which it came; all choices together.
        finish: the last finish reason.
        error: that of an error body, cut short, or why there is no answer; ``timeout`` where it did not end in time.
        first: seconds to the first piece.
        gaps: seconds between pieces.
        seconds: all of it.
        tokens: of the prompt, by the server's own count.
        left: the client went away on purpose.
    """

    status: int | None = None
    pieces: list[str] = dataclasses.field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tokens: int | None = None
    left: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Client:
    """Args:
    url: of the endpoint, without ``/v1``.
    model: its name.
    kind: which of the two APIs.
    """

    def __init__(self, session, url: str, model: str, kind: Literal["chat", "completions"]):
        self._session = session
        self._url = f"{url}/v1/{'chat/completions' if kind == 'chat' else 'completions'}"
        self._model = model
        self._kind = kind

    async def ask(
        self, prompt: str, *, tokens: int = 64, patience: float = 30, stream: bool = True, leave: float | None = None, **extra: Any
    ) -> Reply:
        """One greedy request. Never raises for what the server or the network does.

        Args:
            tokens: of the answer, at most.
            patience: seconds after which it counts as hung.
            leave: go away after so many seconds, whatever has come.
            extra: into the body.
        """
        body = {"model": self._model, "temperature": 0, "max_tokens": tokens, "stream": stream, **extra}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self._kind == "chat" else {"prompt": prompt}
        return await post(self._session, self._url, body, patience=patience, leave=leave)


async def post(session, url: str, body: dict[str, Any], *, patience: float = 30, leave: float | None = None) -> Reply:
    """POST a request for text to OpenAI's or SGLang's native API."""
    reply = Reply()
    begin = time.monotonic()
    limit = patience if leave is None else min(patience, leave)
    task = asyncio.create_task(_exchange(session, url, body, reply, begin))
    done, _ = await asyncio.wait({task}, timeout=limit)
    if not done:
        task.cancel()  # closes the connection, which is how a client goes away
        with contextlib.suppress(asyncio.CancelledError):
            await task
        reply.left = leave is not None and leave <= patience
        if not reply.left:
            reply.error = "timeout"
    reply.seconds = time.monotonic() - begin
    return reply


async def _exchange(session, url: str, body: dict[str, Any], reply: Reply, begin: float) -> None:
    import aiohttp

    try:
        # A redirect could lead to a host that may not be attacked.
        async with session.post(url, json=body, allow_redirects=False) as response:
            reply.status = response.status
            if body.get("stream") and response.status == 200:
                async for event in _events(response):
                    _take(event, reply, begin)
            else:
                raw = await response.content.read(_MOST)
                with contextlib.suppress(ValueError):
                    _take(json.loads(raw), reply, begin)
                if response.status != 200 and reply.error is None:
                    reply.error = raw[:200].decode(errors="replace")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reply.error = type(error).__name__


async def _events(response) -> AsyncIterator[Any]:
    """The JSON objects of a stream of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _take(body: Any, reply: Reply, begin: float) -> None:
    """Adds what one JSON object says to the reply."""
    first = body[0] if isinstance(body, list) and body else body
    if not isinstance(first, dict):
        return
    error = first.get("error") or (first.get("message") if first.get("object") == "error" else None) or first.get("detail")
    if error:
        reply.error = str(error.get("message", error) if isinstance(error, dict) else error)[:200]
    text = ""
    for choice in first.get("choices") or ():
        delta = choice.get("delta") or choice.get("message") or {}
        text += choice.get("text") or "".join(delta.get(key) or "" for key in ("reasoning_content", "content"))
        reply.finish = choice.get("finish_reason") or reply.finish
    meta = first.get("meta_info") or {}
    if "text" in first:  # SGLang's native API
        text += first["text"] or ""
        reason = meta.get("finish_reason")
        reply.finish = reason.get("type") if isinstance(reason, dict) else reason
    reply.tokens = (first.get("usage") or {}).get("prompt_tokens") or meta.get("prompt_tokens") or reply.tokens
    if text:
        now = time.monotonic() - begin
        if reply.first is None:
            reply.first = now
        else:
            reply.gaps.append(now - reply.first - sum(reply.gaps))
        reply.pieces.append(text)
