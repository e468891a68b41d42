"""Text to token ids and back: from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class TextStream:
    """Incremental detokenisation: gives out text only when it can no longer change."""

    def push(self, token_id: int) -> str:
        """The text that this token completed; "" while inside a multi-token character."""
        raise NotImplementedError

    def finish(self) -> str:
        """What is left (an incomplete character as U+FFFD)."""
        raise NotImplementedError


class Tokenizer:
    """A tokenizer with its special tokens and its chat template."""

    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    bos_token_id: int | None
    vocab_size: int

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """From a directory with tokenizer.json, or a GGUF file. Raises TokenizerError."""
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        raise NotImplementedError

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The model's chat template applied to messages of the form {"role":, "content":}.

        Raises TokenizerError when there is no template or the template refuses.
        """
        raise NotImplementedError

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of `render_chat`."""
        raise NotImplementedError

    def stream(self) -> TextStream:
        """A fresh incremental detokeniser."""
        raise NotImplementedError
