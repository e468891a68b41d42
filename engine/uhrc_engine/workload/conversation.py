"""A conversation as tokens: each prompt extends the one before, so its prefix can be reused."""

from __future__ import annotations

from collections.abc import Sequence

from uhrc_engine.tokenizer import Tokenizer


class Conversation:
    """Messages of one dialogue and the token ids they stand for.

    The answer's ids go into the next prompt as they were generated. Encoding its text again could
    give other ids for the same text, and the cached prefix would end there.
    """

    def __init__(self, tokenizer: Tokenizer, system: str = "") -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        if system:
            self._messages.append({"role": "system", "content": system})
        self._text = ""
        self._ids: list[int] = []

    def ask(self, question: str) -> list[int]:
        """Add a user message; the token ids of the prompt for its answer, a copy."""
        self._messages.append({"role": "user", "content": question})
        text = self._tokenizer.render_chat(self._messages)
        if text.startswith(self._text):
            self._ids += self._tokenizer.encode(text[len(self._text) :])
        else:  # the template changed an earlier message (trimmed it, say)
            self._ids = self._tokenizer.encode(text)
        self._text = text
        return list(self._ids)

    def answer(self, token_ids: Sequence[int]) -> str:
        """Add what the model generated, whole or cut short; its text."""
        ids = list(token_ids)
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            ids.pop()  # the template writes the end of the turn itself
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        self._messages.append({"role": "assistant", "content": text})
        self._text += text
        self._ids += ids
        return text
