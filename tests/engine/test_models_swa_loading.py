"""What window models read in configs and checkpoints, in each of the forms these are published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine.swa_runner import WindowSequencer
from tests.oracle import swa
from uhrc_core.kinds import ComponentType
from uhrc_engine.models import model_from_config, mxfp4
from uhrc_engine.models.contract import StepRow, make_step_inputs
from uhrc_engine.models.errors import UnexpectedTensorError, UnsupportedModelError
from uhrc_engine.runner import Buckets
from uhrc_engine.weights import load_pretrained, load_seeded

GEMMA3, GPT_OSS, MISTRAL, QWEN2 = (
    swa.CONFIGS[name] for name in ("gemma3_7", "gpt_oss_33", "mistral_5", "qwen2")
)
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
    return folder


def params_of(folder: Path, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    return load_pretrained(write(folder, config, weights)).params


def assert_equal(params: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(
    ("root", "towers"),
    [
        ("model.language_model", ("model.vision_tower.a", "model.multi_modal_projector.b")),
        ("language_model.model", ("vision_tower.a", "multi_modal_projector.b")),
    ],
)
def test_gemma_3_inside_the_multimodal_model_is_the_same_model(tmp_path, root, towers):
    """Nested config, another prefix, the head stored again; what sees images is skipped."""
    flat = swa.tensors(GEMMA3)
    nested = {name.replace("model", root, 1): array for name, array in flat.items()}
    nested |= {name: np.ones(3, np.float32) for name in towers}
    nested["language_model.lm_head.weight"] = flat["model.embed_tokens.weight"]
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {k: v for k, v in GEMMA3.items() if k != "architectures"},
        "vision_config": {"hidden_size": 3},
    }
    expected = params_of(tmp_path / "flat", GEMMA3, flat)
    assert_equal(params_of(tmp_path / "nested", config, nested), expected)
    with pytest.raises(UnexpectedTensorError, match=r"model\.audio_tower"):
        params_of(tmp_path / "more", config, nested | {"model.audio_tower.a": np.ones(3)})


def test_gemma_3_with_what_its_published_configs_leave_out():
    """Of a published 4b: the numbers that are the family's own are not in the file."""
    model = model_from_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    windows = [layer.window_tokens for layer in model.attention]
    assert windows == [None if i % 6 == 5 else 1024 for i in range(34)]
    assert (model.attention[0].heads, model.attention[0].kv_heads) == (8, 4)
    assert (model.attention[0].head_dim, model.attention[0].scale) == (256, 1 / 16)
    assert (model.vocab_size, model.tied, model.max_context_len) == (262_208, True, 131_072)
    wavelengths = {kind: 1 / rope.inv_freq[-1] for kind, rope in model.ropes.items()}
    assert wavelengths[ComponentType.FULL] == pytest.approx(8 * 1_000_000 ** (254 / 256), rel=1e-5)
    assert wavelengths[ComponentType.SWA] == pytest.approx(10_000 ** (254 / 256), rel=1e-5)


def test_the_published_gpt_oss_config_and_the_one_transformers_writes_are_one_model():
    """`rope_scaling` and `rope_theta`, or all in `rope_parameters`, or nothing at all."""
    published = {**GPT_OSS, "rope_scaling": {**GPT_OSS["rope_scaling"], "factor": 32.0}}
    published["rope_scaling"]["original_max_position_embeddings"] = 4096
    bare = {k: v for k, v in published.items() if k not in ("rope_scaling", "rope_theta")}
    written = bare | {"rope_parameters": {**published["rope_scaling"], "rope_theta": 150000.0}}
    expected = model_from_config(published).rope
    for config in (bare, written, bare | {"rope_theta": 150000.0}):
        rope = model_from_config(config).rope
        np.testing.assert_array_equal(rope.inv_freq, expected.inv_freq)
        assert rope.magnitude == expected.magnitude == pytest.approx(0.1 * np.log(32) + 1)


# -- MXFP4 ---------------------------------------------------------------------------------------


def test_e2m1_numbers_are_what_their_bits_say():
    """By the format's definition, for all 16; the low half of a byte comes first."""
    bits = np.arange(16)
    sign, exponent, mantissa = (-1.0) ** (bits >> 3), (bits >> 1) & 3, bits & 1
    normal = 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    expected = sign * np.where(exponent == 0, mantissa / 2, normal)
    low_first = (bits[0::2] | bits[1::2] << 4).reshape(1, 8)
    blocks = np.concatenate([low_first, low_first], axis=1)
    values = mxfp4.dequantize(blocks, np.array([127 + 3]))
    np.testing.assert_array_equal(values, np.tile(expected * 8, 2))
    np.testing.assert_array_equal(mxfp4.dequantize(blocks, np.array([120])), values / 2**10)


