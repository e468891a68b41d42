"""Text to token ids and back: from a Hugging Face directory or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from uhrc_engine.models.errors import TokenizerError
from uhrc_engine.weights.gguf_file import GGUFFile, open_gguf
from uhrc_engine.weights.hf_directory import read_json

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | …, "content": text}."""

_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class TextStream:
    """Incremental detokenisation: gives out text only when it can no longer change."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token completed; "" while inside a multi-token character."""
        text = self._stream.step(self._tokenizer, token_id)
        if text is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return text

    def finish(self) -> str:
        """What is left (an incomplete character as U+FFFD)."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held)


@dataclass(frozen=True, slots=True)
class _Specials:
    """What a tokenizer's files say besides the vocabulary."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


class Tokenizer:
    """A tokenizer with its special tokens and its chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, specials: _Specials) -> None:
        """Use `from_pretrained`."""
        self._tokenizer, self._specials = tokenizer, specials
        self.eos_token_ids: tuple[int, ...] = specials.eos_token_ids
        """Tokens that end an answer."""
        self.bos_token_id: int | None = specials.bos_token_id
        self.vocab_size: int = tokenizer.get_vocab_size()
        """Tokens, added ones included."""

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """From a directory with tokenizer.json, or a GGUF file.

        Raises TokenizerError when it is absent or of a kind that cannot be rebuilt, and
        CheckpointError when the file cannot be read.
        """
        path = Path(path)
        return cls(*(_from_directory(path) if path.is_dir() else _from_gguf(open_gguf(path))))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids. Special tokens written out in the text are recognised.

        add_special_tokens: put the beginning-of-sequence token first, where the model uses one.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self._specials.add_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""
        return self._tokenizer.decode(
            [int(i) for i in token_ids], skip_special_tokens=skip_special_tokens
        )

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The model's chat template applied to the messages, as text.

        Raises TokenizerError when there is no template or the template refuses the messages.
        """
        source = self._specials.chat_template
        if source is None:
            raise TokenizerError("this model has no chat template; give token ids or plain text")
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        try:
            return (
                _environment()
                .from_string(source)
                .render(
                    messages=list(messages),
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self._token(self.bos_token_id),
                    eos_token=self._token(eos),
                )
            )
        except TemplateError as error:
            raise TokenizerError(f"the chat template refused the messages: {error}") from error

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def stream(self) -> TextStream:
        """A fresh incremental detokeniser."""
        return TextStream(self._tokenizer)

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else self._tokenizer.id_to_token(token_id) or ""


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates come with the weights: they are run in a sandbox and can change nothing."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    names: dict[str, Any] = environment.globals
    names["raise_exception"] = raise_exception
    return environment


def _from_directory(path: Path) -> tuple[tokenizers.Tokenizer, _Specials]:
    file = path / "tokenizer.json"
    if not file.exists():
        raise TokenizerError(
            f"{path} has no tokenizer.json (slow tokenizers must be converted once, "
            "with transformers' save_pretrained)"
        )
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    settings, generation, config = (
        read_json(path / name) if (path / name).exists() else {}
        for name in ("tokenizer_config.json", "generation_config.json", "config.json")
    )

    def token_id(name: str) -> int | None:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else tokenizer.token_to_id(text)

    ends = [token_id("eos_token")]
    for source in (generation, config):
        listed = source.get("eos_token_id")
        ends += listed if isinstance(listed, list) else [listed]
    template_file = path / "chat_template.jinja"
    template = (
        template_file.read_text(encoding="utf-8")
        if template_file.exists()
        else settings.get("chat_template")
    )
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    bos = token_id("bos_token")
    # What tokenizer.json itself puts in front of a text says whether the model wants it.
    add_bos = bos is not None and tokenizer.encode("a").ids[:1] == [bos]
    eos = tuple(dict.fromkeys(i for i in ends if i is not None))
    return tokenizer, _Specials(bos, eos, add_bos, template)


def _from_gguf(file: GGUFFile) -> tuple[tokenizers.Tokenizer, _Specials]:
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise TokenizerError(
            f"{file.path} holds a {kind!r} tokenizer; only byte-level BPE ('gpt2') can be rebuilt "
            "from GGUF (use the model's Hugging Face directory instead)"
        )
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges")],
            ignore_merges=pre == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = file.get("tokenizer.ggml.token_type", [])
    for special, wanted in ((True, _GGUF_CONTROL), (False, _GGUF_USER_DEFINED)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    eos = file.get("tokenizer.ggml.eos_token_id")
    turn_end = file.get("tokenizer.ggml.eot_token_id")
    return tokenizer, _Specials(
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in (eos, turn_end) if i is not None)),
        add_bos=bool(file.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=file.get("tokenizer.chat_template"),
    )


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before the merges, by GGUF's name for it."""

    def words(pattern: str) -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, byte_level])

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return gpt2
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, gpt2])
        case "llama-bpe":
            return words(_LLAMA3_WORDS)
        case "qwen2":
            return words(_QWEN2_WORDS)
        case _:
            raise TokenizerError(
                f"GGUF pre-tokenizer {name!r} is not known; known: gpt-2, smollm, llama-bpe, qwen2 "
                "(use the model's Hugging Face directory instead)"
            )
