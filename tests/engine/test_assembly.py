"""From a model and a config to an engine's parts: what one setting implies for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine import hybrid_runner
from tests.oracle import hybrid, swa
from uhrc_core.baseline import ChunkCache
from uhrc_core.errors import ConfigError
from uhrc_core.kinds import ComponentType
from uhrc_engine import assembly
from uhrc_engine.assembly import EngineParts, as_config, build_parts
from uhrc_engine.weights import Pretrained, load_pretrained


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    return hybrid_runner.load(tmp_path_factory.mktemp("kimi"), hybrid.CONFIGS["kimi"])


def parts(pretrained: Pretrained, page_size: int = 16, **tables: Any) -> EngineParts:
    cache = {"page_size": page_size, "max_context_len": 512, "max_requests": 4}
    config = {
        "cache": {"enable_unified_radix_tree": True} | cache | tables.pop("cache", {}),
        "components": {
            "full": {"num_tokens": 2 * 16 * 48},
            "recurrent": {"enable_extra_buffer": True, **tables.pop("recurrent", {})},
        },
    }
    return build_parts(pretrained, as_config(config | tables))


@pytest.mark.parametrize(("page_size", "chunk_size"), [(16, 256), (48, 288), (256, 256)])
def test_chunks_are_256_tokens_in_whole_pages_and_so_are_track_intervals(
    pretrained: Pretrained, page_size: int, chunk_size: int
) -> None:
    made = parts(pretrained, page_size)
    assert made.limits.chunk_size == chunk_size
    assert made.resolved.config.scheduler.chunked_prefill_size == chunk_size
    assert made.resolved.components[1].params.track_interval == chunk_size
    assert max(bucket.width for bucket in made.runner.buckets.all) == chunk_size


def test_the_chunk_size_and_the_track_interval_that_are_set_are_used(
    pretrained: Pretrained,
) -> None:
    scheduler = {"chunked_prefill_size": 128}
    made = parts(pretrained, scheduler=scheduler)
    assert (made.limits.chunk_size, made.resolved.components[1].params.track_interval) == (128, 128)
    made = parts(pretrained, scheduler=scheduler, recurrent={"track_interval": 32})
    assert (made.limits.chunk_size, made.resolved.components[1].params.track_interval) == (128, 32)


def test_without_reuse_is_the_same_config_with_the_cache_disabled(pretrained: Pretrained) -> None:
    made = parts(pretrained)
    without = made.without_reuse()
    assert type(without.cache) is ChunkCache
    assert without.runner is made.runner and without.limits == made.limits
    for kind in (ComponentType.FULL, ComponentType.RECURRENT):
        assert without.cache.available_size(kind) == made.cache.available_size(kind) > 0
    configured = parts(pretrained, cache={"disable_radix_cache": True})
    assert without.resolved.config == configured.resolved.config
    assert type(configured.cache) is ChunkCache


def test_what_the_steps_do_is_judged_with_the_config(
    pretrained: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parts(pretrained)
    monkeypatch.setattr(assembly, "FEATURES", frozenset({"mixed_chunked_prefill"}))
    with pytest.raises(ConfigError, match="mixed_chunked_prefill is not possible"):
        parts(pretrained)


@pytest.mark.parametrize(
    ("change", "planned"),
    [
        ({"sliding_window": 32}, r"'FULL': 2, 'SWA of 32 tokens': 2"),
        ({"layer_types": ["sliding_attention"] * 4}, r"'SWA of 33 tokens': 4"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, r"'SWA of 33 tokens': 1"),
    ],
)
def test_a_plan_of_other_windows_than_the_models_is_refused(
    tmp_path: Path, change: dict[str, Any], planned: str
) -> None:
    """Pages that are freed while the model still reads them would show only in its answers."""
    loaded = load_pretrained(swa.write_checkpoint(tmp_path, swa.CONFIGS["gpt_oss_33"]))
    config = as_config(
        {
            "cache": {"enable_unified_radix_tree": True, "page_size": 16, "max_context_len": 256},
            "components": {"full": {"num_tokens": 1024}, "swa": {"num_tokens": 1024}},
            "scheduler": {"chunked_prefill_size": 64},
        }
    )
    assert build_parts(loaded, config)
    with pytest.raises(ConfigError, match=planned + r".*, the model has .*'SWA of 33 tokens': 2"):
        build_parts(replace(loaded, config=loaded.config | change), config)
