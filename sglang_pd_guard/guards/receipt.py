"""Receipt: prefill states what it transferred, decode compares it with what it reserved.

The row of SGLang's metadata that carries the bootstrap room has eight 64-bit words, of which SGLang uses the
first. The receipt fills the other seven, so it travels with the request's own metadata on every transfer
backend, in the same write as the room:

    0 room (SGLang's)   1 magic and version   2 tokens   3 prefix (low half) and pages   4 nonce   5 prompt hash
    6 checksum of the KV   7 check word

SGLang with our patches states words 2 and 5 itself, after the guard and in the same way; alone they are no receipt.

Every word is below 2**63, since the row is signed on some devices.

Pure: nothing here imports SGLang.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Sequence

SLOTS = 8
MAGIC = int.from_bytes(b"PDRCPT\x00\x03")  # the last byte is the layout's version
_HALF = 32
_BITS, _WORD = (1 << 63) - 1, (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What was transferred (from prefill), or what must have been (on decode).

    Args:
        tokens: of the prompt, those that decode already held included.
        pages: KV pages handed to the transfer; None on decode where its pages are not of prefill's size.
        prefix: tokens at the prompt's start that decode said it holds already, and which were not transferred.
        prompt: `digest` of the prompt.
        nonce: names this use of the bootstrap room; decode chose it.
        checksum: of the KV that this rank transferred, or 0. `verify` does not compare it, since it costs something to compute.
    """

    tokens: int
    pages: int | None
    prefix: int
    prompt: int
    nonce: int
    checksum: int = 0

    def words(self, room: int) -> list[int]:
        """Words 1 to 7 of the row whose word 0 is `room`."""
        body = [MAGIC, self.tokens, self.prefix | self.pages << _HALF, self.nonce, self.prompt, self.checksum]
        return [*body, _check_word([room, *body])]


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Why a transfer is not believed: the rule, and the two numbers that should be equal."""

    rule: str
    expected: int
    found: int


def digest(token_ids: Iterable[int]) -> int:
    """A 63-bit hash of a prompt's token ids."""
    return _hash(array("q", token_ids).tobytes())


def read(row: Sequence[int], room: int) -> Receipt | Mismatch:
    """The receipt in the metadata row of the request in `room`, or why it holds none: ``room``, ``absent`` or ``damaged``."""
    row = [int(word) & _WORD for word in row]
    if row[0] != room:
        return Mismatch("room", room, row[0])
    if not any((row[1], *row[3:5], *row[6:])):
        return Mismatch("absent", MAGIC, 0)
    magic, check = row[1], row[-1]
    if magic != MAGIC:
        return Mismatch("damaged", MAGIC, magic)
    if check != _check_word(row[:-1]):
        return Mismatch("damaged", _check_word(row[:-1]), check)
    tokens, counts, nonce, prompt, checksum = row[2:-1]
    return Receipt(tokens, counts >> _HALF, counts & (1 << _HALF) - 1, prompt, nonce, checksum)


def verify(row: Sequence[int], room: int, expected: Receipt) -> Mismatch | None:
    """Whether the metadata row of the request in `room` says that exactly what was expected has been transferred.

    Returns:
        The first rule that is broken: ``room``, ``absent``, ``damaged``, ``tokens``, ``prefix``, ``pages``, ``prompt``
        or ``nonce``; None where there is none.
    """
    found = read(row, room)
    if isinstance(found, Mismatch):
        return found
    for rule in ("tokens", "prefix", "pages"):
        want, got = getattr(expected, rule), getattr(found, rule)
        if want is not None and want != got:
            return Mismatch(rule, want, got)
    if expected.prompt != found.prompt:
        return Mismatch("prompt", expected.tokens, found.tokens)  # no log line holds a hash of a prompt
    if expected.nonce != found.nonce:
        return Mismatch("nonce", expected.nonce, found.nonce)
    return None


def _check_word(words: Sequence[int]) -> int:
    return _hash(b"".join(word.to_bytes(8, "big") for word in words)) | 1  # a row of zeros never passes


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) & _BITS
