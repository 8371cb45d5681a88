"""SGLang with our patches, without the plugin: what test_faults.py shows on SGLang as published is gone.

Each series is applied to a copy of the published package. Its own unit tests run there too. With ``-rP`` pytest shows the
seconds that patches/*/UPSTREAM.md quotes.
"""

import random
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from pd_rig.home import environment, overlay, rig_python, why_missing
from pd_rig.model import echo
from pd_rig.traffic import (
    LATE_WRITES,
    SOON,
    aborts,
    attack,
    healthy,
    late_write,
    room_of_a_queued_chunk,
    same_room,
    secret,
)

from sglang_pd_guard.cli import patch
from sglang_pd_guard.cli.main import main

pytestmark = pytest.mark.engine

ALL = [path.parent.name for path in sorted(patch.series_folder().glob("*/series"))]
LAST = ALL[-1]
#: The newest backport and the contributions; the others with --full.
VERSIONS = [v if v in ("0.5.19", LAST) else pytest.param(v, marks=pytest.mark.full) for v in ALL]


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """Called with a version: a folder with its package ``sglang``, patched. In the end the series is taken off again."""
    made: dict[str, Path] = {}

    def make(version: str) -> Path:
        if reason := why_missing(version):
            pytest.skip(reason)
        if version not in made:
            folder = tmp_path_factory.mktemp(f"patched-{version}")
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(overlay(version) / "sglang", folder / "sglang", ignore=ignore)
            assert main(["patch", "apply", "--target", str(folder)]) == 0
            made[version] = folder
        return made[version]

    yield make
    for version, folder in made.items():
        assert main(["patch", "revert", "--target", str(folder)]) == 0
        assert files_of(folder / "sglang") == files_of(overlay(version) / "sglang")


