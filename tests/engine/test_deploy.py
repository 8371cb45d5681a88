"""Every flag in deploy/ is one that the servers and the router know. No server is started."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from pd_rig.cluster import Cluster
from pd_rig.home import rig_python, why_missing

pytestmark = pytest.mark.engine

DEPLOY = Path(__file__).parents[2] / "deploy"


def flags_of(*command, env):
    done = subprocess.run([rig_python(), *command, "--help"], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-500:]
    return set(re.findall(r"--[a-z0-9-]+", done.stdout))


def used(*files):
    """Flags by the module that they are given to."""
    found = {"sglang.launch_server": set(), "sglang_router.launch_router": set()}
    for file in files:
        text = file.read_text()
        for module, end in re.findall(r"(sglang\.launch_server|sglang_router\.launch_router)(.*?)(?=envFrom|healthcheck|deploy:|ports:|$)", text, re.DOTALL):
            found[module] |= set(re.findall(r"(?<=[\s\[])--[a-z0-9-]+", end))
    return found


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
def test_flags_exist(version, tmp_path):
    if reason := why_missing(version):
        pytest.skip(reason)
    asked = used(*(DEPLOY / "kubernetes").rglob("*.yaml"), DEPLOY / "compose/compose.yaml")
    cluster = Cluster(version, guard=True, log_dir=tmp_path)
    cluster._make_folders()
    env = cluster._environment("prefill")
    server = flags_of("-m", "sglang.launch_server", env=env)
    assert {"--enable-pd-guard", "--disaggregation-mode", "--context-length"} <= asked["sglang.launch_server"] <= server
    router = flags_of("-m", "sglang_router.launch_router", env=dict(os.environ))
    assert {"--pd-disaggregation", "--service-discovery", "--prefill"} <= asked["sglang_router.launch_router"] <= router
