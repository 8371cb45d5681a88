"""What the guard costs: a guarded and an unguarded pair of the same SGLang, measured by turns in one run.

    scripts/bench.sh [--version V] [--rounds N] [--flags="FLAG ..."]

Both clusters are up all the time; the one that is not measured is stopped (SIGSTOP), so it takes no processor. Each
round measures unguarded, guarded, guarded, unguarded. Printed are the ratios guarded/unguarded of each round's medians:
their median and their spread, and beside it the same for the two unguarded measurements of a round, which is what
chance does on this machine. On the CPU rig a model of one layer computes next to nothing, so the guard's share is larger than
on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from pd_rig.client import run_concurrently
from pd_rig.cluster import Cluster, RigError
from pd_rig.model import echo
from pd_rig.traffic import secret

PROMPT, ANSWER = 1000, 64  # tokens of each request
STREAMS, BURST, AT_ONCE = 12, 48, 16  # streamed one by one for TTFT and ITL; a burst for throughput


def stream(cluster: Cluster, prompt: str) -> tuple[float, float]:
    """One streamed request through the router: TTFT and the mean ITL, in seconds. Checks the answer."""
    begin = time.perf_counter()
    text, first, last = "", None, begin
    for piece in cluster.pieces(prompt, ANSWER, timeout=60):
        text += piece
        last = time.perf_counter()
        first = first or last
    if text != echo(prompt, ANSWER):
        raise RigError("a wrong answer while measuring")
    return first - begin, (last - first) / (ANSWER - 1)


def measure(cluster: Cluster, rng: random.Random) -> dict[str, float]:
    """The medians of one turn; throughput in requests per second."""
    pairs = [stream(cluster, secret(PROMPT, rng)) for _ in range(STREAMS)]
    prompts = [secret(PROMPT, rng) for _ in range(BURST)]
    begin = time.perf_counter()
    replies = run_concurrently([lambda p=p: cluster.complete(p, ANSWER, timeout=120) for p in prompts], AT_ONCE)
    seconds = time.perf_counter() - begin
    if [reply.text for reply in replies] != [echo(p, ANSWER) for p in prompts]:
        raise RigError("a wrong answer while measuring")
    ttft, itl = (statistics.median(values) for values in zip(*pairs, strict=True))
    return {"TTFT": ttft, "ITL": itl, "throughput": BURST / seconds}


def send(cluster: Cluster, what: signal.Signals) -> None:
    for server in cluster.servers:
        for process in server.tree():
            process.send_signal(what)


@contextlib.contextmanager
def paused(**options) -> Iterator[Cluster]:
    """A cluster that is stopped whenever it has no turn."""
    with Cluster(**options) as cluster:
        send(cluster, signal.SIGSTOP)
        try:
            yield cluster
        finally:
            send(cluster, signal.SIGCONT)


@contextlib.contextmanager
def awake(cluster: Cluster) -> Iterator[None]:
    """A paused cluster's turn."""
    send(cluster, signal.SIGCONT)
    time.sleep(1)  # the servers close connections that were idle for too long; a request must not meet that
    try:
        yield
    finally:
        send(cluster, signal.SIGSTOP)


def by_turns(
    args: argparse.Namespace, pair: dict, first: dict, second: dict, one_round: Callable[[Cluster, Cluster], None]
) -> int:
    """Starts two clusters with the options ``pair`` and each its own, and calls ``one_round`` with them ``args.rounds`` times.

    Prints the machine. Returns the exit status.
    """
    logs = Path(tempfile.mkdtemp(prefix="pd-guard-bench-"))
    pair = {"version": args.version, **pair}
    try:
        with (
            paused(**pair, **first, log_dir=logs / "first") as one,
            paused(**pair, **second, log_dir=logs / "second") as other,
        ):
            for n in range(args.rounds):
                print(f"round {n + 1} of {args.rounds}", file=sys.stderr, flush=True)
                one_round(one, other)
    except RigError as error:
        print(f"{error}\nThe servers' logs are in {logs}", file=sys.stderr)
        return 3
    shutil.rmtree(logs)
    memory = psutil.virtual_memory().total / 2**30
    print(f"SGLang {args.version}, {args.rounds} rounds, {os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, no GPU")
    return 0


def turn(cluster: Cluster, rng: random.Random) -> dict[str, float]:
    with awake(cluster):
        stream(cluster, secret(PROMPT, rng))  # not measured: the first after a pause
        return measure(cluster, rng)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--flags", default="", help="further flags of the guard, such as --pd-guard-checksum")
    args = parser.parse_args()
    rng = random.Random(0)
    ratios: dict[str, dict[str, list[float]]] = {}

    def one_round(off: Cluster, on: Cluster) -> None:
        before, first, second, after = (turn(cluster, rng) for cluster in (off, on, on, off))
        for name in before:
            chance, guard = ratios.setdefault(name, {"chance": [], "guard": []}).values()
            chance.append(after[name] / before[name])
            guard.append((first[name] + second[name]) / (before[name] + after[name]))

    pools = {"decode_tokens": 32768, "prefill_tokens": 32768}
    if status := by_turns(args, pools, {}, {"guard": args.flags.split()}, one_round):
        return status
    print(f"{'':12}{'guarded/unguarded':28}unguarded/unguarded")
    for name, found in ratios.items():
        print(f"{name:12}{spread(found['guard']):28}{spread(found['chance'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
