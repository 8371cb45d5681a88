"""The tripwire, without SGLang: a stand-in module in the place of the scheduler's."""

import subprocess
import sys
import types

import pytest

from sglang_pd_guard import seal
from sglang_pd_guard.settings import ATTRIBUTE, Settings


class Args:
    disaggregation_mode = "prefill"


@pytest.fixture
def scheduler(monkeypatch):
    built = []

    class Scheduler:
        def __init__(self, server_args, port_args=None):
            built.append(server_args)

    module = types.ModuleType(seal.SCHEDULER_MODULE)
    module.Scheduler = Scheduler
    module.built = built
    monkeypatch.setitem(sys.modules, seal.SCHEDULER_MODULE, module)
    monkeypatch.delenv("SGLANG_PD_GUARD", raising=False)
    return module


def test_without_the_guard_nothing_is_checked(scheduler):
    seal.arm()
    args = Args()
    scheduler.Scheduler(args)
    assert scheduler.built == [args]


def test_arming_twice_wraps_once(scheduler):
    seal.arm()
    first = scheduler.Scheduler.__init__
    seal.arm()
    assert scheduler.Scheduler.__init__ is first


def test_settings_lost_on_the_way_are_noticed(scheduler, monkeypatch):
    for name, value in Settings().to_env().items():
        monkeypatch.setenv(name, value)
    seal.arm()
    with pytest.raises(SystemExit, match="settings were lost"):
        scheduler.Scheduler(Args())
    assert scheduler.built == []


def test_an_unbound_guard_is_noticed(scheduler, monkeypatch):
    from sglang_pd_guard.bindings import binder

    monkeypatch.setattr(binder, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(binder, "_bound", {})
    seal.arm()
    args = Args()
    setattr(args, ATTRIBUTE, Settings())
    with pytest.raises(SystemExit, match="did not load the plugin"):
        scheduler.Scheduler(args)
    assert scheduler.built == []


def test_without_disaggregation_there_is_nothing_to_guard(scheduler):
    seal.arm()
    args = Args()
    args.disaggregation_mode = "null"
    setattr(args, ATTRIBUTE, Settings())
    scheduler.Scheduler(args)
    assert scheduler.built == [args]


def test_a_refusal_is_one_line_and_a_failing_exit_status():
    code = "from sglang_pd_guard import seal; seal.refuse('this\\nand that')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "pd-guard: refusing to start: this and that\n"


def test_the_pure_part_imports_nothing_of_sglang():
    code = (
        "import sys, sglang_pd_guard.settings, sglang_pd_guard.seal, sglang_pd_guard.plugin, "
        "sglang_pd_guard.guards.admission, sglang_pd_guard.guards.wire, sglang_pd_guard.bindings.table; "
        "sys.exit(any(m == 'sglang' or m.startswith(('sglang.', 'torch')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
