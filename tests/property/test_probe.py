"""The probe finds any other request's secret in any answer, and nothing where there is none."""

import itertools
import random
import string

from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_guard.cli.probe.prompts import LINES, Sizes, recall
from sglang_pd_guard.cli.probe.secrets import LENGTH, PARTIAL, Leak, Secrets, new_secret
from sglang_pd_guard.cli.probe.verdict import percentile

SEEDS = st.integers(0, 2**32)
#: Text that holds no run of letters.
NOISE = st.text(st.characters(categories=["N", "P", "Z", "Lo"]), max_size=40)


def cut(text, places):
    """The text in pieces, cut at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def secrets(seed, number=3):
    rng = random.Random(seed)
    known = Secrets()
    made = [new_secret(rng) for _ in range(number)]
    for owner, secret in enumerate(made):
        known.add(owner, secret)
    return known, made


@given(SEEDS, NOISE, NOISE, st.lists(st.integers(0, 500), max_size=20))
def test_another_requests_secret_is_found_however_it_is_streamed(seed, before, after, places):
    known, made = secrets(seed)
    pieces = cut(before + made[1] + after, places)
    (leak,) = known.scan(pieces, own=0)
    assert (leak.owner, leak.kind, leak.letters) == (1, "exact", LENGTH)
    assert leak.split == (not any(made[1] in piece for piece in pieces))


@given(SEEDS, NOISE, NOISE, st.integers(0, LENGTH), st.integers(0, LENGTH))
def test_a_part_is_found_from_twelve_letters_on(seed, before, after, start, length):
    known, made = secrets(seed)
    part = made[2][start : start + length]
    leaks = known.scan(before + part + after, own=0)
    assert [leak.owner for leak in leaks] == ([2] if len(part) >= PARTIAL else [])
    assert all(leak == Leak(2, "exact" if len(part) == LENGTH else "partial", len(part), False) for leak in leaks)


@given(SEEDS, st.sampled_from([str.upper, str.lower, str.swapcase]), st.sampled_from(["", " ", "-", "\n", ", "]))
def test_case_and_characters_between_do_not_hide_it(seed, change, between):
    known, made = secrets(seed)
    (leak,) = known.scan(between.join(change(made[1])), own=0)
    assert (leak.owner, leak.letters, leak.kind) == (1, LENGTH, "spaced" if between else "case-folded")


@given(SEEDS, NOISE)
def test_ones_own_secret_is_no_leak(seed, noise):
    known, made = secrets(seed)
    assert known.scan([noise, made[0], noise, made[0].lower()], own=0) == []
    assert [leak.owner for leak in known.scan(made[0])] == [0]


@given(SEEDS, st.text(string.ascii_letters + " \n", max_size=3000))
def test_text_without_a_secret_is_clean(seed, text):
    known, made = secrets(seed, 50)
    folded = "".join(c for c in text if c.isalpha()).lower()
    present = any(secret.lower()[i : i + PARTIAL] in folded for secret in made for i in range(LENGTH - PARTIAL + 1))
    assert bool(known.scan(text)) == present


@given(SEEDS, st.integers(0, 300))
def test_every_owner_in_an_answer_is_named_once(seed, places):
    known, made = secrets(seed, 4)
    answer = made[3][:20] + "1" + made[1] + made[3] + made[1][:15]
    found = known.scan(cut(answer, [places]), own=0)
    assert sorted((leak.owner, leak.letters) for leak in found) == [(1, LENGTH), (3, LENGTH)]


@given(SEEDS, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_secret_begins_256_characters_before_the_end(seed, lines, filler, dots):
    secret = new_secret(random.Random(seed))
    prompt = recall(secret, lines, filler, dots)
    assert prompt[-256:].startswith(secret)
    assert prompt.count(secret) == lines + LINES


@given(SEEDS, st.integers(600, 6000))
def test_sizes_are_exact_where_characters_are_tokens(seed, tokens):
    base = len(recall("a" * LENGTH))
    sizes = Sizes.measured(base, (20, base + 20 * (LENGTH + 1)), (100, base + 200), exact=True)
    secret = new_secret(random.Random(seed))
    assert len(sizes.victim(secret, tokens)) == len(sizes.oversize(secret, tokens)) == tokens
    victim = sizes.victim(secret, tokens)
    assert victim.count(secret) == LINES + (tokens - base) // (LENGTH + 1)
    # Whatever 64 characters of it are read after its head, they hold a part that is found.
    known = Secrets()
    known.add(0, secret)
    body = victim[victim.index(secret) :]
    assert all(known.scan(body[start : start + 64]) for start in range(0, len(body) - 64, 37))


@given(SEEDS, st.integers(400, 20_000))
def test_estimated_sizes_are_near(seed, tokens):
    """A tokenizer with 20 tokens a line and one a filler word."""
    sizes = Sizes(100, 20, 1, exact=False)
    prompt = sizes.oversize(new_secret(random.Random(seed)), tokens)
    assert 100 + 20 * 2 + prompt.count(" x") == tokens


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 1))
def test_percentile_is_a_value_that_this_share_does_not_exceed(values, share):
    found = percentile(values, share)
    assert found in values
    assert sum(v <= found for v in values) >= share * len(values)
    assert sum(v < found for v in values) < share * len(values)
