"""Makes goldens/recurrent.npz: linear-attention layers as transformers' torch code computes them.

Needs torch and transformers 5.24 (a venv of their own): python make_recurrent.py

Per case: `out` of the whole prefill without a cache, and the final states after the same tokens cut
into PIECES with a cache (single tokens take the decode path), `temporal` and `conv` (its last
kernel - 1 columns, time first). Both runs give the same outputs to 1e-4, checked here. The modules
run in float32 on CPU.

The two ling25 cases are no module's: transformers 5.24 has bailing_hybrid only as Ling 3.0 (KDA).
They are Ling/Ring 2.5's recurrence, made in float64 from the facts of its published modeling code
(BailingMoeV2_5LinearAttention: simple GLA, scale K^-1/2, decay = ALiBi slope * (1 - (layer - 1) /
(layers - 1) + 1e-5)), in the quadratic form, which shares nothing with a recurrence.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from recurrent_cases import CASES, HIDDEN, PIECES, TOKENS, Case, inputs, mixer_inputs, weights
from transformers import (
    BailingHybridConfig,
    DynamicCache,
    KimiLinearConfig,
    MiniMaxConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

LINEAR = ["linear_attention"] * 4


def module_of(case: Case) -> tuple[torch.nn.Module, object]:
    common = {"hidden_size": HIDDEN, "num_hidden_layers": case.num_layers, "layer_types": LINEAR}
    gdn = common | {
        "linear_num_value_heads": case.heads,
        "linear_num_key_heads": case.key_heads,
        "linear_key_head_dim": case.key_dim,
        "linear_value_head_dim": case.value_dim,
        "linear_conv_kernel_dim": case.conv_kernel,
    }
    match case.family:
        case "kimi_linear":
            config = KimiLinearConfig(
                **common,
                linear_attn_config={
                    "num_heads": case.heads,
                    "head_dim": case.key_dim,
                    "short_conv_kernel_size": case.conv_kernel,
                },
            )
            return KimiLinearDeltaAttention(config, case.layer_idx), config
        case "bailing_hybrid":
            config = BailingHybridConfig(
                **common,
                num_attention_heads=case.heads,
                head_dim=case.key_dim,
                short_conv_kernel_size=case.conv_kernel,
                kda_safe_gate=case.safe_gate,
            )
            return BailingHybridDeltaAttention(config, case.layer_idx), config
        case "qwen3_next":
            config = Qwen3NextConfig(**gdn)
            return Qwen3NextGatedDeltaNet(config, case.layer_idx), config
        case "qwen3_5":
            config = Qwen3_5TextConfig(**gdn)
            return Qwen3_5GatedDeltaNet(config, case.layer_idx), config
        case _:
            config = MiniMaxConfig(
                **common,
                num_attention_heads=case.heads,
                num_key_value_heads=case.heads,
                head_dim=case.key_dim,
                block_size=32,
            )
            return MiniMaxLightningAttention(config, case.layer_idx), config


def run(case: Case) -> dict[str, torch.Tensor]:
    module, config = module_of(case)
    module.load_state_dict({k: torch.tensor(v) for k, v in weights(case).items()}, strict=False)
    assert set(weights(case)) == set(dict(module.named_parameters())), case.name
    module.eval()
    x = torch.tensor(inputs(case))
    minimax = case.family == "minimax"

    def forward(x: torch.Tensor, cache: object) -> torch.Tensor:
        if minimax:
            return module(x, position_embeddings=None, attention_mask=None, cache=cache)[0]
        return module(x, cache=cache)

    out = forward(x, None)
    cache = MiniMaxCache() if minimax else DynamicCache(config=config)
    pieces = torch.cat([forward(piece, cache) for piece in x.split(PIECES, dim=1)], dim=1)
    assert (pieces - out).abs().max() < 1e-4, case.name
    result = {"out": out}
    if minimax:
        return result | {"temporal": cache.get_linear_cache(case.layer_idx)}
    conv = cache.get_conv_state(case.layer_idx, state_idx=0)[..., 1 - case.conv_kernel :]
    temporal = cache.get_recurrent_state(case.layer_idx, state_idx=0)
    return result | {"temporal": temporal, "conv": conv.transpose(1, 2)}


def run_lightning(case: Case) -> dict[str, torch.Tensor]:
    """Every pair of tokens at once: out_i = sum over j <= i of decay^(i - j) (q_i . k_j) v_j."""
    q, k, v = (torch.tensor(x, dtype=torch.float64).transpose(1, 2) for x in mixer_inputs(case))
    power = 2 ** math.floor(math.log2(case.heads))
    exact = [2 ** (-(h + 1) * 8 / power) for h in range(power)]
    between = [2 ** (-(h + 1) * 8 / (2 * power)) for h in range(2 * power)][0::2]
    slopes = torch.tensor((exact + between)[: case.heads], dtype=torch.float64)
    rate = slopes * (1 - (case.layer_idx - 1) / (case.num_layers - 1) + 1e-5)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    decay = torch.exp(-rate[:, None, None] * distance) * (distance >= 0)
    out = (q @ k.mT * case.key_dim**-0.5 * decay) @ v
    last = torch.exp(-rate[:, None, None] * (TOKENS - 1 - torch.arange(TOKENS))[:, None])
    return {"out": out.transpose(1, 2), "temporal": (k * last).mT @ v}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for case in CASES:
            result = run_lightning(case) if case.family == "lightning" else run(case)
            print(f"{case.name}: standard deviation of out {result['out'].std():.2f}")
            arrays |= {f"{case.name}.{k}": v.numpy().astype(np.float32) for k, v in result.items()}
    path = Path(__file__).parent / "goldens" / "recurrent.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {len(arrays)} arrays, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
