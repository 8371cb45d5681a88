"""A secret for every request, and the search for other requests' secrets in an answer.

Pure.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Iterator, Sequence
from typing import Literal

#: Letters of a secret.
LENGTH = 32
#: So many of them in a row are no coincidence.
PARTIAL = 12

Kind = Literal["exact", "case-folded", "spaced", "partial"]


def new_secret(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters, k=LENGTH))


@dataclasses.dataclass(frozen=True)
class Leak:
    """Another request's secret in an answer.

    Args:
        owner: whose it is.
        kind: ``exact``; ``case-folded``; ``spaced``: with other characters between its letters; ``partial``: some of it.
        letters: how many of its letters, in a row.
        split: no single piece of the streamed answer holds them all.
    """

    owner: int
    kind: Kind
    letters: int
    split: bool


class Secrets:
    """All secrets of a run, by owner. Finds them in time that grows with the answer, not with their number."""

    def __init__(self) -> None:
        self._secrets: dict[int, str] = {}
        self._grams: dict[str, list[tuple[int, int]]] = {}

    def add(self, owner: int, secret: str) -> None:
        """Raises:
        ValueError: it is too short, or no plain letters.
        """
        if len(secret) < PARTIAL or not (secret.isascii() and secret.isalpha()):
            raise ValueError("a secret is at least 12 ASCII letters")
        self._secrets[owner] = secret
        folded = secret.lower()
        for i in range(len(folded) - PARTIAL + 1):
            self._grams.setdefault(folded[i : i + PARTIAL], []).append((owner, i))

    def scan(self, pieces: str | Sequence[str], own: int | None = None) -> list[Leak]:
        """Other requests' secrets in an answer, one leak for each owner: the longest run of its letters.

        Args:
            pieces: the answer, or the pieces in which it was streamed.
            own: whose answer it is.
        """
        pieces = [pieces] if isinstance(pieces, str) else list(pieces)
        longest: dict[int, tuple[int, int]] = {}  # owner -> (letters, where in the answer's letters)
        letters = _letters("".join(pieces))
        for owner, length, start in self._runs(letters):
            if owner != own and length > longest.get(owner, (0, 0))[0]:
                longest[owner] = (length, start)
        return [self._leak(owner, letters[start : start + length], pieces) for owner, (length, start) in longest.items()]

    def _runs(self, text: str) -> Iterator[tuple[int, int, int]]:
        for start in range(len(text) - PARTIAL + 1):
            for owner, at in self._grams.get(text[start : start + PARTIAL], ()):
                secret, length = self._secrets[owner].lower(), PARTIAL
                while at + length < len(secret) and start + length < len(text) and secret[at + length] == text[start + length]:
                    length += 1
                yield owner, length, start

    def _leak(self, owner: int, run: str, pieces: Sequence[str]) -> Leak:
        secret, answer = self._secrets[owner], "".join(pieces)
        if len(run) < len(secret):
            kind: Kind = "partial"
        elif secret in answer:
            kind = "exact"
        elif secret.lower() in answer.lower():
            kind = "case-folded"
        else:
            kind = "spaced"
        return Leak(owner, kind, len(run), not any(run in _letters(piece) for piece in pieces))


def _letters(text: str) -> str:
    """Its ASCII letters, in lower case."""
    return "".join(c for c in text if c.isascii() and c.isalpha()).lower()
