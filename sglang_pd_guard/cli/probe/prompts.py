"""Prompts with one right answer: the secret that stands in them again and again.

A line begins 256 characters before the end, so that a model which copies what stood 256 characters earlier (the echo model of this
repository's tests) answers with the secret, as a model does that follows the instruction. And nearly all of a prompt is its secret, so
that hardly any part of its KV can be read without one.

Pure.
"""

from __future__ import annotations

import dataclasses

from sglang_pd_guard.cli.probe.secrets import LENGTH

_HEAD = (
    "Someone's notes. Their code stands on every line. Which code is it? Answer with the code alone, letter by letter, upper and lower case "
    "as in the notes, and with nothing else: no explanation, no quotes.\n"
)
_END = "Now answer with the code:"
_FILLER = " x"

#: Lines of the secret in every prompt.
LINES = (256 - len(_END)) // (LENGTH + 1)


def recall(secret: str, lines: int = 0, filler: int = 0, dots: int = 0) -> str:
    """A prompt whose answer is `secret`: `dots`, `filler` words, the question, and the secret on `lines` more lines than `LINES`."""
    return "." * dots + _FILLER * filler + _HEAD + (secret + "\n") * (lines + LINES) + _END


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How many tokens a prompt takes, measured on the endpoint.

    Args:
        base: tokens of `recall` without any extra.
        line: tokens of each line.
        word: tokens of each filler word.
        exact: every character is one token, so that any size can be made exactly.
    """

    base: float
    line: float
    word: float
    exact: bool

    @classmethod
    def measured(cls, base: int, lines: tuple[int, int], words: tuple[int, int], exact: bool) -> Sizes:
        """Args:
        base: tokens of the bare prompt.
        lines, words: how many were added, and the tokens of that prompt.

        Raises:
            ValueError: the counts make no sense.
        """
        line, word = (lines[1] - base) / lines[0], (words[1] - base) / words[0]
        if not (base > 0 and line > 0 and word > 0):
            raise ValueError(f"the endpoint's token counts make no sense: {base}, {lines[1]}, {words[1]}")
        return cls(base, line, word, exact)

    def victim(self, secret: str, tokens: int) -> str:
        """A prompt of about so many tokens that is full of its secret; of exactly so many where that can be."""
        return self._fit(secret, tokens, int((tokens - self.base) / self.line))

    def oversize(self, secret: str, tokens: int) -> str:
        """A prompt of nearly so many tokens, mostly of filler, whose size is better known."""
        return self._fit(secret, tokens, min(2, int((tokens - self.base) / self.line)))

    def _fit(self, secret: str, tokens: int, lines: int) -> str:
        lines = max(0, lines)
        rest = max(0.0, tokens - self.base - lines * self.line)
        if self.exact:
            return recall(secret, lines, dots=round(rest))
        return recall(secret, lines, filler=int(rest / self.word))
