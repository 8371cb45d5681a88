"""What audit says about pairs of servers, without servers."""

import dataclasses

import pytest

from sglang_pd_guard.cli.findings import Guard, Node, Worker, examine, worst
from sglang_pd_guard.settings import GUARDS

GUARD = Guard("0.1.0", "enforce", "require")


def node(role, **changes):
    """A guarded node of a pair that fits."""
    fields = {
        "url": f"http://{role}:30000", "mode": role, "sglang": "0.5.23", "pool": 8192, "context": 8192, "intake": 8186, "page_size": 64,
        "dtype": "bfloat16", "kv_dtype": "auto", "page_major": False, "backend": "mooncake", "bootstrap_port": 8998, "truncates": False,
        "weights": "default", "architectures": ("Qwen2ForCausalLM",), "checksum": False, "canary": "none", "metrics": True,
        "guard": GUARD, "guards": GUARDS if role == "prefill" else None, "clock": 0.0,
    }  # fmt: skip
    return Node(role=role, **(fields | changes))


def pair(prefill=None, decode=None, both=None):
    return [node("prefill", **(both or {}), **(prefill or {})), node("decode", **(both or {}), **(decode or {}))]


def rules(nodes, *args):
    return {finding.rule for finding in examine(nodes, *args)}


def one(nodes, rule, *args):
    (finding,) = [finding for finding in examine(nodes, *args) if finding.rule == rule]
    return finding


def test_a_pair_that_fits_has_no_finding():
    assert examine(pair()) == []
    assert worst([]) is None


SMALL = {"pool": 4096, "intake": 4090, "context": 65536}
LARGE = {"pool": 8192, "intake": 8186, "context": 65536}


@pytest.mark.parametrize(
    ("both", "severity", "then"),
    [
        ({"sglang": "0.5.19", "guard": None, "guards": None}, "error", "answered from the KV of others, with HTTP 200"),
        ({"sglang": "0.5.23", "guard": None, "guards": None}, "error", "waits on decode, with its pages"),
        ({"sglang": "main", "guard": None, "guards": None}, "error", "waits on decode"),
        ({"sglang": "0.5.19"}, "warning", "the guard refuses prompts of 4090 tokens"),
        ({"sglang": "0.5.19", "guard": Guard("0.1.0", "observe", "require")}, "error", "answered from the KV of others"),
    ],
)
def test_a_smaller_prefill_is_named_with_both_numbers_and_the_flag(both, severity, then):
    finding = one(pair(SMALL, LARGE, both), "capacity")
    assert finding.severity == severity
    assert finding.what == (
        "prefill admits prompts of up to 4089 tokens (KV pool 4096 tokens, context 65536 tokens), "
        "decode of up to 8185 (KV pool 8192 tokens, context 65536 tokens)"
    )
    assert then in finding.then
    assert "prefill's --max-total-tokens to 8192 or more" in finding.change and "--context-length 4096" in finding.change
    assert finding.nodes == ("http://prefill:30000", "http://decode:30000")


def test_a_larger_prefill_is_no_finding():
    assert "capacity" not in rules(pair(LARGE, SMALL))


def test_without_the_intake_limit_pool_and_context_decide():
    assert "capacity" not in rules(pair({"pool": 4096, "context": 2048}, {"pool": 8192, "context": 2048}, {"intake": None}))
    assert "4089" in one(pair({"pool": 4096}, {"pool": 8192}, {"intake": None}), "capacity").what
    assert "capacity" not in rules(pair({"pool": None, "context": None}, {}, {"intake": None}))


def test_a_window_larger_than_the_pool():
    finding = one(pair({"pool": 681280, "intake": 681274, "context": 1050000}), "window")
    assert "1050000" in finding.what and "681280" in finding.what and "--context-length 681280" in finding.change


