"""``[components.recurrent]``: what other tables imply for it, what a pool must at least hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from uhrc_core.assemble import build_kv_cache
from uhrc_core.config.loading import parse_config
from uhrc_core.config.resolve import resolve
from uhrc_core.errors import ConfigError
from uhrc_recurrent.component import RecurrentComponent
from uhrc_recurrent.params import RecurrentParams

KDA = Path(__file__).parents[2] / "configs" / "hybrid" / "kda" / "config.json"


def settled(chunk: int | None = 512, **table: Any) -> RecurrentParams:
    config = parse_config(
        {
            "cache": {
                "enable_unified_radix_tree": True,
                "page_size": 128,
                "max_requests": 10,
                "max_context_len": 1024,
            },
            "components": {
                "full": {"num_tokens": 4096},
                "recurrent": {"enable_extra_buffer": True} | table,
            },
            "scheduler": {} if chunk is None else {"chunked_prefill_size": chunk},
            "model": {"hf_config": str(KDA)},
        },
        environ={},
    )
    params = resolve(config).config.components["recurrent"]
    assert isinstance(params, RecurrentParams)
    return params


@pytest.mark.parametrize(("overlap", "owned"), [(False, 2), (True, 3)])
def test_a_request_owns_a_running_slot_and_one_track_or_two_when_steps_overlap(
    overlap: bool, owned: int
) -> None:
    params = settled(overlap_steps=overlap)
    assert params.request_owned_slots == owned
    # Unset: what ten requests own, and as many again for snapshots.
    assert params.num_slots == 10 * owned * 2


def test_snapshot_headroom_is_kept_beyond_what_requests_own() -> None:
    assert settled(snapshot_headroom=2.5).num_slots == 20 + 50


def test_the_track_interval_follows_the_chunk_size_then_the_page_size() -> None:
    assert settled().track_interval == 512
    assert settled(chunk=None).track_interval == 128
    assert settled(track_interval=256).track_interval == 256


def test_the_backend_is_the_models_and_no_other() -> None:
    assert settled().backend == "kda"
    with pytest.raises(ConfigError, match="backend = 'gla': the model's layers are kda"):
        settled(backend="gla")


@pytest.mark.parametrize(("overlap", "least"), [(False, 3), (True, 4)])
def test_a_pool_that_cannot_run_a_request_and_keep_its_source_is_refused(
    overlap: bool, least: int
) -> None:
    with pytest.raises(ConfigError, match=rf"num_slots = {least - 1}: .* needs {least}"):
        settled(overlap_steps=overlap, num_slots=least - 1)
    assert settled(overlap_steps=overlap, num_slots=least).num_slots == least


def test_the_component_is_built_with_the_backends_kernel_chunk() -> None:
    config = parse_config(
        {
            "cache": {
                "enable_unified_radix_tree": True,
                "page_size": 48,
                "max_context_len": 960,
            },
            "components": {
                "full": {"num_tokens": 4800},
                "recurrent": {"enable_extra_buffer": True, "track_interval": 96},
            },
            "model": {"hf_config": str(KDA)},
        },
        environ={},
    )
    component = build_kv_cache(config).components[1]
    assert isinstance(component, RecurrentComponent)
    assert (component.plan.num_tracks, component.plan.interval) == (1, 96)
    assert component.plan.branching_grid == 192  # lcm of 48 tokens a page and 64 a chunk