def files_of(folder: Path) -> dict[str, bytes]:
    """All but what Python compiled."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def python(folder: Path, version: str, *words: str, **env: str) -> subprocess.CompletedProcess:
    """Runs Python with the patched SGLang in `folder`, on the CPU, without the plugin."""
    env = environment(folder, overlay(version), Path(__file__).parents[1] / "rig") | {"SGLANG_PLATFORM": "cpu_rig", "SGLANG_PLUGINS": "none"} | env
    return subprocess.run([rig_python(), *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_series_own_tests(patched, version):
    folder = patched(version)
    run = python(folder, version, "-m", "pytest", "-q", "-p", "no:cacheprovider", "sglang/test/disaggregation")
    assert run.returncode == 0, run.stdout[-3000:]
    assert "skipped" not in run.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_git_am_makes_the_same_of_the_published_wheel(version, tmp_path):
    """On the very commit that the series names."""
    if reason := why_missing(version):
        pytest.skip(reason)
    script = Path(__file__).parents[2] / "scripts" / "sglang_tree.py"
    subprocess.run([rig_python(), str(script), version, str(tmp_path / "tree"), "--patched"], check=True)
    target = patch.Target(str(tmp_path / "tree"))
    series, state = patch.choose(target, version)
    assert state == patch.PATCHED
    log = subprocess.run(["git", "log", "--format=%s"], cwd=tmp_path / "tree", check=True, capture_output=True, text=True)
    subjects = log.stdout.splitlines()
    assert len(subjects) == len(series.patches) + 1
    assert all(subject.startswith(("[PD] ", "[Plugin] ")) for subject in subjects[:-1])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_attack_gets_its_400_and_nobody_waits(clusters, patched, version):
    cluster = clusters(version, sglang=patched(version))
    campaign = attack(cluster, 15)
    assert campaign.leaks == []
    assert campaign.wrong == []
    assert [r.status for r in campaign.refusals] == [400] * 15
    slowest = max(r.seconds for r in campaign.refusals)
    assert slowest < SOON
    prefill, decode = cluster.pair("0" * 5000, 8)
    assert prefill.status == decode.status == 400
    assert prefill.error == decode.error
    assert "5000 tokens" in prefill.error
    attackers = [threading.Thread(target=cluster.complete, args=("0" * 5000, 8, 15)) for _ in range(3)]
    for thread in attackers:
        thread.start()
    prompt = secret(1000, random.Random(1))
    legitimate = cluster.complete(prompt, 8, timeout=15)
    assert legitimate.text == echo(prompt, 8)
    assert legitimate.seconds < SOON
    for thread in attackers:
        thread.join()
    cluster.wait_idle()
    print(f"the slowest 400 after {slowest:.2f} s, an answer beside three of them after {legitimate.seconds:.2f} s")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rejected_request_does_not_wait_for_memory(clusters, patched, version):
    """decode has no memory for it: it is told all the same."""
    cluster = clusters(version, sglang=patched(version))
    running = secret(3500, random.Random(2))
    with_memory = threading.Thread(target=lambda: list(cluster.pieces(running, 600)))
    with_memory.start()
    time.sleep(1)
    reply = cluster.complete("0" * 7800, 8, timeout=15)
    assert with_memory.is_alive()
    assert reply.status == 400
    assert reply.seconds < SOON
    with_memory.join()
    cluster.wait_idle()


@pytest.mark.parametrize("version", VERSIONS)
def test_healthy_traffic_is_exact(clusters, patched, version):
    cluster = clusters(version, sglang=patched(version))
    assert healthy(cluster, 80) == []
    cluster.wait_idle()
    for node in cluster.nodes:
        assert "Exception in thread" not in node.log_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_transfer_of_fewer_tokens_is_refused_on_decode(clusters, patched, version):
    """Prefill has read a shorter prompt than decode, sends what it has, and says Success."""
    cluster = clusters(version, sglang=patched(version))
    prompt, other = secret(3000, random.Random(4)), secret(2000, random.Random(5))
    _, decode = cluster.pair(prompt, 64, prefill_prompt=other, timeout=15)
    assert decode.status == 500
    assert "transferred the KV cache of 2000 tokens where 3000 are reserved" in decode.error
    assert cluster.complete(prompt, 64).text == echo(prompt, 64)
    cluster.wait_idle()


@pytest.mark.parametrize("version", [LAST])
def test_one_room_twice(clusters, patched, version):
    """No answer with the other's text, and every client is answered: where the nodes did not see both requests together, by SGLang's
    timeouts.
    """
    timeouts = {f"SGLANG_DISAGGREGATION_{name}_TIMEOUT": "5" for name in ("BOOTSTRAP", "WAITING")}
    cluster = clusters(version, sglang=patched(version), env=timeouts)
    for outcome in same_room(cluster, 6, timeout=20):
        assert outcome.leaks == []
        for reply, prompt in zip(outcome.decode, outcome.prompts, strict=True):
            assert reply.status in (400, 500) or reply.text == echo(prompt, 40)
        assert all(reply.status is not None for reply in outcome.prefill)
    _, decode = cluster.pair(secret(300, random.Random(1)), 8, extra={"sampling_params": {"n": 2}}, timeout=6)
    assert decode.status == 400
    cluster.wait_idle()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_late_write_lands_where_nobody_reads(clusters, patched, version):
    env = {**LATE_WRITES}
    if "quarantine" not in _names(patched(version)):  # there the pages are given back after that time
        del env["SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"]
    cluster = clusters(
        version,
        sglang=patched(version),
        env=env,
        decode_tokens=2560,
        decode_args=["--num-reserved-decode-tokens", "16"],
    )
    for seed in range(2):
        assert late_write(cluster, seed) == ["exact", "exact"]
    if "former-chunk" in _names(patched(version)):
        _, prompt, reply = room_of_a_queued_chunk(cluster, room=78)
        assert (reply.status, reply.text) == (200, echo(prompt, 256))
    answered, wrong = aborts(cluster, 40, seed=9)
    assert wrong == []
    assert answered > 20
    cluster.wait_idle(timeout=15)
    for node in cluster.nodes:
        assert "releasing anyway" not in node.log_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_with_the_plugin_on_top_each_refusal_is_one(clusters, patched, version):
    """The plugin names the patches in its line, refuses each request once and leaves healthy traffic alone."""
    cluster = clusters(version, sglang=patched(version), guard=True)
    for node in cluster.nodes:
        assert f" patches={','.join(sorted(_names(patched(version))))}" in node.log_text()
    campaign = attack(cluster, 5)
    assert [r.status for r in campaign.refusals] == [400] * 5
    metrics = cluster.prefills[0].metrics()
    assert 'sglang:pd_guard_refused_total{guard="admission",role="prefill",rule="unadmitted"} 5.0' in metrics
    assert healthy(cluster, 40) == []
    cluster.wait_idle()
    for node in cluster.nodes:
        assert "pd-guard fault" not in node.log_text()


@pytest.mark.parametrize("version", [LAST])
def test_fail_closed_a_server_whose_plugin_is_missing_does_not_start(patched, version):
    launch = ("-m", "sglang.launch_server", "--model-path", "none")
    env = {"SGLANG_PLUGINS": "missing", "SGLANG_PLUGINS_FAIL_CLOSED": "1"}
    run = python(patched(version), version, *launch, **env)
    assert run.returncode != 0
    assert "SGLANG_PLUGINS names missing: not loaded" in run.stderr


def _names(folder: Path) -> tuple[str, ...]:
    scope: dict = {}
    exec((folder / "sglang/srt/disaggregation/_pd_guard_patches.py").read_text(), scope)
    return scope["PATCHES"]
