"""Convert generated tokens to text incrementally. Incomplete characters, and text that may begin a stop text, are buffered."""

from __future__ import annotations

from collections.abc import Sequence

from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer

_REPLACEMENT_CHARACTER = "\ufffd"
"""Character to which tokenizers decode bytes that are not a complete character yet."""


def decode_continuation(tokenizer: BaseTokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of `tokens` where they follow `prompt`: a tokenizer may drop a space at the beginning of a text."""
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]


class TextStream:
    """Converts a stream of tokens, which follow `prompt`, to text. The text ends before the first occurrence of any of `stop_texts`."""

    def __init__(self, tokenizer: BaseTokenizer, prompt: Sequence[int], stop_texts: Sequence[str] = ()) -> None:
        self._tokenizer, self._prompt, self._stop_texts = tokenizer, prompt, [stop for stop in stop_texts if stop]
        self._prompt_length = len(tokenizer.decode(prompt))
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False
        self._emitted_length = 0

    def add_token(self, token: int) -> str:
        """Add a token, and return the text that has become final since the last call."""
        self.tokens.append(token)
        self.text = self._tokenizer.decode([*self._prompt, *self.tokens])[self._prompt_length :]
        if stop_positions := [position for stop in self._stop_texts if (position := self.text.find(stop)) >= 0]:
            self.text, self.stopped = self.text[: min(stop_positions)], True
            return self._emit_text_until(len(self.text))
        certain_length = len(self.text.rstrip(_REPLACEMENT_CHARACTER))
        return self._emit_text_until(certain_length - self._count_partial_stop_characters(self.text[:certain_length]))

    def flush_text(self) -> str:
        """Return the remaining text, at the end of the stream."""
        return self._emit_text_until(len(self.text))

    def _emit_text_until(self, end: int) -> str:
        new_text, self._emitted_length = self.text[self._emitted_length : end], max(self._emitted_length, end)
        return new_text

    def _count_partial_stop_characters(self, text: str) -> int:
        """Return the number of characters at the end of `text` that may be the beginning of a stop text."""
        lengths = (length for stop in self._stop_texts for length in range(1, len(stop)) if text.endswith(stop[:length]))
        return max(lengths, default=0)
