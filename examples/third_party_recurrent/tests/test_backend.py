"""Which Hugging Face configs have Mamba-2 layers, which layers those are, what state they keep."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from uhrc_core.plugin_api import ComponentType, ConfigError, hybrid_layers
from uhrc_mamba2 import ssd
from uhrc_mamba2.backend import MAMBA2, Mamba2Params, matches_hf_config
from uhrc_mamba2.bamba import Bamba
from uhrc_mamba2.granite import GraniteMoeHybrid
from uhrc_recurrent.kernels import conv1d

BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [2, 4],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GRANITE: dict[str, Any] = BAMBA | {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 3,
    "attn_layer_indices": None,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_d_head": "auto",
    "mamba_n_heads": 64,
}
SIZES = {"num_heads": 128, "head_dim": 64, "state_size": 128, "num_groups": 1, "conv_kernel": 4}


def test_bamba() -> None:
    model = matches_hf_config(BAMBA)
    assert model is not None
    assert model.params.model_dump() == SIZES
    assert (model.linear_layers, model.num_layers) == ((0, 1, 3, 5), 6)


@pytest.mark.parametrize("names", [("mamba", "attention"), ("linear_attention", "full_attention")])
def test_granite_under_either_pair_of_names(names: tuple[str, str]) -> None:
    mamba, attention = names
    model = matches_hf_config(GRANITE | {"layer_types": [mamba, attention, mamba]})
    assert model is not None
    assert model.params.model_dump() == SIZES | {"num_heads": 64, "head_dim": 128}
    assert (model.linear_layers, model.num_layers) == ((0, 2), 3)


def test_the_keys_decide_and_not_the_model_type() -> None:
    renamed = matches_hf_config(BAMBA | {"model_type": "our_own", "architectures": ["Ours"]})
    assert renamed == matches_hf_config(BAMBA)
    assert matches_hf_config(GRANITE | {"layer_types": ["attention"] * 3}) is None
    assert matches_hf_config(BAMBA | {"mamba_d_ssm": 8192}) is None
    assert matches_hf_config({"model_type": "bamba", "num_hidden_layers": 2}) is None
    jamba = {"model_type": "jamba", "mamba_d_state": 16, "mamba_dt_rank": 256}
    assert matches_hf_config(jamba | {"num_hidden_layers": 2}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mamba_d_state": None}, "mamba_d_state = None: must be an integer"),
        ({"mamba_n_groups": 3}, "mamba_n_heads = 128: not a multiple of mamba_n_groups = 3"),
        ({"mamba_d_head": "auto", "mamba_n_heads": 3}, "hidden_size = 8192: not a multiple"),
        ({"attn_layer_indices": [6]}, r"attn_layer_indices = \[6\]: .* from 0 to 5"),
        ({"layer_types": ["mamba", "moe"]}, "layer_types has 'moe'; mamba2 knows mamba"),
    ],
)
def test_what_the_config_cannot_mean_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        matches_hf_config(BAMBA | change)


def test_the_state_is_that_of_the_paper_and_three_convolutions() -> None:
    layout = MAMBA2.state_layout(Mamba2Params(**SIZES))
    assert [(b.name, b.shape, b.dtype) for b in layout.buffers] == [
        ("temporal", (128, 64, 128), "float32"),
        ("conv_x", (3, 8192), "model"),
        ("conv_b", (3, 128), "model"),
        ("conv_c", (3, 128), "model"),
    ]
    assert layout.bytes_per_slot("bfloat16") == 4 * 128 * 64 * 128 + 2 * 3 * (8192 + 256)


def test_the_cache_plans_both_kinds_of_layers() -> None:
    layers = hybrid_layers(GRANITE, [MAMBA2])
    assert layers is not None
    recurrent, full = ComponentType.RECURRENT, ComponentType.FULL
    assert [layer.component for layer in layers] == [recurrent, full, recurrent]
    assert layers[0].backend == "mamba2"
    assert layers[1].shape == {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


def test_the_declared_kernels_are_the_registered_ones() -> None:
    kernels = (
        ssd.MAMBA2_STEP,
        ssd.MAMBA2_PREFILL,
        conv1d.CONV1D_STEP,
        conv1d.CONV1D_PREFILL,
    )
    for kernel in kernels:
        assert set(MAMBA2.kernels[kernel.name]) <= set(kernel.implementations)
    assert {kernel.name for kernel in kernels} == set(MAMBA2.kernels)


def test_the_entry_points_name_what_they_load() -> None:
    families = {
        Bamba: ("BambaForCausalLM", "bamba"),
        GraniteMoeHybrid: ("GraniteMoeHybridForCausalLM", "granitemoehybrid"),
    }
    for family, names in families.items():
        for name in names:
            [point] = entry_points(group="uhrc.models", name=name)
            assert point.load() is family
    [plugin] = entry_points(group="uhrc.plugins", name="mamba2")
    assert plugin.load().uhrc_recurrent_backends() == [MAMBA2]


def test_declaring_imports_no_jax() -> None:
    code = "import sys, uhrc_mamba2.plugin; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
