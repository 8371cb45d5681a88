"""The capacity guard on real SGLang."""

import random

import pytest
from pd_rig.model import echo
from pd_rig.traffic import SOON, secret

pytestmark = pytest.mark.engine

NUMBERS = "decode admits prompts of 7680 tokens, prefill can hold 4030"


def on(clusters, version, **options):
    return clusters(version, **({"guard": True} | options))


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_a_decode_that_admits_more_than_prefill_holds_is_not_served(clusters, version):
    cluster = on(clusters, version, allow_mismatch=False, warm_up=False)
    for _ in range(2):
        for reply in cluster.pair(secret(300, random.Random(1)), 8):
            assert (reply.status, reply.text) == (503, None), reply
            assert NUMBERS in reply.error and "--max-total-tokens" in reply.error
            assert "--pd-guard-allow-capacity-mismatch" in reply.error
            assert reply.seconds < SOON
    cluster.wait_idle(SOON)
    prefill = cluster.prefills[0]
    assert 'sglang:pd_guard_findings_total{action="refused",role="prefill",rule="capacity"} 2.0' in prefill.metrics()
    assert prefill.log_text().count("pd-guard finding guard=capacity rule=capacity action=refused role=prefill") == 1
    assert " prefill=4030 decode=7680" in prefill.log_text()


@pytest.mark.parametrize("version", ["0.5.20"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"allow_mismatch": False, "guard": ["--pd-guard-mode", "observe"]},
        {"allow_mismatch": False, "prefill_tokens": 8192},
    ],
    ids=["observed", "equal-pools"],
)
@pytest.mark.full
def test_it_is_served_where_that_is_allowed_or_fits(clusters, version, options):
    cluster = on(clusters, version, **options)
    prompt = secret(300, random.Random(2))
    _, decode = cluster.pair(prompt, 8)
    assert (decode.status, decode.text) == (200, echo(prompt, 8))
    served = 'sglang:pd_guard_findings_total{action="served",role="prefill",rule="capacity"}'
    assert (served in cluster.prefills[0].metrics()) == ("prefill_tokens" not in options)


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_truncation_does_not_hang(clusters, version, side):
    """On one side alone it is a finding; where it is allowed all the same, nobody waits."""
    flag = ["--allow-auto-truncate"]
    cluster = on(clusters, version, **{f"{side}_args": flag})
    for size in (5000, 9000):
        for reply in cluster.pair(secret(size, random.Random(size)), 8, timeout=20):
            assert reply.status in (400, 500), reply
            assert reply.text is None
            assert reply.seconds < SOON
    prompt = secret(700, random.Random(3))
    _, decode = cluster.pair(prompt, 8)
    assert decode.text == echo(prompt, 8)
    cluster.wait_idle()
    assert "rule=auto-truncate action=served" in cluster.prefills[0].log_text()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_truncation_on_one_side_is_refused(clusters, version):
    cluster = on(
        clusters, version, allow_mismatch=False, warm_up=False, prefill_tokens=8192,
        prefill_args=["--allow-auto-truncate"],
    )  # fmt: skip
    for reply in cluster.pair(secret(300, random.Random(1)), 8):
        assert reply.status == 503, reply
        assert "--allow-auto-truncate is set on prefill alone" in reply.error
