"""pd-guard doctor on small stand-ins for SGLang's source, and the tables of the documentation."""

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from sglang_pd_guard.bindings import table
from sglang_pd_guard.cli import doctor, known
from sglang_pd_guard.cli.source import Source
from sglang_pd_guard.settings import GUARDS, Settings

ROOT = Path(__file__).parents[2]


class Dist:
    def __init__(self, name):
        self.name = name


def point(name, group, dist):
    return EntryPoint(name, "module:function", group)._for(Dist(dist))


OURS = {doctor.PLUGINS_GROUP: [point("pd_guard", doctor.PLUGINS_GROUP, "sglang-pd-guard")]}


@pytest.fixture
def tree(tmp_path):
    """A source tree that has every target of 0.5.23, as the table knows it."""
    modules: dict[str, dict[str | None, list[str]]] = {}
    for seam in table.SEAMS:
        if not seam.applies("0.5.23"):
            continue
        path, _, name = seam.target.rpartition(".")
        module, _, owner = path.rpartition(".")
        owner, module = (owner, module) if owner[0].isupper() else (None, path)
        line = f"def {name}({', '.join(seam.parameters('0.5.23'))}, *, more=None): pass"
        modules.setdefault(module, {}).setdefault(owner, []).append(line)
    root = tmp_path / "sglang"
    for module, owners in modules.items():
        file = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            "\n".join(
                "\n".join(lines) if owner is None else f"class {owner}:\n" + "".join(f"    {line}\n" for line in lines)
                for owner, lines in owners.items()
            )
        )
    (root / "_version.py").write_text("__version__ = version = '0.5.23'\n")
    return root


def edit(tree, module, old, new):
    file = tree.joinpath(*module.split(".")).with_suffix(".py")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_a_known_version_is_ready(tree):
    report = doctor.examine(Source(tree), {}, OURS)
    assert report.ok, report.problems
    assert (report.sglang, report.state, report.guards) == ("0.5.23", "supported", list(GUARDS))
    assert len(report.targets) == len(table.seams("0.5.23", None, disable=Settings().unbound))
    assert "verdict: ready" in doctor.text(report)


def test_a_patched_tree_is_told(tree):
    assert "patches " not in doctor.text(doctor.examine(Source(tree), {}, OURS))
    marker = tree / "srt" / "disaggregation" / "_pd_guard_patches.py"
    marker.write_text('"""Which patches."""\n\nPATCHES = (\n    "tell-decode",\n    "live-room",\n)\n')
    report = doctor.examine(Source(tree), {}, OURS)
    assert report.ok and report.patches == ["tell-decode", "live-room"]
    assert "patches  tell-decode, live-room" in doctor.text(report)


def test_a_target_that_is_gone_or_changed_is_named(tree):
    edit(tree, "srt.disaggregation.prefill", "def add(self, req, num_kv_heads", "def add(self, req")
    edit(tree, "srt.disaggregation.utils", "def prepare_abort(", "def abort(")
    report = doctor.examine(Source(tree), {}, OURS)
    assert report.problems == [
        "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add: takes (self, req), known is (self, req, num_kv_heads)",
        "sglang.srt.disaggregation.utils.prepare_abort: sglang.srt.disaggregation.utils has no function prepare_abort",
    ]
    assert "verdict: NOT READY" in doctor.text(report)


def test_targets_of_a_disabled_guard_do_not_matter(tree):
    edit(tree, "srt.managers.scheduler", "def on_idle(", "def idle(")
    env = {"SGLANG_PD_GUARD": "1", "SGLANG_PD_GUARD_DISABLE": "audit"}
    assert not doctor.examine(Source(tree), {}, OURS).ok
    assert doctor.examine(Source(tree), env, OURS).ok


def test_an_unknown_version_is_refused_unless_allowed(tree):
    (tree / "_version.py").write_text("__version__ = version = '0.5.24'\n")
    report = doctor.examine(Source(tree), {}, OURS)
    assert report.state == "unverified"
    assert any(problem.startswith("SGLang 0.5.24 is not verified") for problem in report.problems)
    allowed = {"SGLANG_PD_GUARD": "1", "SGLANG_PD_GUARD_ALLOW_UNVERIFIED": "1"}
    assert doctor.examine(Source(tree), allowed, OURS).ok


def test_no_sglang():
    report = doctor.examine(None, {}, OURS)
    assert report.problems == ["no SGLang is installed in this environment"]
    assert "not found" in doctor.text(report)


