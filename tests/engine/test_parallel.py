"""All guards on nodes of several schedulers: tensor and pipeline parallelism."""

import random

import pytest
from pd_rig.client import run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import LATE_WRITES, SOON, aborts, attack, healthy, late_write, same_room, secret

pytestmark = pytest.mark.engine

TWO = {
    "tp": ["--tp-size", "2"],
    "pp": ["--pp-size", "2", "--pd-guard-disable", "ownership"],  # which does not run there, and says so at the start
    "one": [],
}
full = pytest.mark.full


def of_two(clusters, version, prefill, decode):
    return clusters(
        version,
        guard=True,
        layers=2 if "pp" in (prefill, decode) else 1,
        env=LATE_WRITES | {"PD_RIG_FAULT": "slow_write,stray_page", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        prefill_args=TWO[prefill],
        decode_args=[*TWO[decode], "--num-reserved-decode-tokens", "16"],
        prefill_tokens=2048,
        decode_tokens=2560,
    )


@pytest.mark.parametrize(
    ("version", "prefill", "decode"),
    [
        pytest.param("0.5.23", "tp", "tp"),
        pytest.param("0.5.19", "tp", "tp", marks=full),
        pytest.param("0.5.23", "one", "tp", marks=full),
        pytest.param("0.5.23", "tp", "one", marks=full),
        pytest.param("0.5.23", "pp", "one", marks=full),
    ],
    indirect=["version"],
)
def test_two_ranks(clusters, version, prefill, decode):
    """Attacks are refused, one room holds one request, late writes land where nobody reads, healthy traffic is untouched."""
    cluster = clusters(
        version,
        guard=True,
        layers=2 if "pp" in (prefill, decode) else 1,
        env=LATE_WRITES | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        prefill_args=TWO[prefill],
        decode_args=[*TWO[decode], "--num-reserved-decode-tokens", "16"],
        prefill_tokens=2048,
        decode_tokens=2560,
    )
    for node, kind in ((cluster.prefills[0], prefill), (cluster.decode, decode)):
        assert node.log_text().count("pd-guard bound version=") == (1 if kind == "one" else 2)
    campaign = attack(cluster, 8, timeout=90)  # two ranks of two nodes on as few cores as there are
    assert (campaign.leaks, campaign.wrong) == ([], [])
    assert {(reply.status, reply.text) for reply in campaign.refusals} == {(400, None)}
    assert max(reply.seconds for reply in campaign.refusals) < SOON
    for prefill_prompt, prompt in (("0" * 2500, "1" * 500), (secret(500, random.Random(1)), "0" * 3000)):
        replies = cluster.pair(prompt, 8, prefill_prompt=prefill_prompt, timeout=20)
        assert [reply.status for reply in replies] == [400, 400]
        assert max(reply.seconds for reply in replies) < SOON
    cluster.wait_idle()
    for outcome in same_room(cluster, 8):
        assert outcome.leaks == []
        for prompt, reply in zip(outcome.prompts, outcome.decode, strict=True):
            assert (reply.status, reply.text) in ((200, echo(prompt, 40)), (400, None))
            assert reply.seconds < SOON
    assert healthy(cluster, 20) == []
    assert late_write(cluster, 0) == ["exact", "exact"]
    answered, wrong = aborts(cluster, 30, seed=9)
    assert wrong == []
    assert answered > 8
    cluster.wait_idle(30)
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()


@pytest.mark.parametrize("version", ["0.5.23", pytest.param("0.5.19", marks=full)], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_loses_a_page(clusters, version, rank):
    """A row of one rank's map points at another request's page: that request alone ends, on both ranks, and every page comes back."""
    cluster = of_two(clusters, version, "tp", "tp")
    rng = random.Random(rank)
    prompts = [secret(200, rng) for _ in range(2)]
    control = cluster.fault_dir / "stray_page"
    control.write_text(f"row {rank}")
    replies = run_concurrently([lambda p=p: cluster.complete(p, 300, timeout=60) for p in prompts])
    control.unlink()
    failed = [reply for reply in replies if reply.status != 200]
    assert [(reply.status, reply.text) for reply in failed] == [(500, None)], replies
    rule = "other-rank" if rank else "foreign"  # by what the first rank, which answers, has seen
    assert f"a KV page of this request is not its own (rule {rule})" in failed[0].error
    for reply, prompt in zip(replies, prompts, strict=True):
        if reply is not failed[0]:
            assert (reply.status, reply.text) == (200, echo(prompt, 300))
    cluster.wait_idle()
    assert healthy(cluster, 10) == []
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()
