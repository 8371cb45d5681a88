"""``pd-guard audit``: reads the running prefill and decode servers and says what does not fit.

Reads ``/get_server_info``, ``/get_model_info``, ``/v1/models`` and ``/metrics`` of each server, the bootstrap server of each prefill and
``/workers`` of the router. Changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import email.utils
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from sglang_pd_guard.bindings.transport import ROUTE
from sglang_pd_guard.cli.findings import SEVERITIES, Finding, Guard, Node, Role, Worker, examine, worst
from sglang_pd_guard.telemetry import PREFIX

#: Bytes of an answer; the metrics of a large server have a few MiB.
_LARGEST = 64 << 20
_NUMBERS = ("max_total_num_tokens", "max_req_input_len", "page_size", "disaggregation_bootstrap_port")


class Unreadable(Exception):
    """A server that could not be read; the message says which and why."""


class Reader:
    """GET requests to the cluster's servers, past any proxy.

    Args:
        timeout: seconds for each.
        api_key: sent as a bearer token.
    """

    def __init__(self, timeout: float = 10.0, api_key: str | None = None):
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, url: str) -> tuple[str, Mapping[str, str]]:
        """The body and the headers.

        Raises:
            Unreadable: no answer with status 200, of at most 64 MiB, within the timeout.
        """
        import aiohttp

        try:
            return asyncio.run(self._get(url))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Unreadable(f"{url}: {type(error).__name__}") from error

    async def _get(self, url: str) -> tuple[str, Mapping[str, str]]:
        import aiohttp

        whole = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(timeout=whole, headers=self._headers) as session, session.get(url) as answer:
            if answer.status != 200:
                raise Unreadable(f"{url}: HTTP {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > _LARGEST:
                    raise Unreadable(f"{url}: more than {_LARGEST >> 20} MiB")
            return body.decode(errors="replace"), answer.headers

    def json(self, url: str) -> dict:
        try:
            found = json.loads(self.get(url)[0])
        except ValueError as error:
            raise Unreadable(f"{url}: not JSON") from error
        if not isinstance(found, dict):
            raise Unreadable(f"{url}: not an object")
        return found

    def node(self, url: str, role: Role) -> Node:
        """Raises:
        Unreadable: it does not answer, or is no SGLang server.
        """
        asked = time.time()
        body, headers = self.get(f"{url}/get_server_info")
        clock = _clock(headers.get("Date"), asked, time.time())
        try:
            info = json.loads(body)
            mode = info["disaggregation_mode"]
            if not all(isinstance(info.get(name), int | None) for name in _NUMBERS):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(f"{url}: not an SGLang server") from error
        return dataclasses.replace(
            Node(
                url=url,
                role=role,
                mode=mode,
                sglang=info.get("version"),
                pool=info.get("max_total_num_tokens"),
                intake=info.get("max_req_input_len"),
                page_size=info.get("page_size"),
                dtype=info.get("dtype"),
                kv_dtype=info.get("kv_cache_dtype"),
                page_major=info.get("enable_page_major_kv_layout"),
                backend=info.get("disaggregation_transfer_backend"),
                bootstrap_port=info.get("disaggregation_bootstrap_port"),
                truncates=bool(info.get("allow_auto_truncate")),
                weights=info.get("weight_version"),
                checksum=info.get("disaggregation_enable_kv_checksum"),
                canary=info.get("kv_canary"),
                clock=clock,
            ),
            **self._model(url),
            **self._metrics(url),
            **(self._bootstrap(url, info.get("disaggregation_bootstrap_port")) if mode == "prefill" else {}),
        )

    def workers(self, router: str) -> list[Worker]:
        """What the router knows. Raises `Unreadable`."""
        try:
            return [
                Worker(w["url"].rstrip("/"), w.get("worker_type", "?"), w.get("bootstrap_port"), bool(w.get("is_healthy", True)))
                for w in self.json(f"{router}/workers")["workers"]
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise Unreadable(f"{router}/workers: not a router's list of workers") from error

    def _model(self, url: str) -> dict:
        facts = {}
        for path, take in (
            ("/v1/models", lambda body: {"context": body["data"][0].get("max_model_len")}),
            ("/get_model_info", lambda body: {"architectures": tuple(body.get("architectures") or ()) or None}),
        ):
            try:
                facts |= take(self.json(url + path))
            except (Unreadable, KeyError, IndexError, TypeError, AttributeError):
                continue
        return facts

    def _metrics(self, url: str) -> dict:
        try:
            return guard_facts(self.get(f"{url}/metrics")[0])
        except (Unreadable, ValueError, KeyError):
            return {}

    def _bootstrap(self, url: str, port: int | None) -> dict:
        """Which guards this prefill runs; its bootstrap server is on its host."""
        try:
            described = self.json(f"http://{_bracketed(urlsplit(url).hostname)}:{port}{ROUTE}")
            return {"guards": tuple(map(str, described["guards"]))}
        except (Unreadable, KeyError, TypeError):
            return {}


def guard_facts(text: str) -> dict:
    """What a server's ``/metrics`` says of its guard, as fields of `Node`."""
    samples = {
        name: [(dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)) for labels, value in found]
        for name in ("info", "owned_when_idle", "held_pages", "admitting", "faults_total")
        if (found := re.findall(rf"^{re.escape(PREFIX + name)}(?:\{{(.*)\}})? (\S+)", text, re.MULTILINE))
    }
    owned: dict[str, int] = {}
    for labels, value in samples.get("owned_when_idle", ()):
        owned[labels["kind"]] = owned.get(labels["kind"], 0) + int(value)
    info = next((labels for labels, value in samples.get("info", ()) if value == 1), None)
    return {
        "metrics": True,
        "guard": Guard(info["version"], info["mode"], info["peer"]) if info else None,
        "owned": owned,
        "quarantined": int(sum(v for labels, v in samples.get("held_pages", ()) if labels.get("state") == "quarantined")),
        "admitting": all(value for _, value in samples.get("admitting", ())),
        "faults": int(sum(value for _, value in samples.get("faults_total", ()))),
    }