@pytest.mark.parametrize(
    ("env", "points", "said"),
    [
        ({}, {}, "no installed distribution offers the plugin"),
        ({"SGLANG_PLUGINS": "other, pd_guard"}, OURS, None),
        ({"SGLANG_PLUGINS": "other"}, OURS, "SGLANG_PLUGINS=other leaves out pd_guard"),
        ({"SGLANG_PLATFORM": "npu"}, OURS, None),
        (
            {"SGLANG_PLATFORM": "npu"},
            OURS | {doctor.PLATFORMS_GROUP: [point("gpu", doctor.PLATFORMS_GROUP, "sglang-pd-guard")]},
            "SGLANG_PLATFORM=npu drops pd_guard",
        ),
        (
            {"SGLANG_PLATFORM": "npu"},
            OURS | {doctor.PLATFORMS_GROUP: [point("npu", doctor.PLATFORMS_GROUP, "sglang-pd-guard")]},
            None,
        ),
    ],
)
def test_what_would_drop_the_plugin(env, points, said):
    problems = doctor.plugin_problems(env, points)
    assert [said in problem for problem in problems] == ([True] if said else [])


def test_a_setting_that_makes_no_sense_is_told(tree):
    report = doctor.examine(Source(tree), {"SGLANG_PD_GUARD": "1", "SGLANG_PD_GUARD_MODE": "perhaps"}, OURS)
    assert report.problems == ["mode must be one of enforce, observe, not 'perhaps'"]


def test_source_follows_bases_and_imports(tmp_path):
    root = tmp_path / "sglang"
    root.mkdir()
    (root / "version.py").write_text("try:\n    from sglang._version import __version__\nexcept ImportError:\n    __version__ = '1.2.3'\n")
    (root / "base.py").write_text("class Base:\n    def inherited(self, a, /, b): pass\n")
    (root / "child.py").write_text(
        "from sglang.base import Base as B\n"
        "if True:\n    async def function(x, *args, key=1): pass\n"
        "class Child(B):\n    @classmethod\n    def made(cls, y): pass\n"
    )
    source = Source(root)
    assert source.version == "1.2.3"
    assert source.parameters("sglang.child.Child.inherited") == ("self", "a", "b")
    assert source.parameters("sglang.child.Child.made") == ("cls", "y")
    assert source.parameters("sglang.child.B.inherited") == ("self", "a", "b")
    assert source.parameters("sglang.child.function") == ("x",)
    for target, said in [
        ("sglang.child.Child.none", "has no function none"),
        ("sglang.child.None_.f", "has no class None_"),
        ("sglang.nowhere.Child.f", "no module sglang.nowhere"),
        ("other.child.f", "no module other"),
    ]:
        with pytest.raises(LookupError, match=said):
            source.parameters(target)


def test_weaknesses_are_well_formed():
    keys = [w.key for w in known.WEAKNESSES]
    assert len(set(keys)) == len(keys)
    for w in known.WEAKNESSES:
        assert w.guard == "core" or w.guard in GUARDS
        assert all(w.concerns(version) for version in w.seen), w.key
        assert set(w.seen) <= set(table.SUPPORTED)
    for version in table.SUPPORTED:
        assert known.weaknesses(version)
    assert known.at_least("main", "0.5.19") is False
    assert known.weaknesses("0.5.24") == known.weaknesses("0.5.23")


def test_the_weakness_of_the_incident_is_told_where_it_is():
    leaks = {v for v in table.SUPPORTED if "stub-transfer" in {w.key for w in known.weaknesses(v)}}
    assert leaks == {"0.5.12.post1", "0.5.15.post1", "0.5.18", "0.5.19"}


def documented(name, path):
    found = re.search(rf"<!-- {name}: .*? -->\n(.*?)\n<!-- end -->", (ROOT / path).read_text(), re.DOTALL)
    return found and found[1]


def test_the_documentation_shows_the_tables():
    assert documented("versions", "README.md") == known.versions_table()
    assert documented("weaknesses", "docs/tools.md") == known.weaknesses_table()


def test_settings_that_count_beside_the_flag_are_checked(tree):
    (problem,) = doctor.examine(Source(tree), {"SGLANG_PD_GUARD_PEER": "prefr"}, OURS).problems
    assert "peer must be one of require, prefer" in problem


def test_a_module_that_is_no_python(tree):
    (tree / "srt" / "managers" / "scheduler.py").write_text("def broken(:")
    report = doctor.examine(Source(tree), {}, OURS)
    assert any("has no class Scheduler" in problem for problem in report.problems), report.problems


def test_the_command(tree, monkeypatch, capsys):
    from sglang_pd_guard.cli.main import main

    monkeypatch.syspath_prepend(str(tree.parent))
    (tree / "__init__.py").write_text("")
    monkeypatch.setattr(doctor, "entry_points", lambda group: OURS.get(group, []))
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    found = Source.find()
    if found is not None and found.root != tree.resolve():
        pytest.skip("another sglang is imported already")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    edit(tree, "srt.managers.scheduler", "def on_idle(", "def idle(")
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"]
    monkeypatch.setattr(Source, "find", classmethod(lambda cls: None))
    assert main(["doctor"]) == 2
    with pytest.raises(SystemExit) as usage:
        main(["doctor", "--nonsense"])
    assert usage.value.code == 2
