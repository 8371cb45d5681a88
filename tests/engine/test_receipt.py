"""The receipt guard on real SGLang, with the other guards off where it must do without them."""

import random
import re

import pytest
from pd_rig.client import run_concurrently
from pd_rig.model import echo
from pd_rig.traffic import SOON, attack, same_room, secret

pytestmark = pytest.mark.engine

FAULTS = {"PD_RIG_FAULT": "short_transfer,receipt_row,wrong_bytes"}
ALONE = ["--pd-guard-disable", "admission,room,release,ownership,capacity,audit"]
REFUSED = "Refused by the PD guard: the KV cache that prefill transferred is not this request's (rule {})."
ABORT = "Nothing was generated. Please retry"


def on(clusters, version, **options):
    return clusters(version, **({"guard": ALONE, "env": FAULTS} | options))


def refused(reply, rule: str) -> None:
    assert (reply.status, reply.text) == (500, None), reply
    assert REFUSED.format(rule) in reply.error and ABORT in reply.error, reply
    assert reply.seconds < SOON


def exact(cluster, length: int, rng, n: int = 24, **kwargs) -> None:
    prompt = secret(length, rng)
    _, decode = cluster.pair(prompt, n, **kwargs)
    assert (decode.status, decode.text) == (200, echo(prompt, n)), decode


def lines(node) -> list[str]:
    return [line for line in node.log_text().splitlines() if "pd-guard refused guard=receipt" in line]


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.19"], indirect=True)
def test_the_incident(clusters, version):
    """Prefill sends a stub of one token and says so; decode had reserved pages for thousands."""
    cluster = on(clusters, version)
    # Decode keeps 512 tokens free beside a prompt, or never runs it.
    campaign = attack(cluster, 15, timeout=10, largest=cluster.decode_limit - 600)
    assert (campaign.leaks, campaign.wrong) == ([], [])
    for reply in campaign.refusals:
        refused(reply, "tokens")
    cluster.wait_idle()
    assert f'{{guard="receipt",role="decode",rule="tokens"}} {len(campaign.refusals)}.0' in cluster.decode.metrics()
    assert len(lines(cluster.decode)) == len(campaign.refusals)
    for line in lines(cluster.decode):
        assert re.search(r"rule=tokens role=decode rid=\S+ room=\d+ status=500 expected=\d{4} found=1$", line), line


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.parametrize("pairs", [20, pytest.param(50, marks=pytest.mark.full)])
def test_two_requests_in_one_room(clusters, version, pairs):
    """SGLang's own schedulers may end over them, which the room guard, off here, prevents: then on new ones."""
    tries = 0
    for seed in range(6):
        cluster = on(clusters, version, fresh=True)
        for outcome in same_room(cluster, pairs - tries, seed=seed):
            assert outcome.leaks == []
            if any("Unexpected poll" in node.log_text() for node in cluster.nodes):
                break
            tries += 1
            for prompt, reply in zip(outcome.prompts, outcome.decode, strict=True):
                if reply.status == 200:
                    assert reply.text == echo(prompt, 40)
                elif reply.status is not None:  # SGLang may leave one without an answer, which the room guard prevents as well
                    assert reply.status == 500, reply
                    assert reply.seconds < SOON
        else:
            cluster.wait_idle()
            exact(cluster, 700, random.Random(1))
            break
    assert tries >= 0.4 * pairs, tries


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"], indirect=True)
def test_what_was_transferred_is_not_what_was_reserved(clusters, version):
    """A page less than promised, the receipt of the slot's former user, a damaged one and none at all."""
    cluster = on(clusters, version)
    rng = random.Random(2)
    for name, word, rule in [
        ("short_transfer", "on", "pages"),
        ("receipt_row", "stale", "prompt"),  # of the same room; the check word covers the room as well
        ("receipt_row", "damage", "damaged"),
        ("receipt_row", "wipe", "absent"),
    ]:
        exact(cluster, 600, rng, room=99)
        cluster.wait_idle()
        (cluster.fault_dir / name).write_text(word)
        _, decode = cluster.pair(secret(600, rng), 256, room=99)
        (cluster.fault_dir / name).unlink()
        refused(decode, rule)
        cluster.wait_idle()
    exact(cluster, 600, rng)
    assert re.search(r"rule=pages .* expected=10 found=9$", "\n".join(lines(cluster.decode)), re.M)


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"], indirect=True)
def test_a_stale_receipt_of_the_same_prompt_is_refused_by_its_nonce(clusters, version):
    cluster = on(clusters, version)
    prompt, room = secret(600, random.Random(3)), 4711
    for _ in range(2):
        _, decode = cluster.pair(prompt, 8, room=room)
        assert decode.text == echo(prompt, 8)
        cluster.wait_idle()
    (cluster.fault_dir / "receipt_row").write_text("stale")
    _, decode = cluster.pair(prompt, 8, room=room)
    (cluster.fault_dir / "receipt_row").unlink()
    refused(decode, "nonce")


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"], indirect=True)
def test_bytes_that_arrive_as_others(clusters, version):
    """The receipt alone believes them; with a checksum the transfer is refused."""
    prompt = secret(600, random.Random(8))

    def reply(cluster):
        (cluster.fault_dir / "wrong_bytes").write_text("400000")
        _, decode = cluster.pair(prompt, 64)
        (cluster.fault_dir / "wrong_bytes").unlink()
        return decode

    believed = reply(on(clusters, version))
    assert believed.status == 200 and believed.text != echo(prompt, 64)
    cluster = on(clusters, version, guard=[*ALONE, "--pd-guard-checksum"])
    refused(reply(cluster), "checksum")
    cluster.wait_idle()
    for length in (1, 63, 600, 4000):
        exact(cluster, length, random.Random(8))
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()