def quantised(weights: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(The checkpoint with random MXFP4 experts, the same with these as plain tensors)."""
    rng = np.random.default_rng(0)
    packed, plain = dict(weights), dict(weights)
    for name, array in weights.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = array.shape
            blocks = rng.integers(0, 256, (experts, out, into // 32, 16)).astype(np.uint8)
            scales = rng.integers(122, 126, (experts, out, into // 32)).astype(np.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = np.ascontiguousarray(mxfp4.dequantize(blocks, scales).swapaxes(1, 2))
    return packed, plain


def test_gpt_oss_in_mxfp4_is_the_model_of_the_numbers_it_stands_for(tmp_path):
    sizes = GPT_OSS | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    packed, plain = quantised(swa.tensors(sizes))
    expected = params_of(tmp_path / "plain", sizes, plain)
    assert_equal(params_of(tmp_path / "packed", sizes | MXFP4, packed), expected)


def test_seeded_mxfp4_weights_are_as_large_as_others(tmp_path):
    """So that a published config.json can be measured as it is."""
    folder = tmp_path / "seeded"
    folder.mkdir()
    sizes = GPT_OSS | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(sizes | MXFP4))
    [layer] = load_seeded(folder, seed=1).params["layers"]
    for name in ("gate_up", "down"):
        deviation = float(layer["experts"][name].std()) * 64**0.5
        assert 0.7 < deviation < 1.4


# -- types and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral_5", "qwen3", "gemma3_7", "gpt_oss_33"])
@pytest.mark.parametrize("width", [1, 64])
def test_bfloat16_stays_bfloat16(tmp_path, name, width):
    """Through a step, on pools of bfloat16; logits are float32."""
    loaded = load_pretrained(swa.write_checkpoint(tmp_path, swa.CONFIGS[name]), jnp.bfloat16)
    sequencer = WindowSequencer(loaded, Buckets(), 16, 8, dtype="bfloat16")
    own = {kind: np.arange(4) for kind in loaded.model.paged_components}
    row = StepRow(np.zeros(width, np.int32), 0, own)
    inputs = make_step_inputs([row], width=width, max_pages=32, page_size=16)
    caches = {kind: pool.buffers for kind, pool in sequencer.pools.items()}
    logits, written = jax.eval_shape(loaded.model.forward, loaded.params, caches, inputs)
    assert logits.dtype == jnp.float32
    assert jax.tree.structure(written) == jax.tree.structure(caches)
    for after, before in zip(jax.tree.leaves(written), jax.tree.leaves(caches), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        (
            GPT_OSS | {"layer_types": ["sliding_attention", "chunked_attention"] * 2},
            "layer_types: 'chunked_attention' is not supported; supported: sliding_attention, full",
        ),
        (
            GPT_OSS | {"quantization_config": {"quant_method": "gptq"}},
            "quant_method = 'gptq' is not supported; supported: mxfp4",
        ),
        (
            MISTRAL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            "sliding_window = 5 is not supported; supported: None",
        ),
        (MISTRAL | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        model_from_config(config)


def test_qwen_has_no_windows_unless_asked_and_then_none_in_its_first_28_layers():
    unsaid = {key: value for key, value in QWEN2.items() if key != "max_window_layers"}
    unasked = {key: value for key, value in QWEN2.items() if key != "use_sliding_window"}
    for config in (QWEN2 | {"use_sliding_window": False}, unsaid, unasked):
        model = model_from_config(config)
        assert {layer.window_tokens for layer in model.attention} == {None}


def test_norms_of_gpt_oss_and_gemma_3_stay_float32_in_a_bfloat16_model(tmp_path):
    for name in ("gpt_oss_33", "gemma3_7"):
        folder = tmp_path / name
        folder.mkdir()
        loaded = load_pretrained(swa.write_checkpoint(folder, swa.CONFIGS[name]), jnp.bfloat16)
        assert loaded.params["norm"].dtype == jnp.float32
        for layer in loaded.params["layers"]:
            assert layer["attention_norm"].dtype == layer["mlp_norm"].dtype == jnp.float32
            assert layer["mixer"]["qkv"]["weight"].dtype == jnp.bfloat16
