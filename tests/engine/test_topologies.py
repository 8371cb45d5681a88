"""The admission guard where SGLang runs otherwise: schedulers, chunking, optimistic prefill, two prefills."""

import random

import pytest
from pd_rig.model import echo
from pd_rig.traffic import SOON, attack, healthy, secret

pytestmark = pytest.mark.engine

SMALL_CHUNKS = {"overlap": True, "common_args": ["--chunked-prefill-size", "512"]}
OPTIMISTIC = {"prefill_args": ["--optimistic-prefill-attempts", "2"]}
ENVIRONMENT = {
    "SGLANG_PLUGINS": None,
    "SGLANG_PD_GUARD": "1",
    "SGLANG_PD_GUARD_PEER": "require",
    "SGLANG_PD_GUARD_ALLOW_CAPACITY_MISMATCH": "1",
}
SERVE = {"entry": ("-c", "from sglang.cli.main import main; main()", "serve")}
full = pytest.mark.full
VARIANTS = [
    pytest.param("0.5.19", SMALL_CHUNKS, id="overlap-small-chunks", marks=full),
    pytest.param("0.5.23", SMALL_CHUNKS, id="overlap-small-chunks"),
    pytest.param("0.5.19", {"common_args": ["--chunked-prefill-size", "-1"]}, id="no-chunks", marks=full),
    pytest.param("0.5.19", OPTIMISTIC, id="optimistic", marks=full),
    pytest.param("0.5.23", OPTIMISTIC | SERVE, id="optimistic-sglang-serve"),
    pytest.param("0.5.20", {"common_args": ["--disable-radix-cache"]}, id="no-prefix-cache", marks=full),
    pytest.param("0.5.23", {"guard": False, "env": ENVIRONMENT}, id="environment"),
]


def guarded(clusters, version, **options):
    return clusters(version, **({"guard": True} | options))


def check(cluster, attacks: int = 8, requests: int = 24, within: float = SOON) -> None:
    campaign = attack(cluster, attacks)
    assert (campaign.leaks, campaign.wrong) == ([], [])
    for reply in campaign.refusals:
        assert (reply.status, reply.text) == (400, None), reply
        assert reply.seconds < within
    assert healthy(cluster, requests) == []
    cluster.wait_idle()
    for node in cluster.nodes:
        assert "sglang:pd_guard_info{" in node.metrics()
        assert "pd-guard fault" not in node.log_text()


@pytest.mark.parametrize(("version", "options"), VARIANTS, indirect=["version"])
def test_variant(clusters, version, options):
    """Attacks are refused, each node's refusals reach the other, healthy traffic is untouched."""
    cluster = guarded(clusters, version, **options)
    for node in cluster.nodes:
        assert node.log_text().count("pd-guard bound version=") == 1
    check(cluster)
    for prefill_prompt, prompt in (("0" * 5000, "1" * 500), (secret(500, random.Random(1)), "0" * 8500)):
        prefill, decode = cluster.pair(prompt, 8, prefill_prompt=prefill_prompt, timeout=20)
        assert (prefill.status, decode.status) == (400, 400)
        assert prefill.error == decode.error
        assert max(prefill.seconds, decode.seconds) < SOON
    cluster.wait_idle(SOON)


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_two_prefills(clusters, version):
    cluster = guarded(clusters, version, prefills=2)
    # SGLang's idle schedulers spin, and here are more of them than cores.
    check(cluster, attacks=6, within=5 * SOON)
    for via in (0, 1):
        prompt = secret(900, random.Random(via))
        prefill, decode = cluster.pair("0" * 5000, 8, via=via)
        assert (prefill.status, decode.status) == (400, 400)
        _, decode = cluster.pair(prompt, 8, via=via)
        assert decode.text == echo(prompt, 8)
    cluster.wait_idle()


@pytest.mark.parametrize(("version", "side"), [("0.5.19", "prefill"), ("0.5.23", "decode")], indirect=["version"])
def test_an_unguarded_peer(clusters, version, side):
    """require (the default) refuses it and says what to do; prefer serves it, and rejects still reach it."""
    unguarded_env = {"SGLANG_PLUGINS": "pd_rig_fault"}
    flags = ["--enable-pd-guard", "--pd-guard-allow-capacity-mismatch"]
    guarded_side = "decode" if side == "prefill" else "prefill"

    def cluster_with(peer):
        return clusters(
            version,
            fresh=True,
            guard=False,
            warm_up=False,
            env={"SGLANG_PLUGINS": None},
            **{f"{side}_env": unguarded_env, f"{guarded_side}_args": [*flags, "--pd-guard-peer", peer]},
        )

    prompt = secret(700, random.Random(4))
    cluster = cluster_with("require")
    prefill, decode = cluster.pair(prompt, 8, timeout=20)
    reply = decode if guarded_side == "decode" else prefill
    assert reply.status == 503, reply
    assert "runs without the guard" in reply.error and "--pd-guard-peer prefer" in reply.error
    assert decode.status is not None and decode.status >= 500

    cluster = cluster_with("prefer")
    prefill, decode = cluster.pair(prompt, 8, timeout=20)
    assert (prefill.status, decode.status, decode.text) == (200, 200, echo(prompt, 8))
    if guarded_side == "prefill":  # decode has no guard and no words of ours, but is told all the same
        prefill, decode = cluster.pair("0" * 5000, 8, timeout=20)
        assert prefill.status == 400
        assert decode.status == 500, decode
        assert decode.seconds < 2 * SOON
        cluster.wait_idle()
    node = cluster.decode if guarded_side == "decode" else cluster.prefills[0]
    assert node.counter("unguarded_peers_total", action="served") >= 1


@pytest.mark.parametrize("version", ["0.5.20"], indirect=True)
def test_a_fault_inside_the_guard_aborts_that_request_alone(clusters, version):
    cluster = guarded(clusters, version, fresh=True, env={"PD_RIG_FAULT": "guard_raises"})
    (cluster.fault_dir / "guard_raises").write_text("on")
    prompt = secret(700, random.Random(5))
    prefill, decode = cluster.pair(prompt, 8, rid="fault-1", timeout=20)
    for reply in (prefill, decode):
        assert reply.status == 500, reply
        assert "The PD guard could not check this request and aborted it" in reply.error
    prefill, decode = cluster.pair(prompt, 8, timeout=20)
    assert (prefill.status, decode.text) == (200, echo(prompt, 8))
    cluster.wait_idle()
    cluster.check_alive()
    assert "pd-guard fault guard=admission seam=prefill_door role=prefill rid=fault-1" in cluster.prefills[0].log_text()
    assert cluster.prefills[0].counter("faults_total") == 1
