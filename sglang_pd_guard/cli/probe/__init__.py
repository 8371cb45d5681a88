"""``pd-guard probe``: attacks an OpenAI-compatible endpoint and checks every answer.

Every request carries a random secret, and its right answer is that secret. Every answer, of victims and attackers, is searched for
the secrets of all other requests. First comes a quiet phase, in which the probe learns whether this model answers the task right.

It sends at most `--rate` attacks a second for `--duration` seconds, with `--concurrency` requests under way, and no request of anybody else is
touched. But an endpoint that is not guarded may answer other clients wrong or hang while it is attacked: use one that serves nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from sglang_pd_guard.cli.probe import report
from sglang_pd_guard.cli.probe.attacks import ATTACKS
from sglang_pd_guard.cli.probe.runner import CannotProbe, Options, Result
from sglang_pd_guard.cli.probe.runner import run as run_probe


def refuse_public(url: str) -> str | None:
    """Why this URL is not attacked unasked; None where its host is on this machine or in a private network."""
    host = urlsplit(url).hostname
    if not host:
        return f"{url} is no URL with a host, such as http://127.0.0.1:30000"
    try:
        found = {info[4][0].partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return f"the host {host} is not known"
    public = sorted(address for address in found if not ipaddress.ip_address(address).is_private)
    return f"{host} is at the public address {public[0]}; if you may attack it, say --i-own-this" if public else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, help="the router, or any OpenAI-compatible endpoint: http://host:port")
    add("--model", help="default: the first of /v1/models")
    add("--api", choices=("auto", "chat", "completions"), default="auto", help="default: the first that answers the task right")
    add("--api-key", help="sent as a bearer token")
    add("--prefill", metavar="URL", help="with --decode: the native API of a pair; adds the attack on bootstrap rooms, which may end an unguarded server")
    add("--decode", metavar="URL")
    add("--limit", type=int, metavar="TOKENS", help="longest prompt that the endpoint admits; default: read from the servers that the router names")
    add("--duration", type=float, default=60, metavar="S", help="seconds of the attack (default 60, at most 3600); twice that where not every attack has come by then")
    add("--rate", type=float, default=4, metavar="N", help="attacks a second, at most (default 4, at most 50)")
    add("--concurrency", type=int, default=8, metavar="N", help="requests under way, at most (default 8, at most 256)")
    add("--patience", type=float, metavar="S", help="seconds after which a request counts as hung; default: five times the slowest healthy one, 10 to 60")
    add("--attacks", default=",".join(ATTACKS), metavar="NAME[,NAME]", help=f"of {', '.join(ATTACKS)}; none: healthy traffic only")
    add("--seed", type=int, help="seed of the prompts and of the order of attacks")
    add("--report", type=Path, metavar="FILE", help="write the report as HTML")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON; - prints it")
    add("--i-own-this", action="store_true", help="the endpoint has a public address and you may attack it")


def run_options(args: argparse.Namespace) -> Options:
    """Raises:
    CannotProbe: an option that makes no sense.
    """
    names = [] if args.attacks == "none" else [name.strip() for name in args.attacks.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ATTACKS]:
        raise CannotProbe(f"unknown attack {', '.join(unknown)}; the attacks are: {', '.join(ATTACKS)}")
    for name, most in (("duration", 3600), ("rate", 50), ("concurrency", 256)):
        if not 0 < getattr(args, name) <= most:
            raise CannotProbe(f"--{name} must be above 0 and at most {most}")
    for path in (args.json, args.report):
        if path is not None and str(path) != "-":
            try:
                path.open("a").close()  # now, for in the end there would be a result to lose
            except OSError as error:
                raise CannotProbe(f"cannot write {path}: {error.strerror}") from error
    if bool(args.prefill) != bool(args.decode):
        raise CannotProbe("--prefill and --decode go together")
    urls = [url.rstrip("/") if url else None for url in (args.url, args.prefill, args.decode)]
    for url in filter(None, urls):
        if not args.i_own_this and (why := refuse_public(url)):
            raise CannotProbe(why)
    return Options(
        urls[0], args.model, args.api, urls[1], urls[2], args.limit, args.duration, args.rate, args.concurrency, args.patience,
        attacks=tuple(names), seed=args.seed, api_key=args.api_key,
    )  # fmt: skip


def text(result: Result) -> str:
    count = len(result.requests)
    lines = [f"{count} requests to {result.url} ({result.model}), {sum(r.kind == 'victim' for r in result.requests)} of them healthy"]
    if not result.checkable:
        lines.append("this model does not answer the task right when it is left in peace: wrong answers were not counted")
    lines += [f"{finding.fault.upper()}  {finding.count} {finding.what}" for finding in result.findings]
    lines.append("verdict: clean" if not result.findings else "verdict: NOT CLEAN")
    return "\n".join(lines)


def _progress(stage: str, share: float) -> None:
    if sys.stderr.isatty():
        bar = "#" * round(30 * min(1.0, share))
        print(f"\r[{bar:<30}] {100 * min(1.0, share):3.0f} % {stage:<60}", end="", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """0: clean. 1: not clean. 2: the endpoint could not be probed."""
    try:
        result = asyncio.run(run_probe(run_options(args), _progress))
    except CannotProbe as error:
        print(f"pd-guard probe: {error}", file=sys.stderr)
        return 2
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    body = json.dumps(result.as_dict())
    if args.json is not None and str(args.json) != "-":
        args.json.write_text(body)
    if args.report is not None:
        args.report.write_text(report.html(result))
    print(body if str(args.json) == "-" else text(result))
    return int(bool(result.findings))
