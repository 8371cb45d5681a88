"""``pd-guard patch`` on small packages, and each shipped series on the SGLang it was made for."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rig"))

from pd_rig.home import overlay, why_missing

from sglang_pd_guard.cli import patch as tool
from sglang_pd_guard.cli.main import main

SHIPPED = sorted(path.parent.name for path in Path(__file__).parents[2].glob("patches/*/series"))

BEFORE = {"srt/a.py": "one\ntwo\nthree\n", "srt/b.py": "b\n", "srt/gone.py": "g\n"}
AFTER = {"srt/a.py": "one\nTWO\nthree\nfour\n", "srt/b.py": "B\n", "test/new/t.py": "t\n"}
FIRST = """\
diff --git a/python/sglang/srt/a.py b/python/sglang/srt/a.py
--- a/python/sglang/srt/a.py
+++ b/python/sglang/srt/a.py
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
diff --git a/python/sglang/srt/gone.py b/python/sglang/srt/gone.py
deleted file mode 100644
--- a/python/sglang/srt/gone.py
+++ /dev/null
@@ -1 +0,0 @@
-g
"""
SECOND = """\
diff --git a/python/sglang/srt/a.py b/python/sglang/srt/a.py
--- a/python/sglang/srt/a.py
+++ b/python/sglang/srt/a.py
@@ -3 +3,2 @@
 three
