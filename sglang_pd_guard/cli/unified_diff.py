"""Applies and reverts a git patch strictly: each hunk at the very line it names, each line as it states.

Pure: bytes in, bytes out. No fuzz, no offsets, no renames, no binary files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


class PatchError(ValueError):
    """The patch is malformed, or the file is not what it was made for; the message names the hunk."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """One hunk: from line `start` (1 is the first) on, `before` becomes `after`. Lines keep their ends."""

    header: str
    before_start: int
    after_start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.header, self.after_start, self.before_start, self.after, self.before)


@dataclasses.dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file. ``created``: there is none before; ``deleted``: none after."""

    path: str
    hunks: tuple[Hunk, ...]
    created: bool = False
    deleted: bool = False

    def reversed(self) -> FileDiff:
        hunks = tuple(hunk.reversed() for hunk in self.hunks)
        return FileDiff(self.path, hunks, created=self.deleted, deleted=self.created)


def parse(patch: bytes) -> list[FileDiff]:
    """The files of a patch as ``git format-patch`` writes it.

    Raises:
        PatchError: it is malformed, or does something that is not supported.
    """
    lines = patch.split(b"\n")
    diffs = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith(b"diff --git "):
            at += 1
            continue
        diff, at = _parse_file(lines, at)
        diffs.append(diff)
    return diffs


def apply(content: bytes | None, diff: FileDiff) -> bytes | None:
    """The file's new content; None stands for no file.

    Raises:
        PatchError: the content is not what the diff was made for.
    """
    if diff.created != (content is None):
        raise PatchError("there is a file already" if diff.created else "the file is missing")
    lines = _lines(content or b"")
    out: list[bytes] = []
    done = 0
    for number, hunk in enumerate(diff.hunks, 1):
        # A hunk that only adds names the line before.
        start = hunk.before_start - 1 if hunk.before else hunk.before_start
        where = f"hunk {number} ({hunk.header})"
        if start < done:
            raise PatchError(f"{where} overlaps the one before")
        for i, line in enumerate(hunk.before, start):
            if i >= len(lines) or lines[i] != line:
                raise PatchError(f"{where}: line {i + 1} is not as expected")
        if start > len(lines):
            raise PatchError(f"{where}: the file ends at line {len(lines)}")
        out += lines[done:start]
        out += hunk.after
        done = start + len(hunk.before)
    out += lines[done:]
    if not all(line.endswith(b"\n") for line in out[:-1]):
        raise PatchError("a hunk has the file's last line where the file goes on")
    if diff.deleted:
        if out:
            raise PatchError("the file has lines that the patch does not delete")
        return None
    return b"".join(out)


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    ended = [line + b"\n" for line in lines[:-1]]
    return [*ended, lines[-1]] if lines[-1] else ended


def _parse_file(lines: list[bytes], at: int) -> tuple[FileDiff, int]:
    title = lines[at].decode()
    created = deleted = False
    old = new = None
    at += 1
    while at < len(lines) and not lines[at].startswith((b"@@ ", b"diff --git ")):
        line = lines[at]
        if line.startswith((b"rename ", b"copy ", b"old mode ", b"Binary files ", b"GIT binary ")):
            raise PatchError(f"{title}: not supported: {line.decode(errors='replace')}")
        created |= line.startswith(b"new file mode ")
        deleted |= line.startswith(b"deleted file mode ")
        if line.startswith(b"--- "):
            old = line[4:].decode()
        elif line.startswith(b"+++ "):
            new = line[4:].decode()
        at += 1
    hunks = []
    while at < len(lines) and lines[at].startswith(b"@@ "):
        hunk, at = _parse_hunk(lines, at)
        hunks.append(hunk)
    path = old if deleted else new
    if path is None:  # an empty file
        path = title.rsplit(" b/", 1)[-1]
    elif not path.startswith(("a/", "b/")):
        raise PatchError(f"{title}: no such path: {path}")
    else:
        path = path[2:]
    return FileDiff(path, tuple(hunks), created, deleted), at


def _parse_hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if match is None:
        raise PatchError(f"malformed hunk: {lines[at].decode(errors='replace')}")
    header = match.group(0).decode()
    before_start, before_count, after_start, after_count = (
        1 if group is None else int(group) for group in match.groups()
    )
    before: list[bytes] = []
    after: list[bytes] = []
    last: list[list[bytes]] = []
    at += 1
    while len(before) < before_count or len(after) < after_count or lines[at : at + 1] == [_NO_NEWLINE]:
        if at >= len(lines):
            raise PatchError(f"{header}: the patch ends too early")
        line = lines[at]
        at += 1
        if line == _NO_NEWLINE:
            for side in last:
                side[-1] = side[-1][:-1]
            continue
        last = [side for side, marks in ((before, b" -"), (after, b" +")) if line[:1] and line[:1] in marks]
        if not last:
            raise PatchError(f"{header}: malformed line {line[:1]!r}")
        for side in last:
            side.append(line[1:] + b"\n")
    if len(before) != before_count or len(after) != after_count:
        raise PatchError(f"{header}: other line counts than stated")
    return Hunk(header, before_start, after_start, tuple(before), tuple(after)), at


def touched(patches: list[list[FileDiff]]) -> Iterator[str]:
    """Each path that a series touches, once, in order."""
    yield from dict.fromkeys(diff.path for patch in patches for diff in patch)
