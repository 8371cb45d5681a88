"""What the router makes of the guard's refusals."""

import os
import random
import time

import pytest
from pd_rig.client import get, post
from pd_rig.home import rig_python
from pd_rig.model import echo
from pd_rig.ports import PortPool
from pd_rig.processes import ServerProcess, stop_all
from pd_rig.traffic import secret

pytestmark = pytest.mark.engine

THRESHOLD = 3


@pytest.fixture
def router(tmp_path):
    """Call it with a cluster: the URL of a second router, whose circuit breaker opens after `THRESHOLD` failures."""
    ports, servers = PortPool(), []

    def start(cluster):
        port = ports.take()
        (prefill,) = cluster.prefills
        command = [rig_python(), "-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-retries"]
        command += ["--prefill", prefill.url, str(prefill.bootstrap_port), "--decode", cluster.decode.url]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.take())]
        command += ["--cb-failure-threshold", str(THRESHOLD), "--cb-timeout-duration-secs", "600"]
        command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "86400"]
        servers.append(ServerProcess("router", command, dict(os.environ), tmp_path / "router.log"))
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not usable(url):
            servers[0].check()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        return url

    yield start
    stop_all(servers)
    ports.release()


def usable(url):
    try:
        return len(get(f"{url}/workers").json()["workers"]) == 2
    except (OSError, ValueError, KeyError):
        return False


def ask(url, prompt):
    return post(f"{url}/v1/completions", {"model": "echo", "prompt": prompt, "temperature": 0, "max_tokens": 8}, 20)


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("guarded")
def test_refusals_do_not_open_the_circuit_breaker(clusters, version, router):
    cluster = clusters(version, guard=True)
    url, prompt = router(cluster), secret(500, random.Random(5))
    assert [ask(url, "0" * (cluster.prefill_limit + i)).status for i in range(4 * THRESHOLD)] == [400] * 4 * THRESHOLD
    assert ask(url, prompt).text == echo(prompt, 8)
