"""The rig itself: every supported SGLang runs on it, unguarded, and answers exactly what the echo model must answer."""

from __future__ import annotations

import os

import pytest
from pd_rig.home import RigError
from pd_rig.model import LAG, echo

pytestmark = pytest.mark.engine


def text(tag: str, length: int) -> str:
    """Text that repeats nowhere within the model's reach."""
    lines, i = "", 0
    while len(lines) < length:
        lines += f"[{tag} {i:04d} {i * 7919 % 99991:05d}] "
        i += 1
    return lines[:length]


@pytest.mark.cluster("unguarded")
def test_pair_answers_exactly(clusters, version):
    cluster = clusters(version)
    # Around the model's reach and the page size, one longer than a decode page, and one that feeds on its own answer.
    for length, n in [(1, 5), (63, 5), (64, 5), (LAG - 1, 5), (LAG, 5), (LAG + 1, 5), (3000, 40), (300, 300)]:
        prompt = text("tenant", length)
        through_router = cluster.complete(prompt, n)
        assert (through_router.status, through_router.text) == (200, echo(prompt, n))
        assert through_router.ok
        prefill, decode = cluster.pair(prompt, n)
        assert (prefill.status, prefill.text) == (200, echo(prompt, 1))
        assert (decode.status, decode.text) == (200, echo(prompt, n))
        assert decode.finish_reason == {"type": "length", "length": n}
    reply = cluster.chat(text("chat", 500), 40)
    assert (reply.status, reply.text) == (200, echo(text("chat", 500), 40))
    cluster.wait_idle()
    assert cluster.used_pages() == {"prefill": 0, "decode": 0}


@pytest.mark.cluster("unguarded")
def test_concurrent_requests_stay_apart(clusters, version):
    from pd_rig.cluster import run_concurrently

    cluster = clusters(version)
    prompts = [text(f"tenant{i}", 300 + 97 * i) for i in range(8)]
    replies = run_concurrently([lambda p=p: cluster.complete(p, 40, timeout=60) for p in prompts], workers=4)
    assert [reply.text for reply in replies] == [echo(p, 40) for p in prompts]
    cluster.wait_idle()


@pytest.mark.cluster("unguarded")
def test_the_product_is_not_loaded_unasked(clusters, version):
    cluster = clusters(version)
    for node in cluster.nodes:
        assert "sglang:num_requests_total" in node.metrics()
        assert "pd_guard" not in node.metrics()


@pytest.mark.full
def test_two_prefills_a_slow_write_and_a_dead_node(clusters, rig_version):
    cluster = clusters(rig_version, fresh=True, prefills=2, env={"PD_RIG_FAULT": "slow_write"})
    prompt = text("tenant", 1000)
    for via in range(2):
        _, decode = cluster.pair(prompt, 40, via=via)
        assert decode.text == echo(prompt, 40)
    (cluster.fault_dir / "slow_write").write_text("3 10000")
    _, slow = cluster.pair(prompt[::-1], 40)
    (cluster.fault_dir / "slow_write").unlink()
    assert slow.text == echo(prompt[::-1], 40)
    assert slow.seconds >= 3
    assert "slow_write: " in cluster.prefills[0].log_text()
    cluster.wait_idle()

    processes = [p for server in cluster.servers for p in server.tree()]
    cluster.decode.tree()[0].kill()
    cluster.decode.wait(10)
    with pytest.raises(RigError, match="decode ended with exit status -9"):
        cluster.check_alive()
    cluster.stop()
    assert not [p for p in processes if p.is_running()]


def test_a_node_that_cannot_start_is_reported_at_once(clusters, rig_version, tmp_path):
    from pd_rig.cluster import Cluster

    clusters.close()
    cluster = Cluster(rig_version, decode_args=["--no-such-flag"], log_dir=tmp_path)
    with pytest.raises(RigError, match=r"(?s)decode ended with exit status 2.*--no-such-flag"):
        cluster.start()
    assert cluster.servers == []
    assert not [p for p in _processes() if str(tmp_path) in p]


def _processes() -> list[str]:
    """The environments of all processes that may be read, as text: those of a cluster name its folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as environ:
                found.append(environ.read())
        except OSError:
            continue
    return found


def test_echo_is_what_the_checkpoint_computes():
    """Attention by distance, computed from the checkpoint's constants, prefers what ``echo`` copies by a wide margin."""
    np = pytest.importorskip("numpy")
    pytest.importorskip("scipy")
    from pd_rig import model

    query, key = model._query_and_key()
    half = len(query) // 2
    angles = np.outer(np.arange(8192), model._frequencies())
    # The score of a key this many places back: query . R(-distance) key / sqrt(head dim)
    rotated = key[:half] * np.cos(angles) + key[half:] * np.sin(angles)
    score = (query[:half] * rotated).sum(axis=1) / np.sqrt(len(query))
    assert score.argmax() == LAG - 1
    # The closer to the peak the better: that decides for prompts that do not reach it.
    assert np.diff(score[:LAG]).min() > 5.9
    assert score[LAG - 1] - np.delete(score, LAG - 1).max() > 5.9
    assert echo("ab", 3) == "aaa"
    assert echo("ab" * 200, 300) == ("ab" * 200)[-LAG:] + ("ab" * 200)[-LAG:][:44]
