#!/usr/bin/env python3
"""Writes ``patches/<version>`` from a tree made by ``sglang_tree.py`` with one commit per patch on top of it.

    scripts/patch_series.py 0.5.19 DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sglang_tree import ROOT, git, git_bytes


def _hash(tree: Path, commit: str, path: str) -> str | None:
    if not git(tree, "ls-tree", commit, "--", path):
        return None
    return hashlib.sha256(git_bytes(tree, "show", f"{commit}:{path}")).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("dir", type=Path)
    args = parser.parse_args()
    folder = ROOT / "patches" / args.version
    folder.mkdir(parents=True, exist_ok=True)
    base = git(args.dir, "rev-list", "--max-parents=0", "HEAD").strip()
    for old in folder.glob("*.patch"):
        old.unlink()
    options = ["--zero-commit", "--no-signature", "--no-renames", "-N", "-q", "-o", str(folder)]
    git(args.dir, "format-patch", *options, f"{base}..HEAD")
    names = sorted(path.name for path in folder.glob("*.patch"))
    (folder / "series").write_text(f"# base-commit: {base}\n" + "".join(f"{name}\n" for name in names))
    paths = git(args.dir, "diff", "--no-renames", "--name-only", base, "HEAD").split()
    manifest = {p: {"before": _hash(args.dir, base, p), "after": _hash(args.dir, "HEAD", p)} for p in paths}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
