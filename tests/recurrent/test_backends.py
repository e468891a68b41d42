"""Which backend a Hugging Face config means, which layers are linear, what state they keep."""

from __future__ import annotations

import subprocess
import sys

import pytest

from uhrc_core.errors import ConfigError
from uhrc_core.registry.recurrent import choose_backend
from uhrc_recurrent.backends import BUILTIN_BACKENDS, GDN, GLA, KDA
from uhrc_recurrent.kernels import conv1d, gdn, gla, kda

KIMI = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 5,
    "linear_attn_config": {
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3, 5],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
QWEN = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
MINIMAX = {
    "model_type": "minimax",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "head_dim": 96,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
BAILING = {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "hidden_size": 2048,
    "head_dim": 128,
    "layer_group_size": 4,
}
LING3 = BAILING | {
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
}
LING25 = BAILING | {"group_norm_size": 4, "partial_rotary_factor": 0.5}

KDA_32 = {"num_heads": 32, "head_dim": 128, "conv_kernel": 4}
KDA_16 = KDA_32 | {"num_heads": 16}
GDN_SIZES = {
    "num_key_heads": 16,
    "num_value_heads": 32,
    "key_head_dim": 128,
    "value_head_dim": 64,
    "conv_kernel": 4,
}


@pytest.mark.parametrize(
    ("config", "backend", "sizes", "linear_layers"),
    [
        (KIMI, "kda", KDA_32, (0, 1, 2, 4)),
        (LING3, "kda", KDA_16, (0, 1, 2, 4, 5, 6, 8, 9)),
        (LING3 | {"head_dim": 64, "linear_head_dim": 128}, "kda", KDA_16, None),
        (BAILING | {"architectures": ["BailingMoeV3ForCausalLM"]}, "kda", KDA_16, None),
        (LING3 | {"group_norm_size": 4}, "kda", KDA_16, None),
        (QWEN, "gdn", GDN_SIZES, (0, 1, 2, 4, 5, 6)),
        (
            {"model_type": "qwen3_5", "text_config": QWEN | {"model_type": "qwen3_5_text"}},
            "gdn",
            GDN_SIZES,
            (0, 1, 2, 4, 5, 6),
        ),
        (
            QWEN | {"model_type": "qwen3_5_moe_text", "layer_types": MINIMAX["layer_types"]},
            "gdn",
            GDN_SIZES,
            (0, 1, 2),
        ),
        (MINIMAX, "gla", {"num_heads": 64, "head_dim": 96}, (0, 1, 2)),
        (
            {
                "model_type": "minimax_text_01",
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "hidden_size": 64,
                "attn_type_list": [0, 1, 0],
            },
            "gla",
            {"num_heads": 4, "head_dim": 16},
            (0, 2),
        ),
        (LING25, "gla", {"num_heads": 16, "head_dim": 128}, (0, 1, 2, 4, 5, 6)),
    ],
    ids=[
        "kimi_linear",
        "ling 3.0",
        "ling 3.0 as transformers saves it",
        "ling 3.0 by architecture",
        "ling 3.0 with a left-over key of 2.5",
        "qwen3_next",
        "qwen3_5 nested",
        "qwen3_5_moe by layer_types",
        "minimax",
        "minimax_text_01",
        "ling 2.5",
    ],
)
def test_backend_is_chosen_from_the_config_alone(config, backend, sizes, linear_layers):
    chosen = choose_backend(config, BUILTIN_BACKENDS)
    assert chosen is not None
    spec, model = chosen
    assert spec.name == backend
    assert model.params.model_dump() == sizes
    assert spec.params_model(**model.params.model_dump()) == model.params
    if linear_layers is not None:
        assert model.linear_layers == linear_layers


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_hidden_layers": 2},
        {"model_type": "minimax_m2", "num_hidden_layers": 2},
        {"model_type": "olmo_hybrid", "num_hidden_layers": 2, "linear_num_key_heads": 4},
        BAILING,
        QWEN | {"layer_types": ["full_attention"] * 8},
        {},
    ],
    ids=[
        "llama",
        "minimax_m2",
        "other gdn",
        "bailing of no known kind",
        "no linear layer",
        "empty",
    ],
)
def test_other_models_are_nobodys(config):
    assert choose_backend(config, BUILTIN_BACKENDS) is None


def test_two_backends_for_one_model_are_refused():
    with pytest.raises(ConfigError, match=r"'kimi_linear' is claimed by .* kda, kda"):
        choose_backend(KIMI, [KDA, KDA])


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (KIMI, "num_hidden_layers"),
        (KIMI | {"linear_attn_config": {}}, "linear_head_dim"),
        (LING3, "num_attention_heads"),
        (LING3, "layer_group_size"),
        (QWEN, "linear_num_key_heads"),
        (QWEN, "full_attention_interval"),
        (MINIMAX, "head_dim"),
        (LING25, "layer_group_size"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, "4", True, 2**40])
def test_a_size_that_is_none_is_named(config, key, value):
    with pytest.raises(ConfigError) as caught:
        choose_backend(config | {key: value}, BUILTIN_BACKENDS)
    assert str(caught.value).startswith(f"model.hf_config: {key} = {value!r}: must be an integer ")


@pytest.mark.parametrize("config", [QWEN, MINIMAX, LING25])
def test_the_number_of_layers_is_not_guessed(config):
    rest = {key: value for key, value in config.items() if key != "num_hidden_layers"}
    with pytest.raises(ConfigError, match="num_hidden_layers = None: must be an integer"):
        choose_backend(rest, BUILTIN_BACKENDS)


def test_state_layouts_and_their_bytes():
    def shapes(layout):
        return {b.name: (b.shape, b.dtype) for b in layout.buffers}

    kda_state = KDA.state_layout(KDA.params_model(**KDA_16))
    assert shapes(kda_state) == {
        "temporal": ((16, 128, 128), "float32"),
        "conv_q": ((3, 2048), "model"),
        "conv_k": ((3, 2048), "model"),
        "conv_v": ((3, 2048), "model"),
    }
    assert kda_state.bytes_per_slot("bfloat16") == 16 * 128 * 128 * 4 + 3 * 3 * 2048 * 2
    gdn_state = GDN.state_layout(GDN.params_model(**GDN_SIZES))
    assert shapes(gdn_state) == {
        "temporal": ((32, 128, 64), "float32"),
        "conv_q": ((3, 2048), "model"),
        "conv_k": ((3, 2048), "model"),
        "conv_v": ((3, 2048), "model"),
    }
    gla_state = GLA.state_layout(GLA.params_model(num_heads=64, head_dim=96))
    assert shapes(gla_state) == {"temporal": ((64, 96, 96), "float32")}
    assert not KDA.state_layout(KDA.params_model(**KDA_16 | {"conv_kernel": 1})).convs


def test_declared_kernels_are_the_registered_ones():
    registered = {
        kernel.name: kernel.implementations
        for module in (conv1d, gdn, gla, kda)
        for kernel in vars(module).values()
        if type(kernel).__name__ == "Kernel"
    }
    for spec in BUILTIN_BACKENDS:
        assert {name: registered[name] for name in spec.kernels} == dict(spec.kernels)


def test_declarations_import_no_jax():
    code = "import sys, uhrc_recurrent.backends, uhrc_recurrent.layout; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
