"""The probe's report: one file, well formed, with nothing from outside and nothing of what was answered."""

import json
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sglang_pd_guard.cli.findings import Guard, Node
from sglang_pd_guard.cli.probe import report, text
from sglang_pd_guard.cli.probe.attacks import Limits
from sglang_pd_guard.cli.probe.runner import Result
from sglang_pd_guard.cli.probe.secrets import Leak
from sglang_pd_guard.cli.probe.verdict import Request, checkable, findings, judge

VOID = {"meta"}


def request(owner, begin, **changes):
    fields = {
        "owner": owner, "kind": "victim", "phase": "attack", "expects": "answer", "begin": begin, "size": 4000, "status": 200,
        "finish": "stop", "error": None, "first": 0.5, "gaps": [0.01, 0.02], "seconds": 1.0, "right": True, "leaks": [],
    }  # fmt: skip
    return Request(**(fields | changes))


def result(requests, pages=None, **changes):
    can_check = checkable(requests)
    for r in requests:
        r.fault = judge(r, can_check)
    pages = pages or {}
    fields = {
        "url": "http://127.0.0.1:1", "model": "m", "kind": "chat", "started": "2026-01-02T03:04:05+0000", "seed": 7,
        "limits": Limits(4089, 4030), "patience": 10.0, "checkable": can_check, "attacks": ["oversize"],
        "begins": {"quiet": 0.0, "attack": 5.0, "after": 20.0, "end": 25.0},
        "nodes": [Node("http://p", "prefill", sglang="0.5.19", pool=4096, metrics=True, guard=Guard("1", "enforce", "require"))],
        "requests": requests, "pages": pages, "findings": findings(requests, pages),
    }  # fmt: skip
    return Result(**(fields | changes))


HEALTHY = [request(i, i / 2, phase="quiet" if i < 10 else "attack") for i in range(40)]
ATTACKED = [
    *(request(i, i / 2, phase="quiet") for i in range(10)),
    request(10, 6, kind="oversize", expects="refusal", leaks=[Leak(3, "partial", 20, True)]),
    request(11, 7, kind="oversize", expects="refusal", status=None, error="timeout", finish=None, first=None, gaps=[], seconds=10.0),
    request(12, 8, status=503, error="error", finish=None, first=None, gaps=[], right=False),
    request(13, 9, right=False),
]


class Checker(HTMLParser):
    """Every tag is closed, nothing is loaded, nothing runs."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base")
        for name, value in attrs:
            assert name not in ("src", "href", "srcset", "data") and not name.startswith("on"), (tag, name)
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "url(" not in page and "@import" not in page
    for svg in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0].replace("&micro;", "u") + "</svg>")
    return checker.text


@pytest.mark.parametrize("requests", [HEALTHY, ATTACKED, ATTACKED[10:], HEALTHY[:1]], ids=["clean", "attacked", "uncheckable", "one"])
def test_the_report_is_one_well_formed_file(requests):
    read(report.html(result(list(requests))))


def test_a_clean_run():
    clean = result(list(HEALTHY))
    assert clean.findings == [] and clean.as_dict()["ok"] is True
    assert "Clean" in read(report.html(clean)) and text(clean).endswith("verdict: clean")


def test_an_attacked_run_says_what_happened():
    attacked = result(list(ATTACKED), {"http://d": 4160})
    assert [f.fault for f in attacked.findings] == ["leak", "wrong-answer", "hang", "failed", "pages"]
    shown = read(report.html(attacked))
    for words in ("Not clean", "20 letters, partial, split", "victim #3", "4160 tokens on http://d", "SGLang 0.5.19, guard 1 (enforce)"):
        assert words in shown
    assert "verdict: NOT CLEAN" in text(attacked)
    assert json.loads(json.dumps(attacked.as_dict()))["kinds"][1]["leak"] == 1


def test_names_from_outside_are_escaped():
    hostile = "<script>alert(1)</script>"
    nodes = [Node(hostile, "prefill", sglang=hostile)]
    page = report.html(result(list(HEALTHY), url=hostile, model=hostile, nodes=nodes, attacks=[hostile]))
    assert "<script" not in page


def test_a_model_that_cannot_do_the_task_is_told():
    shown = read(report.html(result([request(0, 0.0, phase="quiet", right=False), request(1, 1.0, right=False)])))
    assert "wrong answers were not counted" in shown