+four
diff --git a/python/sglang/srt/b.py b/python/sglang/srt/b.py
--- a/python/sglang/srt/b.py
+++ b/python/sglang/srt/b.py
@@ -1 +1 @@
-b
+B
diff --git a/python/sglang/test/new/t.py b/python/sglang/test/new/t.py
new file mode 100644
--- /dev/null
+++ b/python/sglang/test/new/t.py
@@ -0,0 +1 @@
+t
"""


def sha(text):
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``sglang`` 1.0, and the series for it."""
    series = tmp_path / "patches" / "1.0"
    series.mkdir(parents=True)
    (series / "0001-first.patch").write_text(FIRST)
    (series / "0002-second.patch").write_text(SECOND)
    (series / "series").write_text("# base-commit: 0\n0001-first.patch\n0002-second.patch\n")
    names = sorted(BEFORE.keys() | AFTER.keys())
    manifest = {f"python/sglang/{n}": {"before": sha(BEFORE.get(n)), "after": sha(AFTER.get(n))} for n in names}
    (series / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(tool, "series_folder", lambda: series.parent)
    root = tmp_path / "site-packages" / "sglang"
    for name, text in {**BEFORE, "_version.py": "__version__ = version = '1.0'\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def run(action, where, *options):
    return main(["patch", action, "--target", str(where), *options])


def content(folder):
    """Everything that is there, folders included."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def test_apply_check_revert(package, capsys):
    pristine = content(package)
    assert run("check", package) == 1
    assert run("apply", package, "--dry-run") == 0
    assert content(package) == pristine
    assert run("apply", package) == 0
    assert run("check", package) == 0
    assert {n: (package / n).read_text() for n in AFTER} == AFTER
    assert not (package / "srt/gone.py").exists()
    patched = content(package)
    assert run("apply", package) == 0
    assert "patched already" in capsys.readouterr().out
    assert content(package) == patched
    assert run("revert", package) == 0
    assert content(package) == pristine
    assert run("revert", package) == 0
    assert content(package) == pristine


@pytest.mark.parametrize("below", [".", "..", "../.."])
def test_target_is_the_package_or_the_folder_above(package, below):
    if below == "../..":  # a checkout
        (package.parents[1] / "python").symlink_to(package.parent)
    assert run("apply", package / below) == 0
    assert run("check", package) == 0


def test_target_installed(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    (package / "__init__.py").write_text("raise SystemExit('must not be imported')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    assert run("apply", "installed") == 0
    assert run("check", package) == 0


def test_drift_is_refused_with_file_and_hunk(package, capsys):
    (package / "srt/a.py").write_text("one\nzwei\nthree\n")
    (package / "srt/b.py").write_text("B\n")
    before = content(package)
    for action in ("apply", "revert", "check"):
        assert run(action, package) == 2
        error = capsys.readouterr().err
        assert "python/sglang/srt/a.py: 0001-first.patch: hunk 1 (@@ -1,3 +1,3 @@): line 2 is not as expected" in error
        assert "b.py" not in error
    assert content(package) == before


def test_drift_outside_the_hunks_is_refused(package, capsys):
    (package / "srt/a.py").write_text("one\ntwo\nthree\nmine\n")
    assert run("apply", package) == 2
    assert "srt/a.py: changed outside the lines that the series touches" in capsys.readouterr().err


def test_a_file_in_the_way_is_refused(package, capsys):
    (package / "test/new").mkdir(parents=True)
    (package / "test/new/t.py").write_text("mine\n")
    assert run("apply", package) == 2
    assert "test/new/t.py: 0002-second.patch: there is a file already" in capsys.readouterr().err
    assert (package / "test/new/t.py").read_text() == "mine\n"


def test_another_version_is_refused(package, capsys):
    (package / "_version.py").write_text("__version__ = version = '2.0'\n")
    (package / "srt/a.py").write_text("else\n")
    assert run("apply", package) == 2
    assert "no series for SGLang 2.0; there are 1.0" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_an_interrupted_run_is_completed_in_either_direction(package, action):
    pristine = content(package)
    run("apply", package)
    patched = content(package)
    (package / "srt/a.py").write_text(BEFORE["srt/a.py"])
    (package / "srt/gone.py").write_text(BEFORE["srt/gone.py"])
    assert run("check", package) == 1
    assert run(action, package) == 0
    assert content(package) == (patched if action == "apply" else pristine)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_write_that_fails_leaves_everything_as_it_was(package, monkeypatch, call, failing):
    """Whichever of the three new files cannot be written, or put in its place."""
    pristine = content(package)
    real, calls = getattr(os, call), []

    def fail(*args):
        calls.append(args)
        if len(calls) == failing:
            raise OSError("disk full")
        return real(*args)

    monkeypatch.setattr(tool.os, call, fail)
    assert run("apply", package) == 2
    assert content(package) == pristine


def test_a_hard_link_elsewhere_is_left_alone(package, tmp_path):
    """Package managers link files from a cache that other environments share."""
    cache = tmp_path / "cache"
    os.link(package / "srt/a.py", cache)
    os.chmod(package / "srt/a.py", 0o640)
    assert run("apply", package) == 0
    assert cache.read_text() == BEFORE["srt/a.py"]
    assert (package / "srt/a.py").stat().st_mode & 0o777 == 0o640


def test_compiled_files_of_added_modules_go_with_them(package):
    run("apply", package)
    (package / "test/new/__pycache__").mkdir()
    (package / "test/new/__pycache__/t.cpython-311.pyc").write_bytes(b"")
    assert run("revert", package) == 0
    assert not (package / "test").exists()


def test_a_series_that_leaves_the_package_is_refused(package, capsys):
    folder = tool.series_folder() / "1.0"
    manifest = json.loads((folder / "manifest.json").read_text())
    outside = FIRST.replace("python/sglang/srt/gone.py", "python/sglang/../gone.py")
    (folder / "0001-first.patch").write_text(outside)
    manifest["python/sglang/../gone.py"] = manifest.pop("python/sglang/srt/gone.py")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert run("apply", package) == 2
    assert "outside the package" in capsys.readouterr().err


def test_a_wrong_manifest_writes_nothing(package, capsys):
    path = tool.series_folder() / "1.0" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["python/sglang/srt/b.py"]["after"] = sha("something else")
    path.write_text(json.dumps(manifest))
    before = content(package)
    assert run("apply", package) == 2
    assert "srt/b.py: the patched content is not what manifest.json states" in capsys.readouterr().err
    assert content(package) == before


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_what_a_killed_run_has_left_goes_with_the_next(package, action):
    pristine = content(package)
    (package / "srt/.a.py.pd-guard-new").write_text("half of it")
    (package / "test/new").mkdir(parents=True)
    (package / "test/new/.t.py.pd-guard-new").write_text("")
    assert run(action, package) == 0
    assert not list(package.rglob("*.pd-guard-new"))
    assert run("revert", package) == 0
    assert content(package) == pristine


def test_one_run_at_a_time(package, capsys):
    with tool.Target(str(package)).locked():
        assert run("apply", package) == 2
    assert "another pd-guard patch is at work" in capsys.readouterr().err
    assert run("apply", package) == 0


def test_an_edit_meanwhile_is_not_lost(package, monkeypatch, capsys):
    edited, stage = BEFORE["srt/b.py"] + "an edit\n", tool._stage

    def stage_and_edit(path, *args):
        if path.name == "b.py":
            path.write_text(edited)
        return stage(path, *args)

    monkeypatch.setattr(tool, "_stage", stage_and_edit)
    assert run("apply", package) == 2
    assert "b.py was changed meanwhile" in capsys.readouterr().err
    assert {n: (package / n).read_text() for n in BEFORE} == BEFORE | {"srt/b.py": edited}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_stays(package):
    os.chown(package / "srt/a.py", 65534, 65534)
    assert run("apply", package) == 0 and run("revert", package) == 0
    assert (package / "srt/a.py").stat().st_uid == 65534


def test_a_symbolic_link_is_refused(package, tmp_path, capsys):
    shutil.move(package / "srt/b.py", tmp_path / "b.py")
    (package / "srt/b.py").symlink_to(tmp_path / "b.py")
    assert run("apply", package) == 2
    assert "b.py is a symbolic link" in capsys.readouterr().err


def test_no_compiled_file_outlives_its_source(package):
    compiled = package / "srt/__pycache__/a.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.write_text("")
    assert run("apply", package) == 0
    assert not compiled.exists()


def test_a_series_that_cannot_be_read_is_refused(package, capsys):
    (tool.series_folder() / "1.0/0001-first.patch").write_text("diff --git a/python/sglang/srt/a.py b/python/sglang/srt/a.py\n@@ nonsense\n")
    assert run("check", package) == 2
    assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("version", SHIPPED)
def test_shipped_series(version, tmp_path):
    """On the published files that it touches: applied, they are what the manifest says; taken off, every byte is back.

    tests/engine/test_patches.py does the same with whole packages.
    """
    if reason := why_missing(version):
        pytest.skip(reason)
    published, copy = overlay(version) / "sglang", tmp_path / "sglang"
    series = tool.Series.load(tool.series_folder() / version)
    files = {name.removeprefix("python/sglang/"): states for name, states in series.hashes.items()}
    for name, (before, _) in files.items():
        if before is not None:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(published / name, copy / name)
    pristine = content(copy)
    assert run("check", copy) == 1
    # The plugin reads the marker: it must never say too much.
    assert list(tool.change(tool.Target(str(copy)), series, reverse=False)[0])[-1].endswith("_pd_guard_patches.py")
    assert run("apply", copy) == 0
    assert next(iter(tool.change(tool.Target(str(copy)), series, reverse=True)[0])).endswith("_pd_guard_patches.py")
    assert run("check", copy) == 0
    found = {name: hashlib.sha256(data).hexdigest() for name, data in content(copy).items() if data is not None}
    assert found == {name: after for name, (_, after) in files.items() if after is not None}
    assert "srt/disaggregation/_pd_guard_patches.py" in found
    assert run("revert", copy) == 0
    assert content(copy) == pristine
