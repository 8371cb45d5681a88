"""Traffic with exact right answers, and a scan for other tenants' text."""

from __future__ import annotations

import contextlib
import os
import random
import string
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Literal

from pd_rig.client import Reply, run_concurrently
from pd_rig.cluster import Cluster, RigError
from pd_rig.model import echo

#: Seconds within which a refusal must have reached both clients and freed all pages. PD_GUARD_PATIENCE multiplies it,
#: for machines that are shared with others.
SOON = 2 * float(os.environ.get("PD_GUARD_PATIENCE", "1"))

#: So many characters in a row are no coincidence in random letters.
LEAK = 12

#: Environment for `late_write` and `aborts`: SGLang counts on no growth, so it admits a request beside running ones, and
#: gives up waiting for an acknowledgement at once.
LATE_WRITES = {
    "PD_RIG_FAULT": "slow_write",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "1",
}
LARGE_WRITE = 400_000  # bytes: the write of the aborted request and no other's


def secret(length: int, rng: random.Random) -> str:
    """One tenant's prompt: random letters, so no run of it stands in anybody else's text."""
    return "".join(rng.choices(string.ascii_letters, k=length))


def shared_run(answer: str, text: str) -> str:
    """The longest run of characters that stands in both."""
    match = SequenceMatcher(None, answer, text, autojunk=False).find_longest_match()
    return answer[match.a : match.a + match.size]


@dataclass
class Campaign:
    """What the attacks of one campaign brought.

    Args:
        refusals: replies to the attacks, in order.
        leaks: for each attack answered with a victim's text, the longest run of it.
        wrong: victims whose own answer was not the exact right one.
    """

    refusals: list[Reply] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    wrong: list[Reply] = field(default_factory=list)


