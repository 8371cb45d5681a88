"""pd-guard probe on real servers: it finds what is there, and nothing where nothing is."""

import json

import pytest
from pd_rig.traffic import SOON

from sglang_pd_guard.cli.main import main

pytestmark = pytest.mark.engine


def probe(clusters, version, folder, *args, native=False, **options):
    """(exit status, report) of a run against a new or idle cluster."""
    cluster = clusters(version, **options)
    if native:
        args = ("--prefill", cluster.prefills[0].url, "--decode", cluster.decode.url, *args)
    file = folder / "report.json"
    status = main(["probe", "--url", cluster.router_url, "--json", str(file), "--report", str(folder / "report.html"), *args])
    report = json.loads(file.read_text())
    assert report["checkable"] and report["kind"] == "chat"
    assert report["limits"] == {"admitted": 4089, "served": 4030}
    return status, report


def count(report, fault):
    return sum(request["fault"] == fault for request in report["requests"])


@pytest.mark.parametrize("version", [pytest.param("0.5.18", marks=pytest.mark.full), "0.5.19"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_it_finds_the_leak(clusters, version, tmp_path, capsys):
    """The incident, by an oversize prompt through the router."""
    status, report = probe(clusters, version, tmp_path, "--duration", "15", "--attacks", "oversize", "--seed", "1", "--patience", "15")
    assert status == 1
    leaks = [r for r in report["requests"] if r["leaks"]]
    assert leaks and report["findings"][0]["fault"] == "leak"
    assert all(r["kind"] == "oversize" and r["status"] == 200 for r in leaks)
    assert min(r["begin"] + r["seconds"] for r in leaks) - report["begins"]["attack"] < 60
    assert "LEAK" in capsys.readouterr().out
    # Whose secrets they are is known, and no prompt or answer is kept.
    owners = {r["owner"]: r["kind"] for r in report["requests"]}
    assert all(owners[leak["owner"]] for r in leaks for leak in r["leaks"])
    assert "Someone's notes" not in (tmp_path / "report.json").read_text() + (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("version", ["0.5.23"], indirect=True)
@pytest.mark.cluster("unguarded")
def test_it_finds_the_hang(clusters, version, tmp_path):
    status, report = probe(clusters, version, tmp_path, "--duration", "8", "--attacks", "oversize", "--patience", "8")
    assert status == 1
    hung = [r for r in report["requests"] if r["fault"] == "hang" and r["kind"] == "oversize"]
    assert hung and min(r["begin"] + r["seconds"] for r in hung) - report["begins"]["attack"] < 60


@pytest.mark.parametrize(
    "version",
    [pytest.param("0.5.18", marks=pytest.mark.full), pytest.param("0.5.20", marks=pytest.mark.full), "0.5.23"],
    indirect=True,
)
@pytest.mark.cluster("guarded")
def test_a_guarded_pair_is_clean(clusters, version, tmp_path):
    """All attacks, with bootstrap rooms used twice."""
    status, report = probe(clusters, version, tmp_path, "--duration", "45", "--patience", "60", native=True, guard=True)
    assert status == 0, report["findings"]
    kinds = {row["kind"]: row for row in report["kinds"]}
    assert set(kinds) >= {"victim", "oversize", "edge", "disconnect", "abort", "grammar", "samples", "storm", "room"}
    assert kinds["oversize"]["refused"] == kinds["oversize"]["sent"] >= 1
    assert kinds["victim"]["answered"] == kinds["victim"]["sent"] >= 20
    assert set(report["pages"].values()) == {0}
    clusters.current.wait_idle(SOON)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "guard"), [("0.5.19", False), ("0.5.23", True)], indirect=["version"])
def test_healthy_traffic_alone_is_clean(clusters, version, guard, tmp_path):
    """No false alarm in ten minutes, nine under the name of an attack; without the guard and with it."""
    status, report = probe(clusters, version, tmp_path, "--duration", "540", "--attacks", "none", "--patience", "60", guard=guard)
    assert (status, report["findings"]) == (0, [])
    assert {r["kind"] for r in report["requests"]} == {"victim"} and len(report["requests"]) >= 400
    assert report["begins"]["end"] - report["begins"]["quiet"] >= 600
