"""What hybrid models read in configs and checkpoints, in each of the forms these are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.engine import hybrid_runner
from tests.oracle import hybrid
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.recurrent import hybrid_layers
from uhrc_engine.models import model_from_config
from uhrc_engine.models.contract import make_step_inputs
from uhrc_engine.models.errors import UnexpectedTensorError, UnsupportedModelError
from uhrc_engine.weights import load_pretrained
from uhrc_recurrent.backends import BUILTIN_BACKENDS

QWEN, KIMI, MINIMAX, LING3, LING25 = (
    hybrid.CONFIGS[name]
    for name in ("qwen3_5_moe", "kimi", "minimax_3_heads", "bailing_3", "bailing_25")
)


def params_of(folder, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    folder.mkdir()
    return load_pretrained(hybrid.write_checkpoint(folder, config, weights)).params


def assert_equal(params: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def stack_experts(weights: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Experts' gate_proj, up_proj and down_proj as one gate_up_proj and one down_proj."""
    stacked = {name: a for name, a in weights.items() if ".experts." not in name}
    for prefix in {n.split(".experts.")[0] for n in weights if ".experts." in n}:
        gate, up, down = (
            np.stack([weights[f"{prefix}.experts.{e}.{name}_proj.weight"] for e in range(count)])
            for name in ("gate", "up", "down")
        )
        stacked[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        stacked[f"{prefix}.experts.down_proj"] = down
    return stacked


def test_qwen3_5_inside_the_multimodal_model_is_the_same_model(tmp_path):
    """Nested config, other prefix, stacked experts; the vision tower and MTP layers are skipped."""
    flat = hybrid.tensors(QWEN)
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {k: v for k, v in QWEN.items() if k != "architectures"},
        "vision_config": {"depth": 1},
    }
    nested = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in stack_experts(flat, QWEN["num_experts"]).items()
    }
    nested |= {"model.visual.patch_embed.weight": np.ones(3), "mtp.fc.weight": np.ones(3)}
    assert_equal(
        params_of(tmp_path / "nested", config, nested), params_of(tmp_path / "flat", QWEN, flat)
    )


def test_kimi_as_transformers_writes_it_is_the_same_model(tmp_path):
    """0-based layer types instead of 1-based ids, and every feed-forward a block_sparse_moe."""
    weights = hybrid.tensors(KIMI)
    dropped = ("linear_attn_config", "first_k_dense_replace")
    config = {k: v for k, v in KIMI.items() if k not in dropped} | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): a for name, a in weights.items()}
    expected = params_of(tmp_path / "hub", KIMI, weights)
    assert_equal(params_of(tmp_path / "own", config, renamed), expected)
    assert model_from_config(config).layer_caches == model_from_config(KIMI).layer_caches


def test_minimax_as_first_published_is_the_same_model():
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    config = {k: v for k, v in MINIMAX.items() if k != "layer_types"} | {
        "architectures": ["MiniMaxText01ForCausalLM"],
        "model_type": "minimax_text_01",
        "attn_type_list": [0, 1, 0],
        "postnorm": True,
        "rotary_dim": 4,
        "shared_intermediate_size": 0,
    }
    for ours, published in names.items():
        for factor in ("alpha", "beta"):
            config[f"layernorm_{published}_{factor}"] = config.pop(f"{ours}_{factor}_factor")
    model, expected = model_from_config(config), model_from_config(MINIMAX)
    assert model.layer_caches == expected.layer_caches
    assert model.residuals == expected.residuals
    assert (len(model.rope.inv_freq), len(expected.rope.inv_freq)) == (2, 4)


def test_ling_as_transformers_writes_it_is_the_same_model(tmp_path):
    """Other names of the router's numbers, and head_dim meaning the rotary part of a head."""
    renamed = {
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
        "max_position_embeddings": "model_max_length",
    }
    config = {renamed.get(key, key): value for key, value in LING3.items()} | {
        "architectures": ["BailingHybridForCausalLM"],
        "linear_head_dim": LING3["head_dim"],
        "linear_num_heads": LING3["num_attention_heads"],
        "head_dim": LING3["qk_rope_head_dim"],
    }
    model, expected = model_from_config(config), model_from_config(LING3)
    assert model.layer_caches == expected.layer_caches
    assert (model.kda, model.mla, model.moe) == (expected.kda, expected.mla, expected.moe)
    assert model.max_context_len == expected.max_context_len == 512


def test_ling_layers_for_multi_token_prediction_are_skipped(tmp_path):
    weights = hybrid.tensors(LING3)
    more = weights | {"model.layers.3.attention.dense.weight": np.ones(3)}
    config = LING3 | {"num_nextn_predict_layers": 1}
    expected = params_of(tmp_path / "without", LING3, weights)
    assert_equal(params_of(tmp_path / "with", config, more), expected)
    with pytest.raises(UnexpectedTensorError, match=r"model\.layers\.3\.attention\.dense"):
        params_of(tmp_path / "undeclared", LING3, more)


