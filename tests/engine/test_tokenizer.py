"""Tokenizer: chat template, round trips, streaming, and what is refused.

The SmolLM2 ids are checked against transformers' in test_models_smollm2.py.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from gguf import GGUFWriter

from uhrc_engine.models.errors import TokenizerError
from uhrc_engine.tokenizer import Tokenizer

TEXT = "Naïve café 日本 🙂 12345\n\tend"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return Tokenizer.from_pretrained(tiny_checkpoint)


def write_gguf(path, **metadata):
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        key = f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}"
        match value:
            case str():
                writer.add_string(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case list():
                writer.add_array(key, value)
    writer.add_tensor("none", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_text_survives_a_round_trip(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_the_chat_template_ends_with_the_generation_prompt(tokenizer):
    text = tokenizer.render_chat(CHAT)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    bare = tokenizer.render_chat(CHAT, add_generation_prompt=False)
    assert bare == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_of_a_template_become_single_ids(tokenizer):
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(tokenizer.eos_token_ids[0]) == 1
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(CHAT)


def test_a_stream_never_shows_half_a_character(tokenizer):
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(TEXT)]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""


def test_a_stream_cut_inside_a_character_ends_with_a_replacement(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode("a🙂")[:3]] == ["a", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_templates_run_in_a_sandbox(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    template = "{{ messages.__class__.__mro__ }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(TokenizerError, match="the chat template refused the messages"):
        Tokenizer.from_pretrained(folder).render_chat(CHAT)


def test_a_template_can_refuse_with_its_own_words(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(TokenizerError, match="no system role"):
        Tokenizer.from_pretrained(folder).render_chat(CHAT)


def test_end_tokens_are_collected_from_every_file(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 3]}))
    assert Tokenizer.from_pretrained(folder).eos_token_ids == (257, 3)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_gguf_vocabulary_becomes_a_tokenizer(tmp_path):
    path = write_gguf(
        tmp_path / "t.gguf",
        model="gpt2",
        pre="smollm",
        tokens=["<s>", "</s>", "a", "b", "Ġ", "1", "2", "12", "ab", "Ġa"],
        token_type=[3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
        merges=["1 2", "a b", "Ġ a"],
        bos_token_id=0,
        eos_token_id=1,
        add_bos_token=True,
    )
    tokenizer = Tokenizer.from_pretrained(path)
    assert tokenizer.encode("ab a12</s>") == [8, 9, 5, 6, 1]  # digits are never merged
    assert tokenizer.encode("b", add_special_tokens=True) == [0, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (1,))
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"model": "llama"}, "holds a 'llama' tokenizer; only byte-level BPE"),
        (
            {"model": "gpt2", "pre": "falcon", "tokens": ["a", "aa"], "merges": ["a a"]},
            "pre-tokenizer 'falcon' is not known; known: gpt-2, smollm, llama-bpe, qwen2",
        ),
    ],
)
def test_a_gguf_tokenizer_of_another_kind_is_refused(tmp_path, metadata, message):
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(write_gguf(tmp_path / "t.gguf", **metadata))
