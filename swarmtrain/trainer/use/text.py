"""Tokens as text, as they come: whole characters, and nothing that may yet turn out to be the end."""

from __future__ import annotations

from collections.abc import Sequence

from swarmtrain.trainer.prepare.encoders import Encoder

_BROKEN = "\ufffd"
"""What stands for bytes that are no character yet."""


class Stream:
    """The text of tokens that come one by one. It ends before the one of `stops` that is whole first."""

    def __init__(self, encoder: Encoder, stops: Sequence[str] = ()) -> None:
        self._encoder, self._stops = encoder, [stop for stop in stops if stop]
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._told = 0

    def add(self, token: int) -> str:
        """Take a token, and return what of the text is certain since the last time."""
        self.tokens.append(token)
        self.text = self._encoder.decode(self.tokens)
        if found := [place for stop in self._stops if (place := self.text.find(stop)) >= 0]:
            self.text, self.stopped = self.text[: min(found)], True
            return self._since(len(self.text))
        certain = len(self.text.rstrip(_BROKEN))
        return self._since(certain - self._perhaps(self.text[:certain]))

    def end(self) -> str:
        """Return what is left."""
        return self._since(len(self.text))

    def _since(self, end: int) -> str:
        new, self._told = self.text[self._told : end], max(self._told, end)
        return new

    def _perhaps(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a stop."""
        lengths = (length for stop in self._stops for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(lengths, default=0)
