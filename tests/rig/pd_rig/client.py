"""Requests to the cluster's servers, and what they answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests


@dataclass(frozen=True)
class Reply:
    """One answer. ``status`` is None where none came in time, or the connection failed; ``error`` says which."""

    status: int | None
    text: str | None  #: the generated text; of the first choice where there are several
    finish_reason: dict | None  #: OpenAI's plain word is given as {"type": word}
    error: str | None  #: the message of an error body
    body: Any  #: the parsed JSON, else the raw text
    seconds: float

    @property
    def ok(self) -> bool:
        """Answered with 200 and a finish reason other than an abort."""
        return self.status == 200 and (self.finish_reason or {}).get("type") not in (None, "abort")


def _parse(body: Any) -> tuple[str | None, dict | None, str | None]:
    """(text, finish reason, error) from SGLang's native, OpenAI's, and the several shapes of an error body."""
    first = body[0] if isinstance(body, list) and body else body
    if not isinstance(first, dict):
        return None, None, None
    if first.get("choices"):
        choice = first["choices"][0]
        text = choice["message"].get("content") if "message" in choice else choice.get("text")
        reason = choice.get("finish_reason")
    else:
        text = first.get("text")
        reason = (first.get("meta_info") or {}).get("finish_reason")
    if isinstance(reason, str):
        reason = {"type": reason}
    error = first.get("error") or first.get("message") or first.get("detail")
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    if error is None and reason and reason.get("type") == "abort":
        error = reason.get("message")
    return text, reason, None if error is None else str(error)


def post(url: str, body: dict, timeout: float) -> Reply:
    """POST ``body`` as JSON; never raises for what the server or the network does. No proxy is ever used."""
    start = time.monotonic()
    with requests.Session() as session:
        session.trust_env = False
        try:
            response = session.post(url, json=body, timeout=timeout)
        except requests.Timeout:
            return Reply(None, None, None, f"no answer in {timeout} s", None, time.monotonic() - start)
        except requests.RequestException as e:
            return Reply(None, None, None, f"{type(e).__name__}: {e}", None, time.monotonic() - start)
    seconds = time.monotonic() - start
    try:
        parsed = response.json()
    except ValueError:
        parsed = response.text
    text, reason, error = _parse(parsed)
    if error is None and response.status_code >= 400:
        error = parsed if isinstance(parsed, str) else json.dumps(parsed)
    return Reply(response.status_code, text, reason, error, parsed, seconds)


def get(url: str, timeout: float = 30.0) -> requests.Response:
    """GET; raises requests' errors. The long default allows for a machine that is starting other servers."""
    with requests.Session() as session:
        session.trust_env = False
        return session.get(url, timeout=timeout)


def run_concurrently(calls: Iterable[Callable[[], Any]], workers: int | None = None) -> list[Any]:
    """Call all at once (``workers`` at a time, by default all); the results in the order of the calls."""
    calls = list(calls)
    if not calls:
        return []
    with ThreadPoolExecutor(workers or len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
