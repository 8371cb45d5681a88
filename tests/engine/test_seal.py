"""Fail closed: whatever keeps a guard from being bound keeps the real server from starting, with one line that says why."""

import subprocess
import textwrap

import pytest
from pd_rig import drift
from pd_rig.cluster import Cluster
from pd_rig.home import rig_python, why_missing
from pd_rig.model import ensure_model

pytestmark = pytest.mark.engine

DOOR = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"
PREFILL = "sglang.srt.disaggregation.prefill"


BOTH = pytest.mark.parametrize("release", [pytest.param("0.5.19", marks=pytest.mark.full), "0.5.23"], indirect=True)


@pytest.fixture(params=["0.5.23"])
def release(request):
    if reason := why_missing(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def one(release, tmp_path):
    """Starts one prefill; all that were started are stopped at the end."""
    clusters = []

    def start(guard=True, **options):
        cluster = Cluster(release, guard=guard, router=False, log_dir=tmp_path / str(len(clusters)), **options)
        clusters.append(cluster)
        return cluster, cluster.start_one("prefill")

    yield start
    for cluster in clusters:
        cluster.stop()


def lines(node, beginning="pd-guard: ") -> list[str]:
    return [line for line in node.log_text().splitlines() if line.startswith(beginning)]


BREAKAGES = {
    "a hook target that does not exist": (
        {"env": drift.environment({"module": PREFILL, "remove": "PrefillBootstrapQueue.add"})},
        f"hook target {DOOR} does not exist in SGLang",
    ),
    "a target with another signature": (
        {"env": drift.environment({"module": PREFILL, "signature": "PrefillBootstrapQueue.add"})},
        f"hook target {DOOR} takes (self, one_more, req, num_kv_heads), known is (self, req, num_kv_heads)",
    ),
    "the plugin's import failing in the scheduler only": (
        {"env": drift.environment({"module": "sglang_pd_guard.plugin", "fail": True, "children_only": True})},
        "SGLang did not load the plugin pd_guard in this process",
    ),
    "a version not in the table": (
        {"env": drift.environment({"module": "sglang.version", "set": {"__version__": "0.5.99"}})},
        "SGLang 0.5.99 is not verified",
    ),
    "what the ownership guard cannot follow": (
        {"common_args": ["--enable-streaming-session"]},
        "the ownership guard cannot follow --enable-streaming-session; leave that out, or add --pd-guard-disable ownership",
    ),
    "an unknown guard name": (
        {"guard": ["--pd-guard-disable", "admision"]},
        "unknown guard admision; the guards are: admission, receipt, room, release, ownership, capacity, audit",
    ),
}


@BOTH
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_server_does_not_start_with(one, breakage):
    options, reason = BREAKAGES[breakage]
    _, node = one(**options)
    assert node.wait(180) not in (0, None)
    said = [line for line in lines(node) if line.startswith(f"pd-guard: refusing to start: {reason}")]
    assert len(said) == 1, node.log_text()[-3000:]
    assert "The server is fired up" not in node.log_text()


def test_the_server_does_not_start_without_our_package_in_the_scheduler(one):
    """Then nothing of ours can speak; the settings that travel to the scheduler cannot even be unpickled."""
    change = {"module": "sglang_pd_guard.settings", "fail": True, "children_only": True}
    _, node = one(env=drift.environment(change))
    assert node.wait(180) not in (0, None)
    assert "sglang_pd_guard.settings cannot be imported" in node.log_text()
    assert "The server is fired up" not in node.log_text()


def test_the_server_does_not_start_with_the_plugin_filtered_out(one):
    _, node = one(env={"SGLANG_PLUGINS": "pd_rig_fault"})
    assert node.wait(180) == 2
    assert "unrecognized arguments: --enable-pd-guard" in node.log_text()


def test_a_guard_flag_without_the_guard_is_refused(one):
    _, node = one(guard=False, common_args=["--pd-guard-mode", "observe"], env={"SGLANG_PLUGINS": None})
    assert node.wait(180) == 1
    assert lines(node) == [
        "pd-guard: refusing to start: --pd-guard-mode without --enable-pd-guard: nothing would be guarded; "
        "add --enable-pd-guard"
    ]


def unverified(release: str) -> dict:
    """A build of this release that the table does not name."""
    return {"module": "sglang.version", "set": {"__version__": f"{release}+site.1"}}


def test_an_unverified_version_starts_where_the_operator_says_so(one, release):
    cluster, node = one(guard=["--pd-guard-allow-unverified"], env=drift.environment(unverified(release)))
    cluster.wait_healthy(node)
    assert f"pd-guard bound version=0.1.0 sglang={release}+site.1" in node.log_text()


def test_an_unverified_version_with_a_missing_target_does_not(one, release):
    changes = [unverified(release), {"module": PREFILL, "remove": "PrefillBootstrapQueue.add"}]
    _, node = one(guard=["--pd-guard-allow-unverified"], env=drift.environment(*changes))
    assert node.wait(180) not in (0, None)
    assert any(DOOR in line for line in lines(node, "pd-guard: refusing to start: "))


def test_without_disaggregation_there_is_nothing_to_guard_and_the_server_runs(one):
    cluster, node = one(common_args=["--disaggregation-mode", "null"])
    cluster.wait_healthy(node)
    said = "pd-guard: this server runs without prefill/decode disaggregation: there is nothing to guard"
    assert lines(node) == [said]
    assert "pd-guard bound" not in node.log_text()
    reply = node.post("/generate", {"text": "0" * 300, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}, 60)
    assert (reply.status, reply.text) == (200, "0000")


ENGINE = """
    import sys

    def main():
        import sglang_pd_guard
        sglang_pd_guard.require()
        import sglang
        engine = sglang.Engine(
            model_path=sys.argv[1], device="cpu", dtype="float32", attention_backend="torch_native",
            sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True, page_size=64,
            max_total_tokens=4096, mem_fraction_static=0.3, disaggregation_mode="prefill", host="127.0.0.1",
            disaggregation_transfer_backend="mooncake", skip_server_warmup=True, disable_overlap_schedule=True,
            log_level="info",
        )
        print("ENGINE UP", flush=True)
        engine.shutdown()

    if __name__ == "__main__":
        main()
"""


@BOTH
@pytest.mark.parametrize("filtered", [False, True])
def test_an_embedding_program(release, tmp_path, filtered):
    """``sglang.Engine`` has no command line: `require` turns the guard on, or says why it cannot be had."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(ENGINE))
    env = Cluster(release, guard=True, log_dir=tmp_path, env={"SGLANG_PLUGINS": "other"} if filtered else {})
    env._make_folders()
    done = subprocess.run(
        [rig_python(), str(program), str(ensure_model())],
        env=env._environment("prefill"), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if filtered:
        assert done.returncode == 1
        assert "GuardNotLoaded: SGLANG_PLUGINS=other leaves out pd_guard; add it" in output
        assert "ENGINE UP" not in output
    else:
        assert "ENGINE UP" in output, output[-3000:]
        assert "pd-guard bound version=" in output
        assert done.returncode == 0


PRISTINE = """
    import importlib, inspect, json, multiprocessing, pkgutil, sys
    from sglang_pd_guard.bindings import table

    def fingerprints():
        from sglang.srt.plugins import load_plugins
        from sglang.version import __version__
        load_plugins()
        found = {}
        for seam in table.SEAMS:
            if seam.applies(__version__):
                owner, _, name = seam.target.rpartition(".")
                value = inspect.getattr_static(pkgutil.resolve_name(owner), name)
                value = getattr(value, "__func__", value)
                code = value.__code__
                found[seam.target] = [code.co_filename, code.co_firstlineno, hasattr(value, "__wrapped__")]
        from sglang.srt.plugins.hook_registry import HookRegistry
        return {"attributes": found, "hooks": sorted(HookRegistry._hooks)}

    def child(queue):
        queue.put(fingerprints())

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        from_child = queue.get()
        process.join()
        print(json.dumps({"parent": fingerprints(), "child": from_child}))
"""


@BOTH
def test_without_the_flag_no_hook_is_installed(release, tmp_path):
    """Installed but not asked for: SGLang's attributes are those of an SGLang that never saw the plugin.

    Only the launcher process has two hooks, those that offer the flag itself.
    """
    import json

    program = tmp_path / "pristine.py"
    program.write_text(textwrap.dedent(PRISTINE))
    results = []
    for plugins in (None, "no-plugin-at-all"):
        cluster = Cluster(release, guard=False, log_dir=tmp_path, env={"SGLANG_PLUGINS": plugins})
        cluster._make_folders()
        done = subprocess.run(
            [rig_python(), str(program)], env=cluster._environment("prefill"), capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout.splitlines()[-1]))
    installed, pristine = results
    assert pristine["parent"]["hooks"] == pristine["child"]["hooks"] == []
    assert installed["child"] == pristine["child"]
    flags = ["sglang.srt.server_args.ServerArgs.add_cli_args", "sglang.srt.server_args.ServerArgs.from_cli_args"]
    assert installed["parent"]["hooks"] == flags
    for target, fingerprint in pristine["parent"]["attributes"].items():
        if target not in flags:
            assert installed["parent"]["attributes"][target] == fingerprint
    assert len(pristine["parent"]["attributes"]) > 12


def test_the_flags_are_offered(release, tmp_path):
    """(``sglang serve --help`` answers before it loads plugins; the flags work there all the same: test_topologies.)"""
    cluster = Cluster(release, guard=True, log_dir=tmp_path)
    cluster._make_folders()
    command = [rig_python(), "-m", "sglang.launch_server", "--help"]
    done = subprocess.run(command, env=cluster._environment("prefill"), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0
    flags = ("--enable-pd-guard", "--pd-guard-mode", "--pd-guard-peer", "--pd-guard-disable", "--pd-guard-allow-unverified")
    for flag in flags:
        assert flag in done.stdout
