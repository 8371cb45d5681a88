"""A run of the probe: calibrate, quiet phase, attack, settle."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from sglang_pd_guard.cli.audit import Reader, Unreadable
from sglang_pd_guard.cli.findings import Node
from sglang_pd_guard.cli.probe import attacks, prompts
from sglang_pd_guard.cli.probe.attacks import Limits, Moments, Plan, Planner
from sglang_pd_guard.cli.probe.client import Client, Reply, post
from sglang_pd_guard.cli.probe.secrets import Secrets, new_secret
from sglang_pd_guard.cli.probe.verdict import (
    Finding,
    Request,
    by_kind,
    checkable,
    findings,
    judge,
    latencies,
    percentile,
)

#: Tokens of an answer, at most: more than a secret takes.
ANSWER = 64


class CannotProbe(Exception):
    """The endpoint cannot be probed; the message says why and what to give."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Args:
    url: the router, or any OpenAI-compatible endpoint.
    model, kind: its model and API; found where not given.
    prefill, decode: native URLs of a pair, for the attacks that need them.
    limit: tokens of the longest prompt that must be admitted; read from the servers where not given.
    duration: seconds of the attack.
    rate: attacks a second, at most.
    concurrency: requests under way at once, at most.
    patience: seconds after which a request counts as hung; by default five times what the slowest healthy one takes, 10 to 60.
    attacks: names of them; none sends healthy traffic only.
    """

    url: str
    model: str | None = None
    kind: str = "auto"
    prefill: str | None = None
    decode: str | None = None
    limit: int | None = None
    duration: float = 60
    rate: float = 4
    concurrency: int = 8
    patience: float | None = None
    settle: float = 20
    attacks: tuple[str, ...] = tuple(attacks.ATTACKS)
    seed: int | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class Result:
    """What a run brought. `begins` holds the second at which each phase began."""

    url: str
    model: str
    kind: str
    started: str
    seed: int
    limits: Limits
    patience: float
    checkable: bool
    attacks: list[str]
    begins: dict[str, float]
    nodes: list[Node]
    requests: list[Request]
    pages: dict[str, int]
    findings: list[Finding]

    def as_dict(self) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        return out | {"ok": not self.findings, "kinds": by_kind(self.requests), "latencies": latencies(self.requests)}


Progress = Callable[[str, float], None]


class Run:
    """One run against one endpoint."""

    def __init__(self, options: Options, session, progress: Progress):
        self._options = options
        self._session = session
        self._progress = progress
        self._reader = Reader(10, options.api_key)
        self._seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
        self._rng = random.Random(self._seed)
        self._secrets = Secrets()
        self._owners: dict[str, int] = {}
        self._requests: list[Request] = []
        self._begin = time.monotonic()
        self._slots = asyncio.Semaphore(options.concurrency)
        self._phase = "quiet"
        self._patience = options.patience or 60.0
        self._client: Client

    async def run(self) -> Result:
        """Raises:
        CannotProbe: the endpoint does not answer, or too little is known of it.
        """
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._progress("calibrate", 0)
        model = self._options.model or await self._first_model()
        kind, sizes = await self._calibrate(model)
        nodes = await asyncio.to_thread(self._nodes)
        limits = self._limits(nodes)
        try:
            planner = Planner(self._rng, sizes, limits)
        except ValueError as error:
            raise CannotProbe(str(error)) from error
        pair = self._pair(nodes)
        kinds = [name for name in self._options.attacks if name != "room" or pair]
        before = await self._used(nodes)

        begins = {"quiet": self._now()}
        await self._quiet(planner)
        begins["attack"], self._phase = self._now(), "attack"
        await self._attack(planner, kinds, pair, max((n.pool or 0 for n in nodes if n.role == "decode"), default=0))
        begins["after"], self._phase = self._now(), "after"
        pages = await self._settle(nodes, before)
        await asyncio.gather(*(self._send(planner.victim()) for _ in range(4)))
        begins["end"] = self._now()

        can_check = checkable(self._requests)
        for request in self._requests:
            request.fault = judge(request, can_check)
        self._requests.sort(key=lambda request: request.begin)
        return Result(
            self._options.url, model, kind, started, self._seed, limits, self._patience, can_check, kinds, begins, nodes,
            self._requests, pages, findings(self._requests, pages),
        )  # fmt: skip

    # ------------------------------------------------------------ what the endpoint is

    async def _first_model(self) -> str:
        try:
            body = await asyncio.to_thread(self._reader.json, f"{self._options.url}/v1/models")
            return str(body["data"][0]["id"])
        except (Unreadable, KeyError, IndexError, TypeError) as error:
            raise CannotProbe(f"{self._options.url}/v1/models names no model ({error}); give --model") from error

    async def _calibrate(self, model: str) -> tuple[str, prompts.Sizes]:
        """Which API to use, and how many tokens a prompt takes: the first API through which the task is answered right."""
        kinds = ("chat", "completions") if self._options.kind == "auto" else (self._options.kind,)
        usable: list[tuple[str, Client, int]] = []
        said = ""
        for kind in kinds:
            client = Client(self._session, self._options.url, model, kind)
            secret = new_secret(self._rng)
            reply = await client.ask(prompts.recall(secret), tokens=ANSWER, patience=self._patience, stream=False)
            if reply.status == 200 and reply.error is None and reply.tokens:
                usable.insert(0 if secret in reply.text else len(usable), (kind, client, reply.tokens))
                if secret in reply.text:
                    break
            said = f"HTTP {reply.status}, {reply.error or 'no count of its tokens'}"
        if not usable:
            raise CannotProbe(f"{self._options.url} does not answer a prompt of {len(prompts.recall(new_secret(self._rng)))} characters: {said}")
        kind, self._client, base = usable[0]

        async def tokens(**extra: int) -> tuple[int, int]:
            prompt = prompts.recall(new_secret(self._rng), **extra)
            reply = await self._client.ask(prompt, tokens=1, patience=self._patience, stream=False)
            if not reply.tokens:
                raise CannotProbe(f"{self._options.url} does not count the tokens of a prompt: HTTP {reply.status}, {reply.error}")
            return len(prompt), reply.tokens

        (lines_chars, lines), (words_chars, words) = await tokens(lines=20), await tokens(filler=100)
        exact = (base, lines, words) == (len(prompts.recall("a" * 32)), lines_chars, words_chars)
        try:
            return kind, prompts.Sizes.measured(base, (20, lines), (100, words), exact)
        except ValueError as error:
            raise CannotProbe(str(error)) from error

    def _nodes(self) -> list[Node]:
        """The servers behind the endpoint, as far as they can be read."""
        options = self._options
        named = [(url, role) for url, role in ((options.prefill, "prefill"), (options.decode, "decode")) if url]
        if not named:
            with contextlib.suppress(Unreadable):
                named = [(w.url, w.role) for w in self._reader.workers(options.url) if w.role in ("prefill", "decode")]
        nodes = []
        for url, role in named:
            with contextlib.suppress(Unreadable):
                nodes.append(self._reader.node(url, role))
        return nodes

    def _limits(self, nodes: Sequence[Node]) -> Limits:
        prefills = [node for node in nodes if node.role == "prefill" and node.longest is not None]
        admitted = self._options.limit or min((node.longest for node in prefills), default=None)
        if admitted is None:
            raise CannotProbe("the longest prompt that is admitted is not known: give --limit, or --prefill and --decode")
        # SGLang's prefill keeps a page and two tokens, its decode 512 tokens (by default) and the answer.
        served = [admitted - 1]
        served += [node.pool - (node.page_size or 1) - 2 for node in prefills if node.pool is not None]
        served += [node.pool - 512 - ANSWER for node in nodes if node.role == "decode" and node.pool is not None]
        return Limits(admitted, min(served))

    def _pair(self, nodes: Sequence[Node]) -> tuple[Node, Node] | None:
        """The native pair that the operator has named."""
        if not (self._options.prefill and self._options.decode):
            return None
        by_url = {node.url: node for node in nodes}
        pair = by_url.get(self._options.prefill), by_url.get(self._options.decode)
        return None if None in pair else pair

    # ------------------------------------------------------------ the phases

    async def _quiet(self, planner: Planner) -> None:
        """Healthy traffic for a quarter of the time, 12 requests at least; learns how long to wait for an answer."""
        await self._healthy(planner, self._options.duration / 4, at_least=12, share=(0.0, 0.2))
        if self._options.patience is None:
            slowest = max((r.seconds for r in self._requests if r.answered), default=6.0)
            self._patience = min(60.0, max(10.0, 5 * slowest))

    def _moments(self) -> Moments:
        """What the latest healthy requests took."""
        good = [r for r in self._requests if r.kind == "victim" and r.first is not None and r.answered][-12:]
        first, total = (percentile([getattr(r, name) for r in good], 0.5) for name in ("first", "seconds"))
        return Moments(first or Moments.first, total or Moments.total)

    async def _healthy(self, planner: Planner, seconds: float, at_least: int, share: tuple[float, float]) -> None:
        end, sent = self._now() + seconds, 0
        while self._now() < end or sent < at_least:
            await asyncio.gather(*(self._send(planner.victim(long=i == 0)) for i in range(min(4, self._options.concurrency))))
            sent += 4
            done = min(1.0, 1 - (end - self._now()) / seconds)
            self._progress(f"{self._phase}: {len(self._requests)} requests", share[0] + (share[1] - share[0]) * done)

    async def _attack(self, planner: Planner, kinds: Sequence[str], pair: tuple[Node, Node] | None, decode_pool: int) -> None:
        """Rounds: victims fill pages and leave, an attack follows at once, other victims run beside it. Goes on until every kind has
        come, for twice the time at most.
        """
        if not kinds:
            await self._healthy(planner, self._options.duration, at_least=1, share=(0.2, 0.9))
            return
        begin, cards, under_way = self._now(), [], set()
        fill = min(4, self._options.concurrency, max(2, decode_pool // planner.largest)) if decode_pool else 2
        left = set(kinds)
        while (now := self._now() - begin) < self._options.duration * (2 if left else 1):
            cards = cards or attacks.deck(self._rng, kinds)
            next_round = self._now() + 1 / self._options.rate
            planner.moments = self._moments()
            # As many as fill decode's pool, so that whatever the attack is lent was theirs. Where others hang, they may too.
            victims = {asyncio.create_task(self._send(planner.victim(long=True))) for _ in range(fill)}
            await asyncio.wait(victims, timeout=max(1.0, 3 * planner.moments.total))
            under_way |= victims
            left.discard(cards[0])
            plans = planner.attack(cards.pop(0))
            sent = [self._same_room(plans, pair)] if plans[0].native else [self._send(plan) for plan in plans]
            under_way |= {asyncio.create_task(work) for work in [*sent, self._send(planner.victim(share=0.25))]}
            # Long enough for a refusal or a short answer; what takes longer goes on beside the next round.
            await asyncio.wait(under_way, timeout=max(0.5, 2 * planner.moments.total))
            while len(under_way) >= self._options.concurrency:
                _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            under_way = {task for task in under_way if not task.done()}
            await asyncio.sleep(max(0.0, next_round - self._now()))
            leaks = sum(bool(r.leaks) for r in self._requests)
            hung = sum(r.error == "timeout" for r in self._requests)
            self._progress(f"attack: {len(self._requests)} requests, {leaks} leaks, {hung} hung", 0.2 + 0.7 * now / self._options.duration)
        if under_way:
            await asyncio.wait(under_way)

    async def _settle(self, nodes: Sequence[Node], before: dict[str, int]) -> dict[str, int]:
        """Tokens' worth of KV that each node uses more than before, once nothing runs and time enough has passed."""
        end = self._now() + self._options.settle
        while True:
            now = await self._used(nodes)
            more = {url: max(0, now[url] - used) for url, used in before.items() if url in now}
            if not any(more.values()) or self._now() > end:
                return more
            self._progress("settle", 0.95)
            await asyncio.sleep(0.5)

    # ------------------------------------------------------------ requests

    async def _send(self, plan: Plan) -> None:
        owner, phase = self._register(plan), self._phase
        async with self._slots:
            begin = self._now()
            reply = await self._client.ask(
                plan.prompt, tokens=ANSWER, patience=self._patience, stream=plan.stream, leave=plan.leave, **plan.extra
            )
        self._record(owner, plan, phase, begin, reply)

    async def _same_room(self, plans: Sequence[Plan], pair: tuple[Node, Node]) -> None:
        """All in one bootstrap room, each to prefill and decode as the router would send it."""
        prefill, decode = pair
        room = self._rng.getrandbits(62)

        async def send(plan: Plan, url: str) -> None:
            owner, phase = self._register(plan), self._phase
            body = {
                "text": plan.prompt, "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER},
                "bootstrap_host": urlsplit(prefill.url).hostname, "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": room,
            }  # fmt: skip
            begin = self._now()
            self._record(owner, plan, phase, begin, await post(self._session, f"{url}/generate", body, patience=self._patience))

        # prefill's own answer is a token and right or wrong about nothing.
        halves = [(plan, decode.url) for plan in plans]
        halves += [(dataclasses.replace(plan, kind="room (prefill)", expects="end"), prefill.url) for plan in plans]
        await asyncio.gather(*(send(*half) for half in halves))

    def _register(self, plan: Plan) -> int:
        """The number of the request's secret; both halves of a pair have one."""
        owner = self._owners.setdefault(plan.secret, len(self._owners))
        self._secrets.add(owner, plan.secret)
        return owner

    def _record(self, owner: int, plan: Plan, phase: str, begin: float, reply: Reply) -> None:
        text = reply.pieces if reply.error in (None, "timeout") else [*reply.pieces, " ", reply.error]
        self._requests.append(
            Request(
                owner=owner,
                kind=plan.kind,
                phase=phase,
                expects=plan.expects,
                begin=begin,
                size=reply.tokens or plan.size,
                status=reply.status,
                finish=reply.finish,
                error=reply.error if reply.error in (None, "timeout") else "error",
                first=reply.first,
                gaps=reply.gaps,
                seconds=reply.seconds,
                right=plan.secret in reply.text,
                leaks=self._secrets.scan(text, own=owner),
            )
        )

    async def _used(self, nodes: Sequence[Node]) -> dict[str, int]:
        """Tokens of KV in use, by node, for those that say so."""
        return await asyncio.to_thread(lambda: {n.url: used for n in nodes if (used := used_tokens(self._reader, n.url)) is not None})

    def _now(self) -> float:
        return time.monotonic() - self._begin


def used_tokens(reader: Reader, url: str) -> int | None:
    """By ``/v1/loads``, else ``/metrics``; None where neither says."""
    with contextlib.suppress(Unreadable, KeyError, TypeError, ValueError):
        return sum(int(load["num_used_tokens"]) for load in reader.json(f"{url}/v1/loads?include=all")["loads"])
    with contextlib.suppress(Unreadable, ValueError):
        lines = [line for line in reader.get(f"{url}/metrics").text.splitlines() if line.startswith("sglang:num_used_tokens{")]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines) if lines else None
    return None


async def run(options: Options, progress: Progress) -> Result:
    """Raises `CannotProbe`."""
    import aiohttp

    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout, trust_env=False) as session:
        return await Run(options, session, progress).run()