def _clock(date: str | None, asked: float, answered: float) -> float | None:
    """Seconds by which a server's clock is ahead, by its HTTP date."""
    try:
        told = email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    return told + 0.5 - (asked + answered) / 2


def _bracketed(host: str | None) -> str:
    return f"[{host}]" if host and ":" in host else str(host)


# --- the command -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Audit:
    """One look at all servers."""

    nodes: list[Node]
    findings: list[Finding]
    unreadable: list[str]

    def status(self, fail_on: str) -> int:
        if self.unreadable:
            return 2
        found = worst(self.findings)
        return int(found is not None and SEVERITIES.index(found) <= SEVERITIES.index(fail_on))


def look(reader: Reader, prefills: Sequence[str], decodes: Sequence[str], router: str | None) -> Audit:
    """Reads everything at once. Without servers named, those that the router knows."""
    unreadable: list[str] = []
    workers = None
    if router is not None:
        try:
            workers = reader.workers(router)
        except Unreadable as error:
            unreadable.append(str(error))
    asked = [(url, "prefill") for url in prefills] + [(url, "decode") for url in decodes]
    if not asked and workers is not None:
        by_role = sorted(workers, key=lambda worker: worker.role, reverse=True)  # prefill first
        asked = [(worker.url, worker.role) for worker in by_role if worker.role in ("prefill", "decode")]
        if missing := {"prefill", "decode"} - {role for _, role in asked}:
            unreadable.append(f"{router}/workers: the router knows no {' and no '.join(sorted(missing))} server")

    def read(item: tuple[str, Role]) -> Node | None:
        try:
            return reader.node(*item)
        except Unreadable as error:
            unreadable.append(str(error))
            return None

    with ThreadPoolExecutor(max(1, min(16, len(asked)))) as pool:
        nodes = [node for node in pool.map(read, asked) if node is not None]
    return Audit(nodes, examine(nodes, workers), unreadable)


