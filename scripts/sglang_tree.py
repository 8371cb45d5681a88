#!/usr/bin/env python3
"""Makes a git tree of a published SGLang wheel, the same commit everywhere: what ``patches/<version>`` apply to.

    scripts/sglang_tree.py 0.5.19 DIR             # DIR/python/sglang, as in SGLang's own repository
    scripts/sglang_tree.py 0.5.19 DIR --patched   # and the series on top, one commit per patch

The files come from the rig's environment (scripts/env.sh) where each of them has the hash that the wheel's RECORD
states, else from the wheel that ``pip download`` fetches. Author, date and message are fixed, so the commit's id is a
hash of the published files; it must be the one that the series was made on (``base-commit`` in its ``series`` file).
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "rig"))

from pd_rig.home import overlay

ROOT = Path(__file__).resolve().parents[1]

_IDENTITY = {
    "GIT_AUTHOR_NAME": "SGLang",
    "GIT_AUTHOR_EMAIL": "sglang@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "SGLang",
    "GIT_COMMITTER_EMAIL": "sglang@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+0000",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git_bytes(tree: Path, *words: str) -> bytes:
    """Runs git in `tree`, whatever the user's own configuration says."""
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.fileMode=false", *words]
    return subprocess.run(command, cwd=tree, check=True, env=os.environ | _IDENTITY, stdout=subprocess.PIPE).stdout


def git(tree: Path, *words: str) -> str:
    return git_bytes(tree, *words).decode()


def published(folder: Path, version: str) -> Iterator[tuple[str, bytes]]:
    """The files of the package ``sglang`` under `folder`, each checked against RECORD.

    Raises:
        ValueError: a file is missing or has another hash.
    """
    with open(folder / f"sglang-{version}.dist-info" / "RECORD", newline="") as record:
        for name, stated, _ in csv.reader(record):
            if not name.startswith("sglang/") or not stated:
                continue  # the metadata itself, and what pip compiled
            try:
                content = (folder / name).read_bytes()
            except FileNotFoundError:
                raise ValueError(f"{folder / name} is missing") from None
            found = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            if stated != f"sha256={found}":
                raise ValueError(f"{folder / name} is not as published")
            yield name, content


def files(version: str) -> list[tuple[str, bytes]]:
    """The files of the wheel, from the rig or from the package index."""
    if (overlay(version) / ".complete").exists():
        try:
            return list(published(overlay(version), version))
        except ValueError as error:
            print(f"the rig's SGLang cannot be used ({error}); fetching the wheel", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", folder, f"sglang=={version}"]
        subprocess.run(pip, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        return list(published(Path(folder), version))


def make(version: str, tree: Path) -> str:
    """Fills the new folder `tree` and returns the commit's id."""
    for name, content in files(version):
        path = tree / "python" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-f", "--all")
    git(tree, "commit", "-q", "-m", f"SGLang {version}, as published")
    return git(tree, "rev-parse", "HEAD").strip()


def apply_series(version: str, tree: Path) -> None:
    """``git am`` of the series; the subjects keep their ``[PD]``."""
    folder = ROOT / "patches" / version
    names = [line for line in (folder / "series").read_text().splitlines() if line and not line.startswith("#")]
    git(tree, "am", "-q", "--keep-non-patch", "--committer-date-is-author-date", *(str(folder / name) for name in names))


def base_commit(version: str) -> str | None:
    """The id that the series states; None where there is none yet."""
    series = ROOT / "patches" / version / "series"
    if not series.exists():
        return None
    return next(line.split()[-1] for line in series.read_text().splitlines() if line.startswith("# base-commit:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("dir", type=Path, help="a folder that does not exist or is empty")
    parser.add_argument("--patched", action="store_true", help="apply patches/<version> on top")
    args = parser.parse_args()
    if args.dir.exists() and any(args.dir.iterdir()):
        parser.error(f"{args.dir} is not empty")
    args.dir.mkdir(parents=True, exist_ok=True)
    commit = make(args.version, args.dir)
    expected = base_commit(args.version)
    if expected not in (None, commit):
        raise SystemExit(f"SGLang {args.version}: the tree is commit {commit}, the series was made on {expected}")
    if args.patched:
        apply_series(args.version, args.dir)
    print(git(args.dir, "rev-parse", "HEAD").strip())


if __name__ == "__main__":
    main()
