"""The strict applier: what git says a patch does, it does; to anything else it does nothing."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_guard.cli.unified_diff import PatchError, apply, parse

#: Few different lines, so that hunks would fit in more than one place; marks of the format among them.
LINE = st.sampled_from([b"", b"a", b"b", b"-", b"+", b" x", b"@@ -1 +1 @@", b"diff --git a/f b/f", b"\\ No", b"\r", b"\xff"])


@st.composite
def texts(draw):
    lines = draw(st.lists(LINE, max_size=40))
    text = b"".join(line + b"\n" for line in lines)
    return text[:-1] if lines and lines[-1] and draw(st.booleans()) else text


@st.composite
def edits(draw):
    """A text and an edited one: a few lines replaced, added or left out."""
    before = draw(texts())
    lines = before.split(b"\n")
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(lines)))
        lines[at : at + draw(st.integers(0, 3))] = draw(st.lists(LINE, max_size=3))
    return before, b"\n".join(lines)


def lines_of(text: bytes) -> list[bytes]:
    return [line + b"\n" for line in text.split(b"\n")[:-1]] + [last for last in text.split(b"\n")[-1:] if last]


def git_diff(before: bytes, after: bytes) -> bytes:
    """As ``git diff`` writes it."""
    out = [b"diff --git a/f b/f\n", b"index 1..2 100644\n"]
    diff = difflib.diff_bytes(difflib.unified_diff, lines_of(before), lines_of(after), b"a/f", b"b/f", lineterm=b"\n")
    for line in diff:
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


def one(patch: bytes):
    (diff,) = parse(patch)
    return diff


@given(edits())
def test_applies_and_reverts_exactly(pair):
    before, after = pair
    diff = one(b"From 0 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] x\n\n---\n f | 2 +-\n\n" + git_diff(before, after))
    assert apply(before, diff) == after
    assert apply(after, diff.reversed()) == before


@given(edits(), texts())
def test_another_text_is_refused_or_differs_only_elsewhere(pair, other):
    """Where it applies, every line that the patch names was there, at its place; so reverting brings the other text back."""
    diff = one(git_diff(*pair))
    try:
        result = apply(other, diff)
    except PatchError as error:
        assert "hunk" in str(error)
    else:
        assert apply(result, diff.reversed()) == other


@given(edits(), st.data())
def test_one_changed_line_in_a_hunk_is_refused_by_that_hunk(pair, data):
    before, after = pair
    diff = one(git_diff(before, after))
    hunks = [(number, hunk) for number, hunk in enumerate(diff.hunks, 1) if hunk.before]
    if not hunks:
        return
    number, hunk = data.draw(st.sampled_from(hunks))
    at = hunk.before_start - 1 + data.draw(st.integers(0, len(hunk.before) - 1))
    lines = lines_of(before)
    lines[at] = b"changed\n"
    with pytest.raises(PatchError, match=rf"hunk {number} \(.*line {at + 1} "):
        apply(b"".join(lines), diff)


@given(edits())
def test_a_shifted_text_is_refused(pair):
    """No offsets: a hunk must fit at the very line."""
    before, after = pair
    if b"unlike" in before or before == after:
        return
    diff = one(git_diff(before, after))
    if any(hunk.before for hunk in diff.hunks):
        with pytest.raises(PatchError):
            apply(b"".join(b"unlike %d\n" % i for i in range(80)) + before, diff)


@given(texts())
def test_created_and_deleted_files(content):
    count = len(lines_of(content))
    body = git_diff(b"", content).split(b"\n", 2)[2].replace(b"--- a/f", b"--- /dev/null")
    diff = one(b"diff --git a/f b/f\nnew file mode 100644\nindex 0..1\n" + body)
    assert diff.path == "f"
    assert apply(None, diff) == content
    assert apply(content, diff.reversed()) is None
    with pytest.raises(PatchError, match="already"):
        apply(b"", diff)
    with pytest.raises(PatchError, match="missing"):
        apply(None, diff.reversed())
    if count:
        with pytest.raises(PatchError, match=r"does not delete|not as expected|goes on"):
            apply(content + b"\nmore\n", diff.reversed())


@given(edits(), st.integers(1, 3))
def test_a_patch_that_was_cut_off_is_refused(pair, cut):
    """Inside a hunk, that is; a whole one that is missing shows in the file's hash."""
    lines = git_diff(*pair).split(b"\n")[:-1]
    headers = [i for i, line in enumerate(lines) if line.startswith(b"@@ -")]
    if headers and len(lines) - cut > headers[-1] and not lines[-1].startswith(b"\\"):
        with pytest.raises(PatchError):
            parse(b"\n".join(lines[:-cut]) + b"\n")


@pytest.mark.parametrize(
    "line", [b"rename from f", b"copy from f", b"old mode 100644", b"Binary files a/f and b/f differ", b"GIT binary patch"]
)
def test_what_is_not_supported_is_refused(line):
    with pytest.raises(PatchError, match="not supported"):
        parse(b"diff --git a/f b/f\n" + line + b"\n")
