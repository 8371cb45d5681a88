"""Metrics, their documentation, the alerts and the dashboard say the same."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_pd_guard.guards import ownership, receipt
from sglang_pd_guard.telemetry import AT_ZERO, METRICS, PREFIX

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/pd-guard.rules.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/pd-guard.json").read_text())
SUFFIX = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count", "")}


def exported():
    """Every name on /metrics, with its labels."""
    names = {}
    for name, (kind, _, labels) in METRICS.items():
        for suffix in SUFFIX[kind]:
            names[name + suffix] = {*labels, "instance", "job"} | ({"le"} if suffix == "_bucket" else set())
    return names


def queries():
    rules = re.findall(r"expr: (?:>-\n)?(.*?)\n\s+(?:for|labels):", RULES.read_text(), re.DOTALL)
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return rules + panels


def test_every_metric_has_a_help_text_and_stands_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| ", readme[readme.index("## Metrics") :], re.MULTILINE))
    for name, (kind, text, labels) in METRICS.items():
        assert text.endswith("."), name
        shown = name + ("_total" if kind == "counter" else "")
        assert rows.pop(shown).split(", ") == list(labels), name
    assert not rows


def test_what_increase_is_asked_of_is_there_at_zero():
    """Else Prometheus does not see the first event."""
    asked = {name for query in queries() for name in re.findall(rf"increase\({PREFIX}(\w+)_total", query)}
    assert asked and asked <= set(AT_ZERO)
    for name, sets in AT_ZERO.items():
        assert all(len(labels) == len(METRICS[name][2]) - 1 for labels in sets), name
    rules = {guard: {rule for g, rule in AT_ZERO["refused"] if g == guard} for guard in ("receipt", "ownership", "room")}
    assert rules["receipt"] == {*re.findall(r"``(\w+)``", receipt.verify.__doc__.split("Returns:")[1]), "checksum"}
    bindings = "".join(path.read_text() for path in (ROOT / "sglang_pd_guard/bindings").glob("*.py"))
    beside = {"prefix", "other-rank", "plan"}
    assert all(f': "{rule}"' in bindings for rule in beside)
    assert rules["ownership"] == {ownership.FREED, ownership.UNWRITTEN, ownership.FOREIGN, ownership.STALE} | beside
    assert rules["room"] == set(re.findall(r'"room", "([\w-]+)"', bindings)) | {"in-use"}


def test_alerts_and_dashboard_ask_only_for_what_exists():
    names = exported()
    asked = set()
    assert len(queries()) >= 30
    for query in queries():
        found = re.findall(rf"{PREFIX}(\w+)(?:\{{([^}}]*)\}})?", query)
        assert found or "up{" in query, query
        for name, matchers in found:
            assert name in names, f"{name} in {query}"
            labels = set(re.findall(r"(\w+)=~?\"", matchers))
            for group in re.findall(r"by \(([^)]*)\)", query):
                labels |= {label.strip() for label in group.split(",")}
            assert labels <= names[name], f"{labels - names[name]} of {name} in {query}"
            asked.add(re.sub(r"_(total|bucket|sum|count)$", "", name))
    assert asked == set(METRICS), "every metric is shown or alerts"


def test_every_alert_is_in_the_runbook():
    rules = RULES.read_text()
    alerts = re.findall(r"alert: (\w+)", rules)
    assert alerts and len(set(alerts)) == len(alerts)
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert headings == alerts
    assert re.findall(r"runbook: docs/runbook.md#(\w+)", rules) == [alert.lower() for alert in alerts]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", RULES.name), ("test", "rules", "pd-guard.test.yml")])
def test_prometheus_agrees(command):
    done = subprocess.run(["promtool", *command], cwd=RULES.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_the_dashboards_queries_are_promql(tmp_path):
    rules = "".join(
        f"      - record: q{i}\n        expr: {json.dumps(query.replace('$__rate_interval', '5m'))}\n" for i, query in enumerate(queries())
    )
    file = tmp_path / "queries.yml"
    file.write_text(f"groups:\n  - name: q\n    rules:\n{rules}")
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_tests_of_the_alerts_call_rules_exists():
    """Rule names in the promtool tests are names that the guards use."""
    used = set(re.findall(r'rule="([\w-]+)"', (RULES.parent / "pd-guard.test.yml").read_text()))
    source = "".join(p.read_text() for p in (ROOT / "sglang_pd_guard").rglob("*.py"))
    assert used and all(f'"{rule}"' in source for rule in used), used
