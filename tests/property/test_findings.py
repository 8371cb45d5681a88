"""Audit's judgement, for any servers."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_guard.cli.findings import SEVERITIES, Guard, Node, Worker, examine

LIMIT = st.none() | st.integers(100, 2_000_000)
NAME = st.none() | st.sampled_from(["a", "b"])


def nodes(role):
    return st.builds(
        Node,
        url=st.sampled_from([f"http://{role}{i}" for i in range(3)]),
        role=st.just(role),
        mode=st.sampled_from([role, None, "decode"]),
        sglang=st.sampled_from([None, "0.5.12.post1", "0.5.19", "0.5.20", "0.5.23", "0.5.24", "0.6.0.dev1+g", "main"]),
        pool=LIMIT, context=LIMIT, intake=LIMIT,
        page_size=st.sampled_from([None, 1, 64]),
        dtype=st.sampled_from([None, "auto", "bfloat16"]),
        kv_dtype=st.sampled_from([None, "auto", "fp8_e4m3"]),
        page_major=st.sampled_from([None, True, False]),
        backend=st.sampled_from([None, "mooncake", "nixl", "mori", "fake", "another"]),
        bootstrap_port=st.none() | st.integers(1, 9),
        truncates=st.sampled_from([None, True, False]),
        weights=NAME, canary=st.sampled_from([None, "none", "log", "raise"]), checksum=st.sampled_from([None, True, False]),
        architectures=st.sampled_from([None, ("A",), ("B",)]),
        metrics=st.booleans(),
        guard=st.none() | st.builds(Guard, st.sampled_from(["1", "2"]), st.sampled_from(["enforce", "observe"]), st.sampled_from(["require", "prefer"])),
        guards=st.sampled_from([None, (), ("admission", "release")]),
        owned=st.dictionaries(st.sampled_from(["pages", "rooms"]), st.integers(0, 3)),
        quarantined=st.integers(0, 2), admitting=st.booleans(), faults=st.integers(0, 2),
        clock=st.none() | st.floats(-100, 100),
    )  # fmt: skip


CLUSTERS = st.lists(nodes("prefill") | nodes("decode"), max_size=4)
WORKERS = st.none() | st.lists(
    st.builds(Worker, st.sampled_from(["http://prefill0", "http://decode0", "http://else"]), st.sampled_from(["prefill", "decode"]), st.none() | st.integers(1, 9), st.booleans()),
    max_size=3,
)


@given(CLUSTERS, WORKERS)
def test_whatever_the_servers_say_the_findings_are_whole_and_in_order(cluster, workers):
    found = examine(cluster, workers)
    assert [f.severity for f in found] == sorted((f.severity for f in found), key=SEVERITIES.index)
    assert len(set(found)) == len(found)
    urls = {node.url for node in cluster} | {worker.url for worker in workers or ()}
    for finding in found:
        assert finding.what and finding.then and finding.change
        assert set(finding.nodes) <= urls
        assert "None" not in finding.what + finding.then + finding.change


@given(nodes("prefill"), nodes("decode"))
def test_capacity_is_found_exactly_where_decode_admits_more(prefill, decode):
    mine, theirs = prefill.longest, decode.longest
    found = [f for f in examine([prefill, decode]) if f.rule == "capacity"]
    assert bool(found) == (mine is not None and theirs is not None and theirs > mine)
    for finding in found:
        assert str(mine) in finding.what and str(theirs) in finding.what
        assert all(str(node.pool) in finding.what for node in (prefill, decode) if node.pool is not None)


@given(nodes("prefill"), nodes("decode"))
def test_what_nobody_says_is_not_compared(prefill, decode):
    """A pair of which one says nothing has no finding that compares."""
    silent = Node(url="http://silent", role="decode")
    compared = {"capacity", "page-size", "kv-dtype", "kv-layout", "backend", "model", "weights", "sglang", "checksum", "canary"}
    pairs = [f for f in examine([prefill, silent]) if len(f.nodes) == 2]
    assert not compared & {f.rule for f in pairs}


@given(CLUSTERS, st.randoms())
def test_the_order_of_the_servers_does_not_matter(cluster, rng):
    shuffled = list(cluster)
    rng.shuffle(shuffled)
    ignore = {"unequal-pools", "clocks"}  # these name their nodes in the order given
    assert {f for f in examine(cluster) if f.rule not in ignore} == {f for f in examine(shuffled) if f.rule not in ignore}
