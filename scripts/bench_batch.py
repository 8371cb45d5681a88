"""What the limit on one write brings and costs: two guarded pairs, one without a limit, measured by turns in one run.

    scripts/bench.sh --batch [--version V] [--rounds N] [--mib M] [--wire W]

Each turn sends prompts of 8,000 tokens (31 MiB of KV on the rig) that prefill has cached, over a wire that carries --wire MiB/s at most:
some are answered, for the throughput, and some are aborted at random moments, for the time that decode holds their pages.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import threading
import time

from bench import awake, by_turns, spread
from pd_rig.cluster import Cluster, RigError
from pd_rig.model import echo
from pd_rig.traffic import secret

PROMPT, ANSWERS, ABORTS = 8000, 6, 20


def holds(cluster: Cluster) -> tuple[float, float]:
    """How many transfers decode has held pages of, and for how many seconds in all."""
    metrics = cluster.decode.metrics()
    return tuple(
        sum(map(float, re.findall(rf"^sglang:pd_guard_hold_seconds_{name}{{[^}}]*}} (\S+)", metrics, re.M)))
        for name in ("count", "sum")
    )


def measure(cluster: Cluster, prompt: str, rng: random.Random) -> dict[str, float]:
    begin = time.perf_counter()
    for _ in range(ANSWERS):
        if cluster.complete(prompt, 2, timeout=60).text != echo(prompt, 2):
            raise RigError("a wrong answer while measuring")
    seconds = time.perf_counter() - begin
    count, held = holds(cluster)
    for n in range(ABORTS):
        rid = f"{time.monotonic_ns()}-{n}"
        client = threading.Thread(target=cluster.pair, args=(prompt, 2), kwargs={"rid": rid})
        client.start()
        time.sleep(rng.uniform(0, seconds / ANSWERS))
        for node in cluster.nodes:
            node.post("/abort_request", {"rid": rid})
        client.join()
        cluster.wait_idle(30)
    after, total = holds(cluster)
    if after == count:
        raise RigError("no abort met a transfer")
    return {"throughput": ANSWERS / seconds, "abort to release": (total - held) / (after - count)}


def turn(cluster: Cluster, prompt: str, rng: random.Random, wire: float) -> dict[str, float]:
    (cluster.fault_dir / "slow_wire").write_text(str(wire))
    with awake(cluster):
        cluster.complete(prompt, 2, timeout=300)  # not measured; the first one fills prefill's cache
        return measure(cluster, prompt, rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.5.23")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--mib", type=int, default=4)
    parser.add_argument("--wire", type=float, default=32)
    args = parser.parse_args()
    rng = random.Random(0)
    prompt = secret(PROMPT, rng)
    found: dict[str, dict[str, list[float]]] = {}

    def one_round(whole: Cluster, cut: Cluster) -> None:
        for name, cluster in (("whole", whole), ("cut", cut)):
            for what, value in turn(cluster, prompt, rng, args.wire).items():
                found.setdefault(what, {"whole": [], "cut": []})[name].append(value)

    pair = {
        "prefill_tokens": 10240, "decode_tokens": 10240, "common_args": ["--chunked-prefill-size", "-1"],
        "env": {"PD_RIG_FAULT": "slow_wire"},
    }  # fmt: skip
    limits = [{"guard": ["--pd-guard-max-batch-mib", str(mib)]} for mib in (0, args.mib)]
    if status := by_turns(args, pair, *limits, one_round):
        return status
    for what, values in found.items():
        ratios = [cut / whole for cut, whole in zip(values["cut"], values["whole"], strict=True)]
        medians = {name: statistics.median(numbers) for name, numbers in values.items()}
        unit = "s" if what == "abort to release" else "requests/s"
        print(f"{what}: whole {medians['whole']:.3f} {unit}, {args.mib} MiB {medians['cut']:.3f} {unit}, ratio {spread(ratios)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