def text(audit: Audit) -> str:
    lines = []
    for node in audit.nodes:
        guard = f"guard {node.guard.version} {node.guard.mode} {node.guard.peer}" if node.guard else "no guard" if node.metrics else "guard unknown"
        lines.append(
            f"{node.role:<7}  {node.url}  SGLang {node.sglang}, {guard}, pool {node.pool}, context {node.context}, page {node.page_size}, "
            f"{node.backend}"
        )
    lines += [f"UNREADABLE  {line}" for line in audit.unreadable]
    for finding in audit.findings:
        lines += ["", f"{finding.severity.upper()} {finding.rule}  {'  '.join(finding.nodes)}"]
        for name, value in (("", finding.what), ("can happen: ", finding.then), ("change: ", finding.change)):
            if value != "-":
                lines.append(textwrap.fill(name + value, 110, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    counts = {severity: sum(f.severity == severity for f in audit.findings) for severity in SEVERITIES}
    lines += ["", ", ".join(f"{number} {severity}" for severity, number in counts.items())]
    return "\n".join(lines)


def as_json(audit: Audit) -> str:
    return json.dumps(dataclasses.asdict(audit))


def drift(before: Audit, after: Audit) -> list[str]:
    """What has changed between two looks, a line each; the clocks aside."""
    lines = [f"new {f.severity} {f.rule} {' '.join(f.nodes)}: {f.what}" for f in after.findings if f not in before.findings]
    lines += [f"gone {f.severity} {f.rule} {' '.join(f.nodes)}: {f.what}" for f in before.findings if f not in after.findings]
    lines += [f"unreadable {line}" for line in after.unreadable if line not in before.unreadable]
    lines += [f"readable again {line}" for line in before.unreadable if line not in after.unreadable]
    old = {node.url: node for node in before.nodes}
    for node in after.nodes:
        for field in dataclasses.fields(Node):
            was, now = getattr(old.get(node.url, node), field.name), getattr(node, field.name)
            if was != now and field.name != "clock":
                lines.append(f"changed {node.role} {node.url} {field.name}: {was} -> {now}")
    return lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="prefill servers, http://host:port")
    parser.add_argument("--decode", nargs="+", default=[], metavar="URL", help="decode servers")
    parser.add_argument("--router", metavar="URL", help="the router; alone, it names the servers")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="seconds for each request (default 10)")
    parser.add_argument("--fail-on", choices=SEVERITIES, default="warning", help="exit status 1 from this severity on (default warning)")
    parser.add_argument("--watch", type=float, metavar="S", help="look again every so many seconds and print what has changed")
    parser.add_argument("--rounds", type=int, metavar="N", help="with --watch: look so many times (default: until interrupted)")
    parser.add_argument("--json", action="store_true", help="print JSON, with --watch one line each time")


def run(args: argparse.Namespace) -> int:
    """0: nothing of that severity. 1: something. 2: a server could not be read."""
    if not (args.router or (args.prefill and args.decode)):
        print("pd-guard audit: name prefill and decode servers, or a router", file=sys.stderr)
        return 2
    reader = Reader(args.timeout, args.api_key)
    prefills, decodes = ([url.rstrip("/") for url in urls] for urls in (args.prefill, args.decode))

    def once() -> Audit:
        return look(reader, prefills, decodes, args.router and args.router.rstrip("/"))

    audit = once()
    print(as_json(audit) if args.json else text(audit), flush=True)
    if args.watch is not None:
        audit = watch(once, audit, args.watch, args.rounds, as_json if args.json else None)
    return audit.status(args.fail_on)


def watch(
    once: Callable[[], Audit], audit: Audit, every: float, rounds: int | None, show: Callable[[Audit], str] | None
) -> Audit:
    """Looks again and again; returns the last look.

    Args:
        show: how to print each look; None prints what has changed.
    """
    done = 1
    try:
        while rounds is None or done < rounds:
            time.sleep(every)
            before, audit = audit, once()
            done += 1
            now = datetime.datetime.now().isoformat(timespec="seconds")
            for line in [show(audit)] if show else [f"{now} {line}" for line in drift(before, audit)]:
                print(line, flush=True)
    except KeyboardInterrupt:
        pass
    return audit