@pytest.mark.parametrize(
    ("rule", "severity", "prefill", "decode", "words"),
    [
        ("page-size", "error", {"page_size": 64}, {"page_size": 16}, ("64", "16", "--page-size")),
        ("kv-dtype", "error", {"kv_dtype": "fp8_e4m3"}, {}, ("fp8_e4m3", "bfloat16", "--kv-cache-dtype")),
        ("kv-dtype", "error", {"dtype": "float16"}, {}, ("float16", "bfloat16")),
        ("kv-layout", "error", {"page_major": True}, {}, ("set", "not set")),
        ("backend", "error", {"backend": "nixl"}, {}, ("nixl", "mooncake")),
        ("model", "error", {"architectures": ("A",)}, {"architectures": ("B",)}, ("A", "B")),
        ("weights", "warning", {"weights": "2"}, {"weights": "1"}, ("2", "1")),
        ("sglang", "warning", {"sglang": "0.5.22"}, {}, ("0.5.22", "0.5.23")),
        ("checksum", "warning", {"checksum": True}, {}, ("set", "not set")),
        ("canary", "error", {"canary": "log"}, {}, ("on", "off")),
        ("guard-version", "warning", {"guard": Guard("0.2.0", "enforce", "require")}, {}, ("0.2.0", "0.1.0")),
        ("one-sided", "error", {"guard": None, "guards": None}, {}, ("only decode", "503")),
        ("one-sided", "warning", {"guard": Guard("0.1.0", "enforce", "prefer")}, {"guard": None}, ("only prefill",)),
        ("auto-truncate", "error", {"truncates": True}, {}, ("prefill alone",)),
        ("auto-truncate", "error", {"truncates": True, "intake": 4090}, {"truncates": True}, ("4089", "8185")),
        ("clocks", "warning", {"clock": -9.0}, {"clock": 1.0}, ("10 s",)),
    ],
)
def test_a_pair_that_differs(rule, severity, prefill, decode, words):
    finding = one(pair(prefill, decode), rule)
    assert finding.severity == severity
    for word in words:
        assert word in f"{finding.what} {finding.then} {finding.change}"


@pytest.mark.parametrize(
    ("rule", "severity", "changes"),
    [
        ("role", "error", {"mode": "decode"}),
        ("fake-backend", "error", {"backend": "fake"}),
        ("untested-backend", "info", {"backend": "nixl"}),
        ("canary", "warning", {"canary": "raise"}),
        ("unknown-guard", "warning", {"metrics": False, "guard": None}),
        ("unguarded", "warning", {"guard": None}),
        ("observe", "warning", {"guard": Guard("0.1.0", "observe", "require")}),
        ("peer", "info", {"guard": Guard("0.1.0", "enforce", "prefer")}),
        ("disabled", "warning", {"guards": ("admission",)}),
        ("leak", "error", {"owned": {"pages": 3, "rooms": 0}}),
        ("quarantine", "warning", {"quarantined": 80}),
        ("quarantine", "error", {"quarantined": 80, "admitting": False}),
        ("faults", "warning", {"faults": 1}),
    ],
)
def test_a_node_alone(rule, severity, changes):
    finding = one([node("prefill", **changes)], rule)
    assert finding.severity == severity


@pytest.mark.parametrize(
    ("sglang", "backend", "said"),
    [
        ("0.5.18", "mooncake", "never holds"),
        ("0.5.19", "mooncake", "only with SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=1"),
        ("0.5.20", "mori", "never holds"),
        ("0.5.21", "mooncake", "for 30 s at most"),
        ("0.5.21", "mori", "never holds"),
        ("0.5.22", "mori", "for 30 s at most"),
    ],
)
def test_what_sglang_does_with_the_pages_of_a_failed_transfer(sglang, backend, said):
    unguarded = {"guard": None, "guards": None, "sglang": sglang, "backend": backend}
    assert said in one(pair(both=unguarded), "release").what


def test_a_guarded_pair_holds_them():
    assert "release" not in rules(pair(both={"sglang": "0.5.18"}))
    assert "release" in rules(pair({"guards": ("admission", "receipt")}, both={"sglang": "0.5.12.post1"}))


def test_siblings():
    nodes = [*pair(), node("decode", url="http://other:1", pool=8000, intake=7994, context=8000)]
    assert one(nodes, "unequal-pools").what == "decode pools of 8000, 8192 tokens"


def test_the_router():
    nodes = pair()
    good = [Worker(nodes[0].url, "prefill", 8998), Worker(nodes[1].url, "decode")]
    assert examine(nodes, good) == []
    for changed, words in [
        (dataclasses.replace(good[0], bootstrap_port=1), "bootstrap port 1, prefill has 8998"),
        (dataclasses.replace(good[0], role="decode"), "sends to it as decode, it is prefill"),
        (dataclasses.replace(good[0], healthy=False), "unhealthy"),
    ]:
        assert words in one(nodes, "router", [changed, good[1]]).what
    assert "does not know it" in one(nodes, "router", good[:1]).what
    assert "was not audited" in one(nodes, "router", [*good, Worker("http://third:1", "decode")]).what


def test_the_worst_comes_first():
    found = examine(pair(SMALL, LARGE | {"page_size": 16}))
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=("error", "warning", "info").index)
    assert worst(found) == "error"
