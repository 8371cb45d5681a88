"""The receipt is believed exactly where every word of it is what decode expects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_pd_guard.guards.receipt import SLOTS, Receipt, digest, read, verify

COUNT = st.integers(0, 2**31 - 1)
WORD = st.integers(0, 2**63 - 1)
ROOM = st.integers(1, 2**63 - 1)
RECEIPTS = st.builds(Receipt, tokens=COUNT, pages=COUNT, prefix=COUNT, prompt=WORD, nonce=WORD, checksum=WORD)


@given(RECEIPTS, ROOM)
def test_what_was_expected_is_believed(receipt, room):
    row = [room, *receipt.words(room)]
    assert len(row) == SLOTS
    assert all(0 <= word < 2**63 for word in row)
    assert verify(row, room, receipt) is None
    assert read(row, room) == receipt


@given(RECEIPTS, ROOM, st.integers(0, SLOTS - 1), st.integers(0, 63))
def test_a_flipped_bit_is_never_believed(receipt, room, slot, bit):
    row = [room, *receipt.words(room)]
    row[slot] ^= 1 << bit
    assert verify(row, room, receipt).rule == ("room" if slot == 0 else "damaged")
    # As a signed device gives it back.
    signed = [word - 2**64 if word >= 2**63 else word for word in row]
    assert verify(signed, room, receipt) is not None


@given(RECEIPTS, RECEIPTS, ROOM)
def test_another_requests_receipt_is_refused_by_the_first_difference(mine, other, room):
    mismatch = verify([room, *other.words(room)], room, mine)
    rules = [r for r in ("tokens", "prefix", "pages", "prompt", "nonce") if getattr(mine, r) != getattr(other, r)]
    assert (mismatch and mismatch.rule) == (rules[0] if rules else None)
    if mismatch and mismatch.rule != "prompt":
        assert (mismatch.expected, mismatch.found) == (getattr(mine, mismatch.rule), getattr(other, mismatch.rule))


@given(RECEIPTS, ROOM, ROOM)
def test_a_receipt_belongs_to_its_room(receipt, room, other):
    row = [other, *receipt.words(room)]
    assert (verify(row, other, receipt) is None) == (room == other)


@given(RECEIPTS, ROOM)
def test_no_receipt_is_absent(receipt, room):
    assert verify([room] + [0] * 7, room, receipt).rule == "absent"


@given(RECEIPTS, ROOM)
def test_what_a_patched_prefill_states_alone_is_no_receipt(receipt, room):
    assert verify([room, 0, receipt.tokens, 0, 0, receipt.prompt, 0, 0], room, receipt).rule == "absent"


@given(RECEIPTS, ROOM)
def test_a_patched_prefill_states_its_two_words_over_the_receipt_s(receipt, room):
    row = [room, *receipt.words(room)]
    row[2], row[5] = receipt.tokens, receipt.prompt
    assert verify(row, room, receipt) is None


def test_pages_that_cannot_be_compared_are_not():
    receipt = Receipt(10, 3, 0, 5, 7)
    assert verify([1, *receipt.words(1)], 1, Receipt(10, None, 0, 5, 7)) is None


@given(st.lists(st.integers(0, 2**31), max_size=50), st.lists(st.integers(0, 2**31), max_size=50))
def test_prompts_and_their_digests_are_equal_together(a, b):
    assert (digest(a) == digest(b)) == (a == b)
    assert digest(tuple(a)) == digest(a) < 2**63


def test_no_number_of_a_prompt_mismatch_is_its_digest():
    receipt = Receipt(10, 3, 0, 5, 7)
    mismatch = verify([1, *receipt.words(1)], 1, Receipt(10, 3, 0, 6, 7))
    assert (mismatch.rule, mismatch.expected, mismatch.found) == ("prompt", 10, 10)


@pytest.mark.parametrize("pages", [0, 1])
def test_a_transfer_of_no_pages_has_a_receipt(pages):
    receipt = Receipt(64, pages, 64 * (1 - pages), 5, 7)
    assert verify([9, *receipt.words(9)], 9, receipt) is None
