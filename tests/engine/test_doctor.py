"""pd-guard doctor on the real source of each SGLang version. No server is started."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from pd_rig.home import environment, overlay, rig_python

from sglang_pd_guard.bindings import table
from sglang_pd_guard.settings import Settings

pytestmark = pytest.mark.engine


def doctor(sglang: Path, *args: str, **env: str):
    """Runs it with the SGLang that lies in this folder."""
    command = [rig_python(), "-m", "sglang_pd_guard", "doctor", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment(sglang) | env, timeout=60)


@pytest.mark.each
def test_each_version_is_ready(version):
    done = doctor(overlay(version), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["ok"], report["sglang"]) == (True, version)
    assert report["location"] == str((overlay(version) / "sglang").resolve())
    assert [t["target"] for t in report["targets"]] == [s.target for s in table.seams(version, None, disable=Settings().unbound)]
    assert not any(t["problem"] for t in report["targets"])
    leaks = "stub-transfer" in {w["key"] for w in report["weaknesses"]}
    assert leaks == (table.order(version) < table.order("0.5.20"))


def test_an_unlike_source_is_not_ready(version, tmp_path):
    """The real tree with one function renamed."""
    shutil.copytree(overlay(version) / "sglang", tmp_path / "sglang", copy_function=os.symlink)
    file = tmp_path / "sglang/srt/disaggregation/prefill.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("def add(self, req: Req, num_kv_heads: int)", "def append(self, req: Req, num_kv_heads: int)"))
    assert "def append(" in file.read_text()
    done = doctor(tmp_path)
    assert done.returncode == 1
    assert "verdict: NOT READY" in done.stdout
    assert "disaggregation.prefill.PrefillBootstrapQueue.add: " in done.stdout


def test_an_environment_that_drops_the_plugin_is_told(rig_version):
    done = doctor(overlay(rig_version), SGLANG_PLUGINS="another")
    assert done.returncode == 1
    assert "SGLANG_PLUGINS=another leaves out pd_guard" in done.stdout