def attack(
    cluster: Cluster,
    attacks: int,
    *,
    seed: int = 0,
    timeout: float = 30,
    stop_at_leak: bool = False,
    largest: int | None = None,
) -> Campaign:
    """Victims and attackers by turns, through the router; attacks are of random sizes above the prefill's pool.

    ``largest`` is the longest attack; by default the longest prompt that decode's intake accepts, which it may never run.
    """
    rng = random.Random(seed)
    limit = cluster.prefill_limit
    ceiling = largest or cluster.decode_limit - 64
    campaign = Campaign()
    victims: list[str] = []
    for _ in range(attacks):
        prompt = secret(rng.randrange(limit // 2, cluster.longest_prompt + 1), rng)
        reply = cluster.complete(prompt, 64, timeout=timeout)
        victims = [*victims, prompt + echo(prompt, 64)][-3:]
        if reply.text != echo(prompt, 64):
            campaign.wrong.append(reply)
        # Just above the limit the stale pages hold keys at the very positions the model looks at.
        size = (
            rng.randrange(limit, min(limit + 256, ceiling))
            if rng.random() < 0.5
            else rng.randrange(limit, ceiling)
        )
        reply = cluster.complete("0" * size, 64, timeout=timeout)
        campaign.refusals.append(reply)
        run = max((shared_run(reply.text or "", victim) for victim in victims), key=len)
        if len(run) >= LEAK:
            campaign.leaks.append(run)
            if stop_at_leak:
                break
    return campaign


def healthy(
    cluster: Cluster, requests: int, *, workers: int = 8, seed: int = 1, n: int = 24
) -> list[tuple[int, Reply]]:
    """Requests of mixed lengths, from one token to the longest that fits, `workers` at a time, through the router.

    Returns the (prompt length, reply) pairs whose answer is not the exact right one: empty on a sound cluster.
    """
    rng = random.Random(seed)
    longest = cluster.longest_prompt
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, longest]
    lengths = edges + [int(longest ** rng.random()) for _ in range(requests - len(edges))]
    rng.shuffle(lengths)
    prompts = [secret(length, rng) for length in lengths]
    replies = run_concurrently([lambda p=p: cluster.complete(p, n, timeout=120) for p in prompts], workers)
    return [
        (len(prompt), reply)
        for prompt, reply in zip(prompts, replies, strict=True)
        if reply.status != 200 or reply.text != echo(prompt, n)
    ]


@dataclass
class SameRoom:
    """Two requests of equally long prompts that were sent at once with one bootstrap room.

    Args:
        prefill, decode: each node's replies, in the order of the prompts.
        leaks: runs of the other prompt in an answer.
    """

    prompts: list[str]
    prefill: list[Reply]
    decode: list[Reply]
    leaks: list[str]


def same_room(cluster: Cluster, tries: int, *, seed: int = 3, timeout: float = 8) -> Iterator[SameRoom]:
    """Pairs of such requests, one pair after the other, to the nodes' native API (the router chooses rooms itself)."""
    rng = random.Random(seed)
    for _ in range(tries):
        room = rng.getrandbits(62)
        prompts = [secret(600, rng) for _ in range(2)]
        replies = run_concurrently([lambda p=p, room=room: cluster.pair(p, 40, room=room, timeout=timeout) for p in prompts])
        prefill, decode = zip(*replies, strict=True)
        runs = [shared_run(reply.text or "", other) for reply, other in zip(decode, reversed(prompts), strict=True)]
        yield SameRoom(prompts, list(prefill), list(decode), [run for run in runs if len(run) >= LEAK])


def until_its_write_waits(cluster: Cluster, send: Callable[[], object], size: int = LARGE_WRITE) -> threading.Thread:
    """Delays writes of `size` bytes and more until the control file of ``slow_write`` goes, and sends in a thread, which is returned
    once a write waits.
    """
    log = cluster.prefills[0].log_text
    before = log().count("slow_write: ")
    (cluster.fault_dir / "slow_write").write_text(f"60 {size}")
    sent = threading.Thread(target=send)
    sent.start()
    while log().count("slow_write: ") == before:
        time.sleep(0.01)
    return sent


def room_of_a_queued_chunk(cluster: Cluster, room: int, n: int = 256) -> tuple[str, str, Reply]:
    """Two requests in one room, the first aborted while its chunk waits for another request's write, the second sent before that
    write goes on. Returns both prompts and decode's answer to the second.
    """
    rng, rid = random.Random(room), f"former-{room}"
    ahead, former, following = (secret(size, rng) for size in (1000, 500, 500))
    replies: list[Reply] = []
    threads = [until_its_write_waits(cluster, lambda: cluster.pair(ahead, 8, timeout=60))]

    def start(target: Callable[[], object], seconds: float) -> None:
        threads.append(threading.Thread(target=target))
        threads[-1].start()
        time.sleep(seconds)  # its forward pass

    start(lambda: cluster.pair(former, 8, room=room, rid=rid, timeout=60), 1.5)
    for node in cluster.nodes:
        node.post("/abort_request", {"rid": rid})
    time.sleep(1)
    start(lambda: replies.extend(cluster.pair(following, n, room=room, timeout=30)), 1.5)
    (cluster.fault_dir / "slow_write").unlink()
    for thread in threads:
        thread.join()
    return former, following, replies[1]


def late_write(cluster: Cluster, seed: int, aborted_at: Literal["both", "prefill"] = "both") -> list[str]:
    """Two requests run and grow into the pages of a third, which is aborted while its write is delayed; the write arrives
    when they are nearly done. Returns of each of the two whether its answer is ``exact``, ``wrong``, or ``cut`` short by an error.
    """
    rng = random.Random(seed)
    prompts, n = [secret(128, rng) for _ in range(2)], 900
    got: list[list[str]] = [[], []]

    def read(prompt: str, pieces: list[str]) -> None:
        with contextlib.suppress(RigError):
            for piece in cluster.pieces(prompt, n):
                pieces.append(piece)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(prompts, got, strict=True)]
    for thread in threads:
        thread.start()
    while not all(got):
        time.sleep(0.05)
    aborted = until_its_write_waits(cluster, lambda: cluster.pair(secret(1000, rng), 8, rid=f"aborted-{seed}"))
    # By name: SGLang looks only every four seconds whether a client is still there.
    for node in cluster.nodes if aborted_at == "both" else cluster.prefills:
        node.post("/abort_request", {"rid": f"aborted-{seed}"})
    while max(len("".join(g)) for g in got) < 780 and any(t.is_alive() for t in threads):
        time.sleep(0.05)
    (cluster.fault_dir / "slow_write").unlink()
    for thread in [*threads, aborted]:
        thread.join()
    pairs = [("".join(pieces), echo(prompt, n)) for prompt, pieces in zip(prompts, got, strict=True)]
    return ["exact" if text == right else "cut" if right.startswith(text) else "wrong" for text, right in pairs]


def aborts(cluster: Cluster, count: int, seed: int) -> tuple[int, list]:
    """`count` requests whose clients go away at random moments, some of their writes delayed, beside eight streams of requests.

    Returns how many of the streams' requests were answered, and the wrong answers.
    """
    rng = random.Random(seed)
    delay = cluster.fault_dir / "slow_write"
    done, answered, wrong = threading.Event(), [], []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        while not done.is_set():
            prompt, n = secret(mine.randrange(1, 129), mine), mine.randrange(20, 200)
            reply = cluster.complete(prompt, n, timeout=120)
            answered.append(reply)
            if reply.text != echo(prompt, n):
                wrong.append((len(prompt), n, reply))

    threads = [threading.Thread(target=work, args=(rng.random(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        delay.write_text(f"{rng.choice([0, 0.05, 0.3])} {LARGE_WRITE}")
        cluster.pair(secret(rng.randrange(600, 1200), rng), 100, timeout=rng.uniform(0.02, 0.5))
    done.set()
    for thread in threads:
        thread.join()
    delay.unlink()
    return len(answered), wrong
