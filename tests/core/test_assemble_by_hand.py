"""A cache by hand: keyword arguments in the place of a file, judged as the file would be."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

import uhrc_core as uhrc
from uhrc_core import ComponentType
from uhrc_core.config.by_hand import _KEYS
from uhrc_core.config.config import Config


def sizes(cache: uhrc.BasePrefixCache) -> dict[ComponentType, int]:
    return {each.kind: each.allocator.capacity for each in cache.components}


def test_two_sizes_make_a_unified_tree_whose_requests_fit_the_pool() -> None:
    cache = uhrc.build_kv_cache(page_size=16, full_tokens=4096)
    assert isinstance(cache, uhrc.UnifiedRadixCache)
    assert (cache.page_size, cache.dp_size) == (16, 1)
    assert sizes(cache) == {ComponentType.FULL: 4096}
    assert cache.req_to_token.max_context_len == 4096
    cache.check_fits(4096)


def test_a_request_of_a_large_pool_has_the_configs_default_length() -> None:
    cache = uhrc.build_kv_cache(full_tokens=65536)
    assert cache.req_to_token.max_context_len == 8192


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window_tokens": 64}, {ComponentType.FULL: 4096, ComponentType.SWA: 4096}),
        (
            {"window_tokens": 64, "swa_tokens": 512, "chunked_prefill_size": 128},
            {ComponentType.FULL: 4096, ComponentType.SWA: 512},
        ),
        (
            {"recurrent_backend": "gla", "max_requests": 4},
            {ComponentType.FULL: 4096, ComponentType.RECURRENT: 16},
        ),
        (
            {"recurrent_backend": "kda", "recurrent_slots": 9, "track_interval": 32},
            {ComponentType.FULL: 4096, ComponentType.RECURRENT: 9},
        ),
    ],
)
def test_a_keyword_of_a_component_adds_it(options: Any, expected: dict[ComponentType, int]) -> None:
    assert sizes(uhrc.build_kv_cache(page_size=16, full_tokens=4096, **options)) == expected


def test_without_pages_the_running_slot_itself_is_the_snapshot() -> None:
    cache = uhrc.build_kv_cache(full_tokens=64, recurrent_backend="gla", max_requests=4)
    assert sizes(cache)[ComponentType.RECURRENT] == 8


def test_by_hand_and_from_tables_the_same_cache_is_built() -> None:
    by_hand = uhrc.build_kv_cache(page_size=16, full_tokens=4096, max_requests=8, dp_size=2)
    tables = {
        "cache": {
            "enable_unified_radix_tree": True,
            "page_size": 16,
            "dp_size": 2,
            "max_requests": 8,
            "max_context_len": 4096,
        },
        "components": {"full": {"num_tokens": 4096}},
    }
    assert by_hand.digest() == uhrc.build_kv_cache(uhrc.parse_config(tables)).digest()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_sise": 16}, "page_sise: unknown keyword; did you mean page_size?"),
        ({"page_size": 16}, "full_tokens: required, but not set"),
        (
            {"page_size": 0, "full_tokens": 64},
            "page_size = 0: input should be greater than or equal to 1",
        ),
        (
            {"page_size": 16, "full_tokens": 100},
            "full_tokens = 100: not whole pages of page_size = 16; 96 would be",
        ),
        (
            {"full_tokens": 64, "eviction_policy": "lrv"},
            "eviction_policy = 'lrv': unknown policy; did you mean lru?",
        ),
        (
            {"full_tokens": 64, "window_tokens": 8, "swa_tokens": 32},
            "swa_tokens = 32: one request of max_context_len = 64 tokens needs 64; raise it, or "
            "set chunked_prefill_size (or lower it)",
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_keyword(options: Any, message: str) -> None:
    with pytest.raises(uhrc.ConfigError) as caught:
        uhrc.build_kv_cache(**options)
    assert caught.value.problems == (message,)


def test_the_combination_matrix_judges_it_too() -> None:
    with pytest.raises(uhrc.ConfigError, match="name exactly one in recurrent_backend"):
        uhrc.build_kv_cache(full_tokens=64, recurrent_slots=8)
    with pytest.raises(uhrc.ConfigError, match="a tree has one auxiliary component"):
        uhrc.build_kv_cache(full_tokens=64, window_tokens=8, recurrent_backend="gla")


def test_a_config_and_keywords_exclude_each_other() -> None:
    with pytest.raises(uhrc.ConfigError, match="told nothing; pass load_config"):
        uhrc.build_kv_cache()
    with pytest.raises(uhrc.ConfigError, match="both a config and page_size, full_tokens"):
        uhrc.build_kv_cache(Config(), page_size=16, full_tokens=64)


def test_the_environment_changes_files_and_not_what_a_program_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UHRC_ENABLE_UNIFIED_RADIX_TREE", "0")
    assert isinstance(uhrc.build_kv_cache(full_tokens=64), uhrc.UnifiedRadixCache)
    monkeypatch.setenv("UHRC_PLUGINS", "swa")
    with pytest.raises(uhrc.PluginError, match="'full'"):
        uhrc.build_kv_cache(full_tokens=64)


def test_every_keyword_says_where_a_config_has_it() -> None:
    assert set(get_type_hints(uhrc.CacheOptions)) == set(_KEYS)
    documented = uhrc.CacheOptions.__doc__ or ""
    assert [name for name in _KEYS if name not in documented] == []


def test_the_names_an_embedder_needs_are_here() -> None:
    needed = {"StateSlots", "CacheEvent", "CacheStats", "Request", "RequestState", "ComponentType"}
    assert needed < set(uhrc.__all__)
    assert sorted(uhrc.__all__) == uhrc.__all__
    assert all(hasattr(uhrc, name) for name in uhrc.__all__)
