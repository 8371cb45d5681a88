"""What happens without the guard, in the same words as test_admission.py: these tests show that those can fail.

They pass while the named SGLang has the fault. When one fails on a new release, upstream has mended it.
"""

import random
import threading
import time

import pytest
from pd_rig.client import run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import LEAK, attack, same_room, secret, shared_run

pytestmark = pytest.mark.engine


@pytest.mark.versions("0.5.12.post1", "0.5.19")
@pytest.mark.cluster("unguarded")
def test_an_oversize_prompt_is_answered_with_another_tenants_text(clusters, version):
    """The incident: HTTP 200, and the answer is the victim's text."""
    cluster = clusters(version)
    campaign = attack(cluster, 50, timeout=10, stop_at_leak=True)
    assert campaign.leaks, f"no leak in {len(campaign.refusals)} attacks"
    assert campaign.refusals[-1].status == 200


@pytest.mark.versions("0.5.20", "0.5.23")
@pytest.mark.cluster("unguarded")
def test_an_oversize_prompt_hangs_and_starves_everyone(clusters, version):
    """Prefill refuses, decode is never told: its client hangs and its pages stay reserved."""
    cluster = clusters(version)
    prompt = secret(1000, random.Random(1))
    attackers = [threading.Thread(target=cluster.complete, args=("0" * 5000, 8, 15)) for _ in range(3)]
    for thread in attackers:
        thread.start()
        time.sleep(0.3)
    legitimate = cluster.complete(prompt, 8, timeout=6)
    assert legitimate.status is None, legitimate
    assert cluster.used_pages()["decode"] >= 79
    for thread in attackers:
        thread.join()


@pytest.mark.parametrize("version", [pytest.param("0.5.19", marks=pytest.mark.full), "0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_a_prompt_of_nearly_the_pools_size_blocks_prefill(clusters, version):
    """SGLang admits it, never schedules it, and schedules nobody behind it."""
    cluster = clusters(version)
    stuck = threading.Thread(target=cluster.pair, args=("0" * 4050, 8), kwargs={"timeout": 12})
    stuck.start()
    time.sleep(1)
    prompt = secret(300, random.Random(2))
    assert cluster.complete(prompt, 8, timeout=5).status is None
    stuck.join()


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.19"], indirect=True)
def test_an_unknown_session_ends_the_decode_server(clusters, version):
    """One request of any client, and the scheduler process dies."""
    cluster = clusters(version, fresh=True, router=False)
    extra = {"session_params": {"id": "no-such-session"}}
    cluster.pair("0" * 500, 8, extra=extra, timeout=10, which="decode")
    assert cluster.decode.wait(60) != 0
    assert "'NoneType' object has no attribute 'startswith'" in cluster.decode.log_text()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_prefill_waits_when_decode_refuses(clusters, version):
    """The mirror image: prefill's client hangs where decode has answered 400 at once."""
    cluster = clusters(version)
    prefill, decode = cluster.pair("0" * 8500, 8, prefill_prompt=secret(500, random.Random(3)), timeout=6)
    assert decode.status == 400
    assert prefill.status is None


@pytest.mark.parametrize("version", ["0.5.19"], indirect=True)
def test_observe_mode_counts_and_changes_nothing(clusters, version):
    """With the guard in observe mode the leak is there as without it, but it is counted and logged."""
    cluster = clusters(version, guard=["--pd-guard-mode", "observe"])
    campaign = attack(cluster, 50, timeout=10, stop_at_leak=True)
    assert campaign.leaks
    prefill = cluster.prefills[0]
    assert prefill.counter("observed_total", guard="admission", rule="unadmitted") >= 1
    assert prefill.counter("refused_total") == 0
    assert "pd-guard would-refuse guard=admission rule=unadmitted role=prefill" in prefill.log_text()


@pytest.mark.parametrize("version", ["0.5.19"], indirect=True)
def test_with_the_guards_that_stop_it_disabled_the_leak_is_back(clusters, version):
    cluster = clusters(version, guard=["--pd-guard-disable", "admission,receipt,ownership"])
    assert attack(cluster, 50, timeout=10, stop_at_leak=True).leaks
    prompts = [secret(500, random.Random(i)) for i in range(8)]
    replies = run_concurrently([lambda p=p: cluster.complete(p, 8) for p in prompts], 4)
    assert [r.text for r in replies] == [echo(p, 8) for p in prompts]


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_two_requests_in_one_room_get_each_others_text(clusters, version):
    """The newest release: two live requests with one bootstrap room and equally long prompts."""
    outcomes = list(same_room(clusters(version), 6))
    assert any(outcome.leaks for outcome in outcomes)
    assert any(reply.status is None for outcome in outcomes for reply in outcome.decode)


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_several_samples_hang_on_decode(clusters, version):
    cluster = clusters(version)
    _, decode = cluster.pair(secret(300, random.Random(1)), 8, extra={"sampling_params": {"n": 2}}, timeout=6)
    assert decode.status is None, decode


@pytest.mark.parametrize(
    "version", [*(pytest.param(v, marks=pytest.mark.full) for v in ("0.5.18", "0.5.19", "0.5.20")), "0.5.23"], indirect=True
)
@pytest.mark.cluster("unguarded")
def test_a_transfer_of_fewer_tokens_is_answered_all_the_same(clusters, version):
    """Prefill has read another, shorter prompt than decode."""
    cluster = clusters(version)
    prompt, other = secret(3000, random.Random(4)), secret(2000, random.Random(5))
    _, decode = cluster.pair(prompt, 64, prefill_prompt=other)
    assert decode.status == 200
    assert decode.text != echo(prompt, 64)


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_the_host_of_health_checks_leaks(clusters, version):
    """A client names it, nothing is transferred, and decode answers from what the pages held."""
    cluster = clusters(version)
    rng = random.Random(1)
    victims = [secret(1000, rng) for _ in range(9)]
    for victim in victims:
        cluster.complete(victim, 40)
    cluster.wait_idle()
    texts = []
    for n, size in enumerate((500, 1500)):
        _, reply = cluster.pair([33 + n] * size, 60, extra={"bootstrap_host": "2.2.2.2"}, which="decode")
        assert reply.status == 200
        texts.append(reply.text)
    assert max(len(shared_run(text, victim)) for text in texts for victim in victims) >= LEAK


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_a_negative_room_ends_prefill(clusters, version):
    cluster = clusters(version, fresh=True)
    prefill, _ = cluster.pair("a" * 300, 4, room=-5, timeout=6)
    assert prefill.status is None, prefill
    assert "OverflowError" in cluster.prefills[0].log_text()
