"""A real Prometheus scrapes a real pair, and an alert fires after an attack."""

import os
import shutil
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from pd_rig.client import get
from pd_rig.ports import PortPool
from pd_rig.processes import ServerProcess, stop_all
from pd_rig.traffic import same_room

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: apt-get install prometheus)"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def prometheus(tmp_path):
    """Call it with the servers to scrape; returns a function that asks its HTTP API."""
    ports, servers = PortPool(), []

    def start(nodes):
        port = ports.take()
        config = yaml.safe_load((DEPLOY / "compose/prometheus.yml").read_text())
        config["rule_files"] = [str(DEPLOY / "prometheus/pd-guard.rules.yml")]
        (scrape,) = config["scrape_configs"]
        scrape["static_configs"] = [{"targets": [f"127.0.0.1:{node.port}" for node in nodes]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        servers.append(ServerProcess("prometheus", command, dict(os.environ), tmp_path / "prometheus.log"))
        eventually(lambda: ready(port))

        def ask(path):
            servers[0].check()
            return get(f"http://127.0.0.1:{port}/api/v1/{path}").json()["data"]

        return ask

    yield start
    stop_all(servers)
    ports.release()


def eventually(question, seconds=60):
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.3)


def ready(port):
    try:
        return get(f"http://127.0.0.1:{port}/-/ready").ok
    except OSError:
        return False


def instances(ask, query):
    return {sample["metric"]["instance"] for sample in ask(f"query?query={quote(query)}")["result"]}


def firing(ask):
    """(alert, instance, rule) of those that fire."""
    return {
        (alert["labels"]["alertname"], alert["labels"].get("instance"), alert["labels"].get("rule"))
        for alert in ask("alerts")["alerts"]
        if alert["state"] == "firing"
    }


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("guarded")
def test_an_attack_raises_its_alert(clusters, version, prometheus):
    cluster = clusters(version, guard=True)
    ask = prometheus(cluster.nodes)
    nodes = {f"127.0.0.1:{node.port}" for node in cluster.nodes}
    eventually(lambda: instances(ask, "sglang:pd_guard_info") == nodes)
    assert instances(ask, "sglang:pd_guard_admitting == 1") == nodes
    eventually(lambda: instances(ask, "sglang:num_used_tokens"))  # SGLang's own
    # prefill 4,096 tokens and decode 8,192: served here, and told.
    prefill = f"127.0.0.1:{cluster.prefills[0].port}"
    assert cluster.complete("a prompt").status == 200
    eventually(lambda: ("PdGuardCapacityMismatch", prefill, "capacity") in firing(ask))
    assert not any(name == "PdGuardRoomInUse" for name, *_ in firing(ask))

    for outcome in same_room(cluster, 2):
        assert not outcome.leaks
    eventually(lambda: any(name == "PdGuardRoomInUse" and rule == "in-use" for name, _, rule in firing(ask)))
    summaries = [a["annotations"]["summary"] for a in ask("alerts")["alerts"] if a["labels"]["alertname"] == "PdGuardRoomInUse"]
    assert any("refused a bootstrap room that was in use" in summary for summary in summaries)
    assert not {"PdGuardFault", "PdGuardMissing", "PdGuardNotAdmitting"} & {name for name, *_ in firing(ask)}
