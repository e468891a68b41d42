"""An engine without a config: what a model picks for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import hybrid_runner
from tests.oracle import hybrid, swa
from uhrc_core import ComponentType, ConfigError
from uhrc_engine import Engine, Request
from uhrc_engine.assembly import build_parts, default_config
from uhrc_engine.weights import Pretrained, load_pretrained

FULL, SWA, RECURRENT = ComponentType


def sizes(pretrained: Pretrained) -> dict[ComponentType, int]:
    cache = build_parts(pretrained, default_config(pretrained)).cache
    return {each.kind: each.allocator.capacity for each in cache.components}


def test_a_path_is_enough_and_its_second_prompt_hits(tiny_checkpoint: Path) -> None:
    engine = Engine.from_pretrained(tiny_checkpoint)
    assert engine.max_context_len == 4096
    prompt = list(range(40))
    first, second = (engine.generate([Request(prompt, max_new_tokens=2)])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.token_ids == second.token_ids


def test_overrides_change_the_default(tiny_checkpoint: Path) -> None:
    overrides = ["cache.max_context_len=512", "components.full.num_tokens=1024"]
    engine = Engine.from_pretrained(tiny_checkpoint, overrides=overrides)
    assert engine.max_context_len == 512
    assert engine.cache.available_size(FULL) == 1024
    with pytest.raises(ConfigError, match=r"cache\.pagesize: unknown key"):
        Engine.from_pretrained(tiny_checkpoint, overrides=["cache.pagesize=16"])


def test_full_attention_has_pages_of_16_and_pools_of_four_contexts(tiny_checkpoint: Path) -> None:
    pretrained = load_pretrained(tiny_checkpoint)
    config = default_config(pretrained)
    assert (config.cache.page_size, config.cache.max_requests) == (16, 8)
    assert sizes(pretrained) == {FULL: 4 * 4096}


def test_window_layers_have_a_pool_of_what_eight_requests_own(tmp_path: Path) -> None:
    pretrained = load_pretrained(swa.write_checkpoint(tmp_path, swa.CONFIGS["gpt_oss_33"]))
    found = sizes(pretrained)
    length = min(pretrained.model.max_context_len, 4096)
    assert found[FULL] == 4 * -(-length // 16) * 16
    assert 0 < found[SWA] <= found[FULL]


def test_recurrent_layers_have_pages_of_128_and_track_slots(tmp_path: Path) -> None:
    pretrained = hybrid_runner.load(tmp_path, hybrid.CONFIGS["kimi"])
    assert default_config(pretrained).cache.page_size == 128
    assert sizes(pretrained)[RECURRENT] == 8 * 2 * 2
