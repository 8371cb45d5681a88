"""The table of seams is well formed, and says the same thing to everyone who reads it."""

import pytest

from sglang_pd_guard.bindings import table
from sglang_pd_guard.settings import GUARDS, Settings


def test_targets_are_unique_and_rows_complete():
    targets = [seam.target for seam in table.SEAMS]
    assert len(set(targets)) == len(targets)
    for seam in table.SEAMS:
        assert seam.process in ("cli", "launcher", "scheduler")
        assert seam.role in ("prefill", "decode", "both")
        assert seam.guards == {"core"} or seam.guards <= {*GUARDS, "plan"}
        assert seam.kind in (table.AROUND, table.AFTER)
        assert seam.why and seam.upstream and seam.retire


def test_every_hook_exists():
    import ast
    from pathlib import Path

    for seam in table.SEAMS:
        module, _, function = seam.hook.partition(":")
        source = (Path(table.__file__).parent / f"{module}.py").read_text()
        assert function in {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}, seam.hook


def test_versions_are_in_order():
    assert list(table.SUPPORTED) == sorted(table.SUPPORTED, key=table.order)
    assert list(table.SUPPORTED)[-1] == table.NEWEST
    assert table.order("0.5.12") < table.order("0.5.12.post1") < table.order("0.5.13")


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.5.19", "0.5.19"),
        ("0.5.17", "0.5.15.post1"),
        ("0.5.24", "0.5.23"),
        ("0.5.20.dev3+gabc", "0.5.20"),
        ("0.5.24rc1", "0.5.23"),
        ("0.5.11", "0.5.12.post1"),
        ("main", "0.5.23"),
    ],
)
def test_nearest(version, nearest):
    assert table.nearest(version) == nearest


def test_ranges_and_signatures():
    by_hook = {seam.hook: seam for seam in table.SEAMS}
    assert by_hook["admission:send_kv_chunk"].applies("0.5.19")
    assert not by_hook["admission:send_kv_chunk"].applies("0.5.20")
    assert by_hook["admission:decode_door"].parameters("0.5.15.post1") == ("self", "req", "is_retracted")
    assert by_hook["admission:decode_door"].parameters("0.5.23")[-1] == "is_rebootstrap"


def test_disabling_leaves_the_core():
    names = {s.guard for s in table.seams("0.5.23", "scheduler", disable=Settings(disable=frozenset(GUARDS)).unbound)}
    assert names == {"core"}
    assert "release" not in {s.guard for s in table.seams("0.5.23", "scheduler", disable=frozenset({"release"}))}
    shared = {s.guard for s in table.seams("0.5.23", "scheduler", disable=frozenset({"receipt"}))}
    assert "receipt, ownership" in shared  # what two guards need is bound for either

    assert "plan" not in {s.guard for s in table.seams("0.5.23", "scheduler", disable=Settings().unbound)}
    assert "plan" in {s.guard for s in table.seams("0.5.23", "scheduler", disable=Settings(check_plan=True).unbound)}
    without = Settings(check_plan=True, disable=frozenset({"ownership"})).unbound
    assert "plan" not in {s.guard for s in table.seams("0.5.23", "scheduler", disable=without)}

    prefill = {s.hook for s in table.seams("0.5.23", "scheduler", "prefill")}
    assert "admission:prefill_door" in prefill and "admission:decode_door" not in prefill


def test_a_guard_begins_with_its_seams():
    for guard, first in table.FIRST.items():
        assert min((s.since for s in table.SEAMS if s.guards == {guard}), key=table.order) == first


def test_what_a_version_lacks_is_not_promised():
    assert table.guards("0.5.23", Settings()) == list(GUARDS)
    assert not {"release", "ownership"} & set(table.guards("0.5.12.post1", Settings()))
    assert table.guards("0.5.23", Settings(disable=frozenset({"room", "release"}))) == [
        "admission", "receipt", "ownership", "capacity", "audit",
    ]  # fmt: skip


def test_a_patch_brings_a_seam_to_earlier_versions():
    hook = "room:ensure_abort_notified"
    here = [
        {s.hook for s in table.seams("0.5.19", "scheduler", "decode", patches=patches)}
        for patches in (frozenset(), frozenset({"deferred-release"}))
    ]
    assert here[1] - here[0] == {hook}