def test_the_factors_minimax_stores_are_skipped(tmp_path):
    weights = hybrid.tensors(MINIMAX)
    stored = {"model.layers.0.self_attn.slope_rate": np.ones((3, 1, 1))}
    expected = params_of(tmp_path / "without", MINIMAX, weights)
    assert_equal(params_of(tmp_path / "with", MINIMAX, weights | stored), expected)


@pytest.mark.parametrize("name", list(hybrid.CONFIGS))
def test_the_cache_plans_the_layers_that_the_model_runs(name):
    """`layer_caches` against what the cache reads in the same config, kind and size."""
    config = hybrid.CONFIGS[name]
    caches = model_from_config(config).layer_caches
    planned = hybrid_layers(config, BUILTIN_BACKENDS)
    assert [cache.component is ComponentType.RECURRENT for cache in caches] == [
        hybrid.is_linear(config, i) for i in range(config["num_hidden_layers"])
    ]
    specs = {spec.name: spec for spec in BUILTIN_BACKENDS}
    for cache, layer in zip(caches, planned, strict=True):
        if layer.component is ComponentType.RECURRENT:
            spec = specs[layer.backend]
            assert cache.shape == spec.state_layout(spec.params_model(**layer.shape))
        elif "kv_lora_rank" in layer.shape:
            assert cache.shape.latent_dim == sum(layer.shape.values())
        else:
            assert cache.shape.kv_heads == layer.shape["num_kv_heads"]
            assert cache.shape.head_dim == layer.shape["head_dim"]


@pytest.mark.parametrize("name", list(hybrid.CONFIGS))
@pytest.mark.parametrize("width", [1, 64])
def test_bfloat16_stays_bfloat16(tmp_path, name, width):
    """Weights and conv states keep their dtype through a step, temporal states stay float32."""
    sequencer = hybrid_runner.Sequencer(
        hybrid_runner.load(tmp_path, hybrid.CONFIGS[name], jnp.bfloat16), dtype="bfloat16"
    )
    row = sequencer.row(np.zeros(width, np.int32), 0, sequence=0, slot=0)
    inputs = make_step_inputs([row], width=width, max_pages=20, page_size=16)
    runner = sequencer.runner
    caches = {kind: pool.buffers for kind, pool in runner.pools.items()}
    logits, written = jax.eval_shape(runner.model.forward, runner.params, caches, inputs)
    assert logits.dtype == jnp.float32
    assert jax.tree.structure(written) == jax.tree.structure(caches)
    for after, before in zip(jax.tree.leaves(written), jax.tree.leaves(caches), strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"},
            r"no model class for architectures = \['FalconH1ForCausalLM'\].*KimiLinearForCausalLM",
        ),
        (
            {k: v for k, v in LING25.items() if k != "group_norm_size"},
            r"neither kda_\* \(Ling 3.0, kda\) nor group_norm_size.*BailingMoeV2_5ForCausalLM",
        ),
        (
            QWEN | {"layer_types": ["full_attention"] * 2},
            r"model_type = 'qwen3_5_moe_text'.*no recurrent layers of a kind.*it has: gdn",
        ),
        (KIMI | {"mla_use_nope": False}, r"mla_use_nope = False is not supported; supported: True"),
        (MINIMAX | {"postnorm": False}, r"postnorm = False is not supported; supported: True"),
        (LING3 | {"no_kda_lora": False}, r"no_kda_lora = False is not supported; supported: True"),
        (QWEN | {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        model_from_config(config)


def bare(name: str, *left_out: str) -> Any:
    """The model of a config without these keys."""
    config = hybrid.CONFIGS[name]
    return model_from_config({key: config[key] for key in config.keys() - {*left_out}})


def test_what_published_configs_leave_out_is_what_their_families_mean():
    ling = bare("bailing_3", "kda_lower_bound", "kda_safe_gate", "first_k_dense_replace")
    assert (ling.kda.decay_bound, ling.moe.dense_layers) == (-5.0, frozenset())
    assert bare("bailing_3_dense").kda.decay_bound is None
    rope = bare("bailing_25", "rope_theta").mla_rope
    dim = 2 * len(rope.inv_freq)
    assert rope.inv_freq[-1] == pytest.approx(6e6 ** (2 / dim - 1), rel=1e-5)
    assert bare("kimi", "first_k_dense_replace").moe.dense_layers == frozenset({0})
    qwen = bare("qwen3_next", "rope_parameters")
    assert 2 * len(qwen.rope.inv_freq) == qwen.attention.head_dim // 4


def test_the_shared_expert_of_ling_may_be_of_another_size_than_the_routed_ones():
    moe = model_from_config(LING3 | {"moe_shared_expert_intermediate_size": 7}).moe
    assert moe.shared_intermediate == 7 * LING3["num_shared_experts"]
    assert moe.intermediate == LING3["moe_intermediate_size"] != 7
