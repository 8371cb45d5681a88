"""``pd-guard patch``: puts a patch series on an SGLang, takes it off again, or says whether it is there.

A series is ``patches/<version>``: the patches that its file ``series`` lists, and ``manifest.json`` with each file's hash
before and after. Every file is judged by those two hashes, so a target is pristine, patched, half done (a run that
was interrupted; either direction completes it) or drifted, and a drifted one is never written to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from sglang_pd_guard.cli.unified_diff import FileDiff, PatchError, apply, parse, touched

#: The series name files as SGLang's repository does.
_PREFIX = "python/sglang/"
#: What the plugin reads to know which patches are there: written last and taken off first, so that it never says too much.
_MARKER = "_pd_guard_patches.py"
_STAGED = ".pd-guard-new"

PRISTINE, PATCHED, HALF_DONE, DRIFTED = "not patched", "patched", "half patched", "drifted"


class Refused(Exception):
    """The message says why, and in which state the files are if they were touched."""


@dataclasses.dataclass(frozen=True)
class Series:
    """The patches for one SGLang version.

    Args:
        patches: name of the patch file -> its diffs, in order.
        hashes: path -> the file's sha256 before and after; None stands for no file.
    """

    version: str
    patches: dict[str, list[FileDiff]]
    hashes: dict[str, tuple[str | None, str | None]]

    @classmethod
    def load(cls, folder: Path) -> Series:
        names = [n for n in (folder / "series").read_text().splitlines() if n and not n.startswith("#")]
        patches = {name: parse((folder / name).read_bytes()) for name in names}
        manifest = json.loads((folder / "manifest.json").read_text())
        hashes = {path: (entry["before"], entry["after"]) for path, entry in manifest.items()}
        if set(hashes) != set(touched(list(patches.values()))):
            raise Refused(f"{folder}: manifest.json and the patches name different files")
        return cls(folder.name, patches, hashes)

    def transform(self, path: str, content: bytes | None, reverse: bool = False) -> bytes | None:
        """The file's content with the series applied, or taken off.

        Raises:
            PatchError: naming the patch and the hunk that does not fit.
        """
        steps = [(name, diff) for name, diffs in self.patches.items() for diff in diffs if diff.path == path]
        for name, diff in reversed(steps) if reverse else steps:
            try:
                content = apply(content, diff.reversed() if reverse else diff)
            except PatchError as error:
                raise PatchError(f"{name}: {error}") from None
        return content


class Target:
    """The folder of an SGLang package.

    Args:
        where: ``installed``, or a folder that is, or has in it, the package ``sglang``.
    """

    def __init__(self, where: str):
        self.package = _package(where)

    def path(self, name: str) -> Path:
        relative = Path(name.removeprefix(_PREFIX))
        if not name.startswith(_PREFIX) or ".." in relative.parts:
            raise Refused(f"the series names a file outside the package: {name}")
        if (self.package / relative).is_symlink():
            raise Refused(f"{self.package / relative} is a symbolic link: name the folder that it leads to")
        return self.package / relative

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time."""
        folder = os.open(self.package, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Refused(f"another pd-guard patch is at work in {self.package}") from None
        finally:
            os.close(folder)

    def sweep(self, series: Series) -> None:
        """Removes what a run that was killed has left beside the files."""
        folders = {self.path(name).parent for name in series.hashes}
        for folder in folders:
            for left in folder.glob(f".*{_STAGED}"):
                left.unlink()
        self._remove_empty([folder for folder in folders if folder.is_dir()])

    def read(self, name: str) -> bytes | None:
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError:
            return None

    def state(self, series: Series) -> tuple[str, list[str]]:
        """What is there of a series; with it the files that are in neither state."""
        seen, drifted = set(), []
        for name, (before, after) in series.hashes.items():
            found = _hash(self.read(name))
            if found == before:
                seen.add(PRISTINE)
            elif found == after:
                seen.add(PATCHED)
            else:
                drifted.append(name)
        if drifted:
            return DRIFTED, drifted
        return (HALF_DONE if len(seen) > 1 else seen.pop()), []

    def write(self, changes: dict[str, bytes | None], old: dict[str, bytes | None]) -> None:
        """All files or none: new contents are written beside the old ones first; the swaps are undone if one fails.

        Args:
            changes: name -> content; None for no file.
            old: what the contents were made from. A file that has changed since is not overwritten.
        """
        staged: dict[str, Path | None] = {}
        made: list[Path] = []
        swapped: list[str] = []
        try:
            for name, content in changes.items():
                made += _missing_folders(self.path(name).parent)
                staged[name] = None if content is None else _stage(self.path(name), content)
            for name, temporary in staged.items():
                if self.read(name) != old[name]:
                    raise Refused(f"{self.path(name)} was changed meanwhile")
                if temporary is None:
                    self.path(name).unlink(missing_ok=True)
                else:
                    os.replace(temporary, self.path(name))
                swapped.append(name)
        except BaseException:
            for temporary in filter(None, staged.values()):
                temporary.unlink(missing_ok=True)
            for name in swapped:
                self._restore(name, old[name])
            self._remove_empty(made)
            raise
        for name in changes:
            _forget_compiled(self.path(name))
        self._remove_empty([self.path(name).parent for name, content in changes.items() if content is None])

    def _restore(self, name: str, content: bytes | None) -> None:
        if content is None:
            self.path(name).unlink(missing_ok=True)
        else:
            os.replace(_stage(self.path(name), content), self.path(name))

    def _remove_empty(self, folders: list[Path]) -> None:
        for folder in sorted(set(folders), key=lambda f: len(f.parts), reverse=True):
            while folder != self.package:
                with contextlib.suppress(OSError):
                    (folder / "__pycache__").rmdir()
                try:
                    folder.rmdir()
                except OSError:
                    break
                folder = folder.parent


def series_folder() -> Path:
    """``patches`` beside this package in a clone, or inside it where it is installed."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "patches", package.parent / "patches"):
        if any(folder.glob("*/series")):
            return folder
    raise Refused("no patch series found; run this from a clone of the repository")


def all_series() -> list[Series]:
    return [Series.load(path.parent) for path in sorted(series_folder().glob("*/series"))]


def choose(target: Target, version: str | None) -> tuple[Series, str]:
    """The series that fits the target, and what is there of it.

    Raises:
        Refused: none fits; where the version is known, with the files and hunks that do not.
    """
    found = _version_of(target.package) if version is None else version
    candidates = [s for s in all_series() if version in (None, s.version)]
    fitting = [(s, state) for s in candidates if (state := target.state(s)[0]) != DRIFTED]
    if fitting:
        return fitting[0]
    series = next((s for s in candidates if s.version == found), None)
    if found is None:  # the one that most files fit
        series = min(candidates, key=lambda s: len(target.state(s)[1]) / len(s.hashes), default=None)
    if series is None:
        known = ", ".join(s.version for s in all_series())
        raise Refused(f"{target.package}: no series for SGLang {found or '(version unknown)'}; there are {known}")
    _, drifted = target.state(series)
    lines = [f"{target.package}: not SGLang {series.version} as published, nor as patched:"]
    lines += [f"  {name}: {_drift(series, name, target.read(name))}" for name in drifted]
    raise Refused("\n".join(lines))


def change(target: Target, series: Series, reverse: bool) -> tuple[dict[str, bytes | None], dict[str, bytes | None]]:
    """The new contents of the files that have to change, each verified against the manifest, and the old ones."""
    changes, old = {}, {}
    for name, (before, after) in sorted(series.hashes.items(), key=lambda item: item[0].endswith(_MARKER) != reverse):
        goal = before if reverse else after
        content = target.read(name)
        if _hash(content) == goal:
            continue
        new = series.transform(name, content, reverse)
        if _hash(new) != goal:
            raise Refused(f"{name}: the patched content is not what manifest.json states")
        changes[name], old[name] = new, content
    return changes, old


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit status: 0 done, or patched; 1 (check) not or half patched; 2 refused: the message says why"
    parser.add_argument("action", choices=("apply", "check", "revert"))
    parser.add_argument(
        "--target",
        required=True,
        metavar="DIR|installed",
        help="installed: the SGLang of this Python environment. DIR: a checkout, a site-packages folder or the package itself.",
    )
    parser.add_argument("--version", help="the series to use; by default the one whose files fit")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, write nothing")


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except (Refused, PatchError, OSError) as error:
        print(f"pd-guard patch: refused: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    target = Target(args.target)
    series, state = choose(target, args.version)
    about = f"SGLang {series.version} in {target.package}"
    if args.action == "check":
        print(f"{about}: {state} ({len(series.patches)} patches, {len(series.hashes)} files)")
        return 0 if state == PATCHED else 1
    reverse = args.action == "revert"
    goal = PRISTINE if reverse else PATCHED
    if args.dry_run:
        changes, _ = change(target, series, reverse)
        for name, content in changes.items():
            print(f"would {'delete' if content is None else 'write'} {target.path(name)}")
    else:
        with target.locked():
            target.sweep(series)
            changes, old = change(target, series, reverse)
            target.write(changes, old)
            state, drifted = target.state(series)
        if state != goal:
            raise Refused(f"{about}: {state} after writing: {', '.join(drifted)}")
    if not changes or not args.dry_run:
        print(f"{about}: {goal} {f'now ({len(changes)} files)' if changes else 'already'}")
    return 0


def _package(where: str) -> Path:
    if where == "installed":
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise Refused("no sglang in this Python environment")
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    folder = Path(where)
    for package in (folder / "python" / "sglang", folder / "sglang", folder):
        if (package / "srt").is_dir():
            return package.resolve()
    raise Refused(f"{where}: there is no package sglang here")


def _version_of(package: Path) -> str | None:
    with contextlib.suppress(OSError):
        for line in (package / "_version.py").read_text().splitlines():
            if line.startswith(("__version__ = ", "version = ")):
                return line.split("=")[-1].strip().strip("'\"")
    return None


def _drift(series: Series, name: str, content: bytes | None) -> str:
    for reverse in (False, True):
        try:
            series.transform(name, content, reverse)
        except PatchError as error:
            if not reverse:
                why = str(error)
        else:
            return "changed outside the lines that the series touches"
    return why


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _stage(path: Path, content: bytes) -> Path:
    """Writes `content` beside `path`, with its mode and owner (a new file: those of its folder); a rename then replaces a hard link,
    never what it points to.
    """
    staged = path.with_name(f".{path.name}{_STAGED}")
    like, mode = (path.stat(), path.stat().st_mode & 0o777) if path.exists() else (path.parent.stat(), 0o644)
    try:
        with open(staged, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):  # only root may
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fchmod(file.fileno(), mode)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


def _missing_folders(folder: Path) -> list[Path]:
    """Makes `folder`; returns those that were not there."""
    missing = list(_absent(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _absent(folder: Path) -> Iterator[Path]:
    while not folder.exists():
        yield folder
        folder = folder.parent


def _forget_compiled(path: Path) -> None:
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
