"""The release guard on real SGLang: a write of an aborted transfer that arrives late."""

import json
import random
import threading
import time

import pytest
import requests
from pd_rig.client import run_concurrently
from pd_rig.home import why_missing
from pd_rig.model import echo
from pd_rig.traffic import secret

pytestmark = pytest.mark.engine

#: SGLang counts on no growth, so it admits a request beside running ones, and gives up waiting for an acknowledgement at once.
ENV = {
    "PD_RIG_FAULT": "slow_write",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "1",
}
LARGE = 400_000  # bytes: the write of the aborted request and no other's


def stream(cluster, prompt: str, n: int, got: list[str]) -> None:
    """Appends the answer's pieces to `got` as they arrive."""
    body = {"model": "echo", "prompt": prompt, "temperature": 0, "max_tokens": n, "ignore_eos": True, "stream": True}
    with requests.Session() as session:
        session.trust_env = False
        response = session.post(f"{cluster.router_url}/v1/completions", json=body, stream=True, timeout=120)
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                got.append(json.loads(line[6:])["choices"][0]["text"])


def late_write(cluster, seed: int) -> list[bool]:
    """Two requests run and grow into the pages of a third, whose client goes away while its write is delayed; the write
    arrives when they are nearly done. Returns whether each of the two got its exact right answer.
    """
    rng = random.Random(seed)
    prompts, n = [secret(128, rng) for _ in range(2)], 900
    got: list[list[str]] = [[], []]
    threads = [threading.Thread(target=stream, args=(cluster, p, n, g)) for p, g in zip(prompts, got, strict=True)]
    for thread in threads:
        thread.start()
    while not all(got):
        time.sleep(0.05)
    delay = cluster.fault_dir / "slow_write"
    delay.write_text(f"60 {LARGE}")
    cluster.pair(secret(1000, rng), 8, timeout=1.5)  # its client goes away
    while max(len("".join(g)) for g in got) < 780 and any(t.is_alive() for t in threads):
        time.sleep(0.05)
    delay.unlink()
    for thread in threads:
        thread.join()
    return ["".join(g) == echo(p, n) for p, g in zip(prompts, got, strict=True)]


def small(clusters, version, guard):
    if reason := why_missing(version):
        pytest.skip(reason)
    return clusters(
        version, guard=guard, env=ENV, decode_tokens=2560, decode_args=["--num-reserved-decode-tokens", "16"]
    )


@pytest.mark.parametrize("version", ["0.5.18", "0.5.23"], indirect=True)
def test_unguarded_a_late_write_lands_in_the_next_owners_pages(clusters, version):
    cluster = small(clusters, version, False)
    assert not all(all(late_write(cluster, seed)) for seed in range(2))
    assert "slow_write" in cluster.prefills[0].log_text()


@pytest.mark.parametrize("version", ["0.5.18", "0.5.20", "0.5.23"], indirect=True)
def test_guarded_it_lands_where_nobody_reads(clusters, version):
    cluster = small(clusters, version, True)
    for seed in range(2):
        assert all(late_write(cluster, seed))
    cluster.wait_idle()
    assert "slow_write" in cluster.prefills[0].log_text()
    prompts = [secret(300, random.Random(i)) for i in range(8)]
    calls = [lambda p=p: cluster.complete(p, 24, timeout=60) for p in prompts]
    assert [reply.text for reply in run_concurrently(calls)] == [echo(p, 24) for p in prompts]