@pytest.mark.parametrize("version", ["0.5.21"], indirect=True)
def test_a_prompt_truncated_on_one_side_only(clusters, version):
    cluster = on(clusters, version, prefill_args=["--context-length", "2048", "--allow-auto-truncate"])
    _, decode = cluster.pair(secret(3000, random.Random(4)), 8)
    refused(decode, "tokens")
    cluster.wait_idle()
    exact(cluster, 1500, random.Random(4))


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.5.18"], indirect=True)
def test_a_peer_that_writes_no_receipt(clusters, version):
    """Guarded, but without this guard: refused under require, served and counted under prefer."""
    prefill_args = ["--pd-guard-disable", "receipt,ownership"]
    cluster = on(clusters, version, guard=True, prefill_args=prefill_args, warm_up=False, fresh=True)
    prompt = secret(600, random.Random(5))
    refused(cluster.pair(prompt, 8)[1], "absent")
    cluster = on(clusters, version, guard=["--pd-guard-peer", "prefer"], prefill_args=prefill_args, fresh=True)
    assert cluster.pair(prompt, 8)[1].text == echo(prompt, 8)
    assert cluster.decode.counter("unguarded_peers_total", action="served") >= 1


UNTOUCHED = {
    "page-1": ("0.5.19", {"page_size": 1}),
    "page-16-decode-radix-cache": (
        "0.5.23",
        {
            "page_size": 16,
            "guard": ["--pd-guard-checksum"],
            "decode_args": ["--disaggregation-decode-enable-radix-cache"],
        },
    ),
}


@pytest.mark.parametrize(("version", "options"), UNTOUCHED.values(), ids=UNTOUCHED.keys(), indirect=["version"])
def test_untouched(clusters, version, options):
    cluster = on(clusters, version, **({"guard": True} | options))
    rng = random.Random(6)
    page = options.get("page_size", 64)
    shared = secret(20 * page, rng)
    for length in [1, page - 1 or 2, page, page + 1, 8 * page - 1 or 3, 8 * page, 8 * page + 1]:
        exact(cluster, length, rng)
    for _ in range(3):  # the second and third find a prefix on decode where it has a cache
        prompt = shared + secret(rng.choice([0, 1, page, page + 5]), rng)
        for _ in range(2):
            _, decode = cluster.pair(prompt, 24)
            assert decode.text == echo(prompt, 24)
    prompts = [secret(rng.randrange(1, 700), rng) for _ in range(64)]
    calls = [lambda p=p: cluster.complete(p, 24, timeout=120) for p in prompts]
    assert [reply.text for reply in run_concurrently(calls)] == [echo(p, 24) for p in prompts]
    prompt = secret(300, rng)
    _, decode = cluster.pair(prompt, 8, extra={"return_logprob": True, "logprob_start_len": 299, "top_logprobs_num": 2})
    assert decode.text == echo(prompt, 8)
    assert len(decode.body["meta_info"]["output_token_logprobs"]) == 8
    streamed = cluster.complete(prompt, 8, stream=True)
    assert "".join(re.findall(r'"text":"([^"]*)"', streamed.body)) == echo(prompt, 8)
    cluster.wait_idle()
    for node in cluster.nodes:
        assert "pd-guard refused" not in node.log_text()
        assert "pd-guard fault" not in node.log_text()
        assert "idle node owns" not in node.log_text()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_retraction_and_resume_on_decode(clusters, version):
    cluster = on(
        clusters, version, guard=True, decode_tokens=2048, decode_args=["--num-reserved-decode-tokens", "64"]
    )
    prompts = [secret(128, random.Random(i)) for i in range(6)]
    calls = [lambda p=p: cluster.complete(p, 500, timeout=120) for p in prompts]
    assert [reply.text for reply in run_concurrently(calls)] == [echo(p, 500) for p in prompts]
    assert "Retract requests" in cluster.decode.log_text()
    cluster.wait_idle()
    exact(cluster, 1200, random.Random(7))
    assert lines(cluster.decode) == []
