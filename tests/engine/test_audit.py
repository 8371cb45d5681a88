"""pd-guard audit on real servers."""

import json

import pytest

from sglang_pd_guard.cli.main import main

pytestmark = pytest.mark.engine

#: One limit for both, within both pools.
FITS = {"prefill_tokens": 8192, "common_args": ["--context-length", "4096"]}


def audit(capsys, cluster, *args, named=True):
    """(exit status, report) of a run that names the servers, or lets the router name them."""
    servers = ["--prefill", cluster.prefills[0].url, "--decode", cluster.decode.url] if named else []
    status = main(["audit", *servers, "--router", cluster.router_url, "--json", *args])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def rules(report):
    return {finding["rule"] for finding in report["findings"]}


@pytest.mark.parametrize(
    ("version", "then"),
    [
        ("0.5.19", "a prompt of 4090 to 8185 tokens is answered from the KV of others, with HTTP 200"),
        pytest.param("0.5.23", "a prompt of 4090 to 8185 tokens is refused by prefill and waits on decode", marks=pytest.mark.full),
    ],
    indirect=["version"],
)
@pytest.mark.cluster("unguarded")
def test_the_mismatch_of_the_incident_is_an_error(clusters, version, then, capsys):
    """Prefill 4,096 tokens, decode 8,192: named with both numbers and the flag to change."""
    cluster = clusters(version)
    status, report = audit(capsys, cluster)
    assert status == 1
    (finding,) = [f for f in report["findings"] if f["rule"] == "capacity"]
    assert finding["severity"] == "error"
    assert "KV pool 4096 tokens" in finding["what"] and "KV pool 8192 tokens" in finding["what"]
    assert then in finding["then"]
    assert "prefill's --max-total-tokens to 8192" in finding["change"]
    assert finding["nodes"] == [cluster.prefills[0].url, cluster.decode.url]
    assert {"unguarded", "window", "release"} <= rules(report)

    assert main(["audit", "--router", cluster.router_url]) == 1
    printed = capsys.readouterr().out
    assert "ERROR capacity" in printed and "4096" in printed and "8192" in printed and "--max-total-tokens" in printed


@pytest.mark.parametrize("version", [pytest.param("0.5.18", marks=pytest.mark.full), "0.5.23"], indirect=True)
@pytest.mark.cluster("guarded")
def test_a_guarded_mismatch_is_a_warning(clusters, version, capsys):
    cluster = clusters(version, guard=True)
    status, report = audit(capsys, cluster)
    assert status == 1
    assert {f["severity"] for f in report["findings"]} == {"warning"}
    assert rules(report) == {"capacity", "window"}
    assert audit(capsys, cluster, "--fail-on", "error")[0] == 0
    prefill, decode = report["nodes"]
    assert prefill["guard"] == decode["guard"] == {"version": "0.1.0", "mode": "enforce", "peer": "require"}
    assert "release" in prefill["guards"]
    assert (prefill["sglang"], prefill["pool"], decode["pool"], prefill["context"]) == (version, 4096, 8192, 65536)
    assert audit(capsys, cluster, named=False)[1]["findings"] == report["findings"]
    # Nothing drifts while nothing is changed.
    assert main(["audit", "--router", cluster.router_url, "--watch", "0.2", "--rounds", "3", "--fail-on", "error"]) == 0
    assert "changed" not in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.each
def test_a_pair_that_fits_has_no_finding(clusters, version, capsys):
    cluster = clusters(version, guard=True, allow_mismatch=False, **FITS)
    status, report = audit(capsys, cluster)
    expected = {"disabled", "release"} if version == "0.5.12.post1" else set()
    assert rules(report) == expected
    assert status == bool(expected)


@pytest.mark.full
def test_a_server_that_is_gone_is_told(clusters, rig_version, capsys):
    cluster = clusters(rig_version, guard=True, fresh=True)
    cluster.kill(cluster.decode)
    status, report = audit(capsys, cluster)
    assert status == 2
    assert [line.startswith(cluster.decode.url) for line in report["unreadable"]] == [True]
