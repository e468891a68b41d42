"""From a config to a cache: sizes, picked components, what does not fit, factories that fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.core.fake_plugins import FakeSite
from uhrc_core import (
    Config,
    UnifiedRadixCache,
    build_kv_cache,
    make_device_pools,
    parse_config,
    resolve,
)
from uhrc_core.assemble import make_components
from uhrc_core.baseline import ChunkCache, RadixCache
from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.eviction import FIFO, LFU, LRU, SLRU, Priority
from uhrc_core.combination import (
    EXTRA_BUFFER,
    ONE_BACKEND,
    PAGED,
    REUSE,
    TRACK_ON_PAGES,
    UNIFIED,
    table_of,
)
from uhrc_core.config.resolved import ResolvedComponent
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.kinds import ComponentType
from uhrc_core.pools import PagedIndexAllocator, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from uhrc_core.registry.specs import ComponentContext

#: 2 layers, 2 KV heads of 32 values: K and V of one token are 2 * 2 * 2 * 32 * 4 = 1024 bytes.
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}
BYTES_PER_TOKEN = 1024
RECURRENT = table_of(ComponentType.RECURRENT)

HYBRID = """
from uhrc_core.registry.plan import LayerKind
from uhrc_core.kinds import ComponentType

@hookimpl
def uhrc_component_specs():
    return [fake_spec("state", "RECURRENT")]

@hookimpl
def uhrc_layer_kinds(hf_config):
    if hf_config.get("model_type") != "hybrid":
        return None
    full = LayerKind(ComponentType.FULL, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 32})
    return [full, LayerKind(ComponentType.RECURRENT, {}, "kda")]
"""


MAMBA = """
from uhrc_core.registry.recurrent import RecurrentBackendSpec

@hookimpl
def uhrc_recurrent_backends():
    return [RecurrentBackendSpec("mamba", NoOptions, print, lambda hf_config: None)]
"""

RWKV = """
from uhrc_core.plugin_api import BufferShape, RecurrentBackendSpec, RecurrentModel, StateLayout

def state_layout(params):
    return StateLayout(BufferShape("temporal", (2, 8, 8), "float32"))

def matches(hf_config):
    if hf_config.get("model_type") != "rwkv":
        return None
    return RecurrentModel(NoOptions(), tuple(hf_config["recurrent"]), 2)

@hookimpl
def uhrc_recurrent_backends():
    return [RecurrentBackendSpec("rwkv", NoOptions, state_layout, matches)]
"""


def config(**tables: dict[str, Any]) -> Config:
    """A valid FULL config of page 16 and 1024 tokens a request, with tables changed."""
    cache = {
        "enable_unified_radix_tree": True,
        "page_size": 16,
        "max_context_len": 1024,
        **tables.pop("cache", {}),
    }
    return parse_config(
        {"components": {"full": {"num_tokens": 4096}}, **tables, "cache": cache}, environ={}
    )


def problems(source: Config, **arguments: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(source, **arguments)
    return caught.value.problems


# -- the cache ---------------------------------------------------------------------------------


def test_a_cache_is_built_as_configured() -> None:
    cache = build_kv_cache(config(cache={"dp_size": 2, "max_requests": 7}))
    assert (cache.page_size, cache.dp_size) == (16, 2)
    assert (cache.req_to_token.max_requests, cache.req_to_token.max_context_len) == (7, 1024)
    (full,) = cache.components
    assert (full.kind, full.eviction_priority) == (ComponentType.FULL, 2)
    assert isinstance(full.allocator, PagedTokenToKVPoolAllocator)
    assert [cache.available_size(ComponentType.FULL, rank) for rank in (0, 1)] == [4096, 4096]


def test_full_is_made_first_and_the_others_are_given_its_allocator() -> None:
    seen: list[PagedIndexAllocator | None] = []

    def watched(part: ResolvedComponent) -> ResolvedComponent:
        def make(params: Any, context: ComponentContext) -> TreeComponent:
            seen.append(context.full_allocator)
            return part.spec.make_component(params, context)

        return replace(part, spec=replace(part.spec, make_component=make))

    resolved = resolve(config(components=recurrent()))
    parts = tuple(map(watched, resolved.components))
    full, state = make_components(replace(resolved, components=parts))
    assert seen[0] is None and seen[1] is full.allocator
    assert (full.eviction_priority, state.eviction_priority) == (2, 0)


def test_page_size_one_takes_the_token_allocator() -> None:
    (full,) = build_kv_cache(config(cache={"page_size": 1})).components
    assert isinstance(full.allocator, TokenToKVPoolAllocator)


@pytest.mark.parametrize(
    ("name", "policy"),
    [("lru", LRU), ("lfu", LFU), ("slru", SLRU), ("fifo", FIFO), ("priority", Priority)],
)
def test_the_eviction_policy_is_the_named_one(name: str, policy: type) -> None:
    (full,) = build_kv_cache(config(cache={"eviction_policy": name})).components
    assert type(full.policy) is policy


def test_policy_options_reach_the_policy() -> None:
    cache = {"eviction_policy": "slru", "eviction_options": {"protect_hits": 5}}
    (full,) = build_kv_cache(config(cache=cache)).components
    assert isinstance(full.policy, SLRU) and full.policy.protect_hits == 5


def test_a_config_made_in_python_is_checked_when_resolved() -> None:
    source = config().model_copy(
        update={"cache": config().cache.model_copy(update={"eviction_policy": "lruu"})}
    )
    assert problems(source) == (
        "cache.eviction_policy = 'lruu': unknown policy; did you mean lru?",
    )


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ({}, UnifiedRadixCache),
        ({"enable_unified_radix_tree": False}, RadixCache),
        ({"disable_radix_cache": True}, ChunkCache),
        ({"enable_unified_radix_tree": False, "disable_radix_cache": True}, ChunkCache),
    ],
)
def test_the_flags_choose_the_cache(cache: dict[str, Any], expected: type) -> None:
    assert type(build_kv_cache(config(cache=cache))) is expected


def test_the_plain_cache_has_no_other_policy_than_lru() -> None:
    cache = {"enable_unified_radix_tree": False, "eviction_policy": "lfu"}
    assert problems(config(cache=cache)) == (
        "cache.eviction_policy = 'lfu': without the unified tree it is lru; set lru, or "
        "cache.enable_unified_radix_tree = true",
    )


def test_the_plain_cache_holds_full_alone(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    both = {"full": {"num_tokens": 4096}, "state": {"num_slots": 4, "enable_extra_buffer": True}}
    source = config(components=both, cache={"enable_unified_radix_tree": False})
    (problem,) = problems(source)
    assert problem.startswith(f"with {RECURRENT} + {REUSE}, {UNIFIED} is required: the plain trees")


@pytest.mark.parametrize("unified", [True, False])
def test_a_cache_without_reuse_serves_every_component(unified: bool) -> None:
    both = {"full": {"num_tokens": 4096}, "recurrent": {"backend": "kda"}}
    flags = {"enable_unified_radix_tree": unified, "disable_radix_cache": True}
    cache = build_kv_cache(config(components=both, cache=flags))
    assert type(cache) is ChunkCache
    assert [c.kind for c in cache.components] == [ComponentType.FULL, ComponentType.RECURRENT]


def test_a_cache_without_reuse_evicts_nothing_so_any_policy_will_do() -> None:
    flags = {"enable_unified_radix_tree": False, "disable_radix_cache": True}
    assert build_kv_cache(config(cache=flags | {"eviction_policy": "lfu"}))


# -- which components --------------------------------------------------------------------------


def test_without_components_and_model_there_is_nothing_to_build() -> None:
    assert problems(config(components={})) == (
        "components: none named; add one, or set model.hf_config",
    )


def test_the_model_picks_the_components(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    source = config(
        components={},
        model={"hf_config": str(tmp_path / "config.json")},
        memory={"hbm_bytes": 8 * 2**20},
    )
    resolved = resolve(source)
    assert list(resolved.config.components) == ["full"]
    assert source.components == {}


def test_a_hybrid_model_picks_both_of_its_components(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    monkeypatch.setenv("UHRC_PLUGINS", "full,state")
    found = problems(config(components={}), hf_config={"model_type": "hybrid"})
    assert [line.partition(":")[0] for line in found] == [
        f"with {RECURRENT} + {REUSE} + {PAGED}, {EXTRA_BUFFER} is required",
        "components.state.backend = 'kda'",  # UHRC_PLUGINS leaves it out
    ]


def test_a_model_that_no_plugin_knows_says_what_was_seen_and_who_was_asked(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "1 / 0")
    (problem,) = problems(config(), hf_config={"model_type": "rwkv", "architectures": ["Rwkv"]})
    assert problem.startswith(
        "model: no installed plugin knows model_type = 'rwkv', architectures = ['Rwkv']; install "
        "the one that does, or if all its layers are full attention set model.full_attention = "
    )
    asked = problem.split("asked: ")[1].split(", ")
    assert "full" in asked and problem.endswith("; broken, so not asked: bomb")


def test_an_operator_can_say_that_all_layers_are_full_attention() -> None:
    novel = {**LLAMA, "model_type": "novel"}
    assert len(problems(config(), hf_config=novel)) == 1
    said = resolve(config(model={"full_attention": True}), hf_config=novel)
    assert said.components[0].layers == resolve(config(), hf_config=LLAMA).components[0].layers
    (problem,) = problems(config(model={"full_attention": True}), hf_config={"model_type": "rwkv"})
    assert problem.startswith("model.full_attention: the sizes of the layers are not")


def test_a_model_that_is_not_known_is_the_only_problem() -> None:
    """What does not fit an unknown model would be reported wrongly."""
    both = {"full": {"num_tokens": 4096}, "recurrent": {"num_slots": 4}}
    (problem,) = problems(config(components=both), hf_config={**LLAMA, "model_type": "leaky"})
    assert problem.startswith("model: no installed plugin knows model_type = 'leaky'")


def test_a_model_file_that_cannot_be_read(tmp_path: Path) -> None:
    (problem,) = problems(config(model={"hf_config": str(tmp_path / "none.json")}))
    assert "none.json': cannot be read as JSON: " in problem
    (tmp_path / "list.json").write_text("[]")
    (problem,) = problems(config(model={"hf_config": str(tmp_path / "list.json")}))
    assert problem.endswith("list.json': holds no JSON object")


def test_a_model_with_a_size_that_is_none_names_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "num_key_value_heads": 0}))
    assert problems(config(model={"hf_config": str(file)})) == (
        "model.hf_config: num_key_value_heads = 0: must be an integer from 1 to 2147483647",
    )
    file.write_text("[" * 100_000)
    (problem,) = problems(config(model={"hf_config": str(file)}))
    assert problem.startswith(f"model.hf_config = '{file}': cannot be read as JSON: ")


KDA = Path(__file__).parents[2] / "configs" / "hybrid" / "kda" / "config.json"


def flagged(model: Path, *overrides: str) -> Config:
    """A config that names a model and no component, with these flags on the command line."""
    tables = {
        "cache": {"enable_unified_radix_tree": True, "page_size": 16, "max_context_len": 1024},
        "model": {"hf_config": str(model)},
        "memory": {"hbm_bytes": 2**30},
    }
    return parse_config(tables, overrides, environ={})


def test_flags_change_the_tables_that_the_model_picks() -> None:
    source = flagged(KDA, "components.recurrent.enable_extra_buffer=true")
    found = resolve(source).config
    assert list(found.components) == ["full", "recurrent"]
    assert found.components["recurrent"].model_dump()["enable_extra_buffer"] is True
    assert found.components["recurrent"].backend_name == "kda"
    alone = flagged(KDA, "components.full.num_tokens=2048")
    assert problems(alone)[0].endswith("or cache.page_size = 1") and len(problems(alone)) == 1


def test_a_flag_for_a_component_that_the_model_has_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    source = flagged(tmp_path / "config.json", "components.recurrent.enable_extra_buffer=true")
    assert problems(source) == (
        "components.recurrent: the model has no RECURRENT layer; set nothing of it",
    )


def test_a_table_that_the_model_does_not_need_is_not_settled() -> None:
    three = {"full": {"num_tokens": 4096}, "swa": {}, "recurrent": {"enable_extra_buffer": True}}
    assert problems(config(components=three), hf_config=json.loads(KDA.read_text())) == (
        "components.swa: the model has no SWA layer; remove the table",
    )


def test_without_a_model_the_flags_are_all_there_is() -> None:
    source = parse_config({}, ["components.recurrent.enable_extra_buffer=true"], environ={})
    assert problems(source) == ("components: none named; add one, or set model.hf_config",)
    tables = {"cache": {"max_context_len": 16}}
    source = parse_config(tables, ["components.full.num_tokens=64"], environ={})
    assert [part.key for part in resolve(source).components] == ["components.full"]


def recurrent(**changes: Any) -> dict[str, Any]:
    table = {"backend": "kda", "enable_extra_buffer": True, "num_slots": 20}
    return {"full": {"num_tokens": 4096}, "recurrent": {**table, **changes}}


def test_a_backend_that_is_not_there_lists_those_that_are(site: FakeSite) -> None:
    site.install("uhrc-mamba", {"mamba": "mamba_module"}, MAMBA)
    assert problems(config(components=recurrent(backend="x"))) == (
        "components.recurrent.backend = 'x': no recurrent backend; it can be gdn, gla, kda, mamba; "
        "for another, install the distribution that brings it",
    )


def test_the_model_alone_can_name_a_backend_of_another_plugin(site: FakeSite) -> None:
    site.install("uhrc-rwkv", {"rwkv": "rwkv_module"}, RWKV)
    table = {"enable_extra_buffer": True, "num_slots": 20}
    source = config(components={"full": {"num_tokens": 4096}, "recurrent": table})
    _, state = resolve(
        source, hf_config={**LLAMA, "model_type": "rwkv", "recurrent": [1]}
    ).components
    assert state.context.backend is not None
    assert (state.context.backend.name, state.params.backend_name) == ("rwkv", "rwkv")
    assert [layer.backend for layer in state.layers] == ["rwkv"]


def test_the_sizes_of_attention_layers_are_needed_where_there_are_some(site: FakeSite) -> None:
    site.install("uhrc-rwkv", {"rwkv": "rwkv_module"}, RWKV)
    table = {"enable_extra_buffer": True, "num_slots": 20}
    source = config(components={"full": {"num_tokens": 4096}, "recurrent": table})
    assert problems(source, hf_config={"model_type": "rwkv", "recurrent": [1]})[0] == (
        "model: rwkv knows model_type = 'rwkv', but the sizes of its full-attention layers are not "
        "in the config"
    )
    pure = resolve(source, hf_config={"model_type": "rwkv", "recurrent": [0, 1]})
    assert [len(part.layers) for part in pure.components] == [0, 2]


@pytest.mark.parametrize(
    ("table", "shown"),
    [
        ({}, "track_interval = 250, from scheduler.chunked_prefill_size"),
        ({"track_interval": 250}, "track_interval = 250"),
    ],
)
def test_a_track_interval_off_the_pages_is_named(table: dict[str, Any], shown: str) -> None:
    source = config(components=recurrent(**table), scheduler={"chunked_prefill_size": 250})
    assert problems(source) == (
        f"components.recurrent.{shown}: not whole pages of cache.page_size = 16; set a multiple",
    )


def test_a_table_that_does_not_settle_is_not_judged_by_the_matrix() -> None:
    """Neither the backend nor the interval that `settled` would have found is missed then."""
    table = {"enable_extra_buffer": True, "track_interval": 250}
    source = config(components={"full": {"num_tokens": 4096}, "recurrent": table})
    (problem,) = problems(source, hf_config=json.loads(KDA.read_text()))
    assert problem.startswith("components.recurrent.track_interval = 250: ")
    table = {"enable_extra_buffer": True, "backend": "x"}
    source = config(components={"full": {"num_tokens": 4096}, "recurrent": table})
    assert problems(source, hf_config=json.loads(KDA.read_text())) == (
        "components.recurrent.backend = 'x': the model's layers are kda",
    )


def test_a_missing_table_is_one_problem() -> None:
    source = config(components={"recurrent": {"num_slots": 20, "enable_extra_buffer": True}})
    assert problems(source, hf_config=json.loads(KDA.read_text())) == (
        "components: the model has FULL layers; add a table for them, such as [components.full]",
    )


def test_components_and_layers_must_match(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    both = {"full": {"num_tokens": 4096}, "state": {"num_slots": 4, "enable_extra_buffer": True}}
    assert problems(config(components=both), hf_config=LLAMA) == (
        "components.state: the model has no RECURRENT layer; remove the table",
    )
    assert problems(config(), hf_config={"model_type": "hybrid"}) == (
        "components: the model has RECURRENT layers; add a table for them, such as "
        "[components.recurrent]",
    )


def test_two_components_of_one_kind_exclude_each_other(site: FakeSite) -> None:
    source = "@hookimpl\ndef uhrc_component_specs():\n    return [fake_spec('other')]\n"
    site.install("uhrc-other", {"other": "other_module"}, source)
    both = {"full": {"num_tokens": 4096}, "other": {"num_slots": 4096}}
    assert problems(config(components=both)) == (
        "components: full and other are both FULL; keep one of them",
    )


def test_all_matrix_violations_come_at_once(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    state = {"num_slots": 4, "track_interval": 100, "backend": None}
    found = problems(config(components={"state": state}))
    assert [line.split(":")[0] for line in found] == [
        "always, [components.full] is required",
        f"with {RECURRENT} + {REUSE} + {PAGED}, {EXTRA_BUFFER} is required",
        f"with {RECURRENT} + {REUSE}, {TRACK_ON_PAGES} is required",
        f"with {RECURRENT}, {ONE_BACKEND} is required",
    ]


def test_what_the_engine_does_is_judged_too(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    both = {"full": {"num_tokens": 4096}, "state": {"num_slots": 4, "enable_extra_buffer": True}}
    source = config(components=both)
    assert [part.spec.name for part in resolve(source).components] == ["full", "state"]
    (problem,) = problems(source, engine_features=["speculative_decoding"])
    assert problem.startswith(
        f"with {REUSE} + {EXTRA_BUFFER}, speculative_decoding is not possible: "
    )


# -- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2])
def test_the_memory_sizes_the_pool_that_names_no_size(dp_size: int) -> None:
    hbm_bytes = 2000 * BYTES_PER_TOKEN + 5
    source = config(
        components={"full": {}}, memory={"hbm_bytes": hbm_bytes}, cache={"dp_size": dp_size}
    )
    (full,) = resolve(source, hf_config=LLAMA).components
    assert full.params.num_units == 2000 == 125 * 16
    assert full.pool is not None
    assert full.pool.num_units == dp_size * 2000
    assert full.pool.num_bytes == dp_size * 2000 * BYTES_PER_TOKEN


def test_the_open_pool_gets_what_the_others_leave(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    state = {"num_slots": 1024, "enable_extra_buffer": True}
    source = config(
        components={"full": {}, "state": state}, memory={"hbm_bytes": 1024 * 512 + 1024 * 10}
    )
    full, _ = resolve(source, hf_config={"model_type": "hybrid"}).components
    assert full.params.num_units == 1024  # one FULL layer: 512 bytes a token


def test_only_one_pool_can_be_left_open(site: FakeSite) -> None:
    site.install("uhrc-state", {"state": "state_module"}, HYBRID)
    source = config(
        components={"full": {}, "state": {"enable_extra_buffer": True}},
        memory={"hbm_bytes": 2**30},
    )
    hint = "not set; set it, or set memory.hbm_bytes and model.hf_config to have one pool sized"
    assert problems(source, hf_config={"model_type": "hybrid"}) == (
        f"components.full.num_tokens: {hint}",
        f"components.state.num_slots: {hint}",
    )


def test_a_size_needs_memory_and_a_model() -> None:
    hint = "not set; set it, or set memory.hbm_bytes and model.hf_config to have one pool sized"
    missing = (f"components.full.num_tokens: {hint}",)
    assert problems(config(components={"full": {}})) == missing
    assert problems(config(components={"full": {}}, memory={"hbm_bytes": 2**30})) == missing
    assert problems(config(components={"full": {}}), hf_config=LLAMA) == missing


def test_a_memory_too_small_for_one_request_shows_the_sum() -> None:
    source = config(components={"full": {}}, memory={"hbm_bytes": 1024 * BYTES_PER_TOKEN - 1})
    assert problems(source, hf_config=LLAMA) == (
        "memory.hbm_bytes = 1048575: the other pools leave 1048575 bytes for components.full, "
        "where one request of cache.max_context_len = 1024 tokens needs 1048576; raise it, or "
        "lower cache.max_context_len",
    )


def test_pools_larger_than_the_memory_are_refused() -> None:
    source = config(memory={"hbm_bytes": 4096 * BYTES_PER_TOKEN - 1})
    assert problems(source, hf_config=LLAMA) == (
        "memory.hbm_bytes = 4194303: the pools of one dp rank take 4194304; make them smaller",
    )


@pytest.mark.parametrize("num_tokens", [1024, 1040])
def test_a_pool_for_exactly_one_request_is_enough(num_tokens: int) -> None:
    assert build_kv_cache(config(components={"full": {"num_tokens": num_tokens}}))


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    assert problems(config(components={"full": {"num_tokens": 1008}})) == (
        "components.full.num_tokens = 1008: one request of cache.max_context_len = 1024 tokens "
        "needs 1024; raise it, or lower cache.max_context_len",
    )


def test_a_pool_off_the_page_grid_says_the_next_smaller_one_unless_that_is_too_small() -> None:
    assert problems(config(components={"full": {"num_tokens": 15}})) == (
        "components.full.num_tokens = 15: one request of cache.max_context_len = 1024 tokens needs "
        "1024; raise it, or lower cache.max_context_len",
    )
    found = problems(config(components={"full": {"num_tokens": 4100}}))
    assert found == (
        "components.full.num_tokens = 4100: not whole pages of cache.page_size = 16; 4096 would be",
    )


def test_a_request_table_beyond_the_host_memory_is_refused() -> None:
    huge = {"max_requests": 65536, "max_context_len": 2**24}
    assert problems(config(cache=huge))[0] == (
        "cache.max_requests * cache.max_context_len = 1099511627776: the request table is limited "
        "to 4294967296 entries of 4 bytes; lower one of them"
    )


def test_indices_of_all_ranks_fit_int32() -> None:
    source = config(components={"full": {"num_tokens": 2**30}}, cache={"dp_size": 2})
    assert problems(source) == (
        "components.full.num_tokens = 1073741824: on cache.dp_size = 2 ranks, more than "
        "2147483647 int32 indices; lower it",
    )


def test_an_attention_that_is_not_the_models() -> None:
    source = config(components={"full": {"num_tokens": 4096, "attention": "mla"}})
    assert problems(source, hf_config=LLAMA) == (
        "components.full: attention = 'mla': the model has gqa",
    )


# -- factories ---------------------------------------------------------------------------------

FACTORY_ERROR = "report this to the plugin's author"


def broken_full(factory: str, result: str) -> str:
    return f"""
def broken(*args):
    {result}

@hookimpl
def uhrc_component_specs():
    return [fake_spec("odd", {factory}=broken)]
"""


def odd_config() -> Config:
    return config(components={"odd": {"num_slots": 4096}})


def test_a_component_factory_that_raises_is_a_plugin_error(site: FakeSite) -> None:
    source = broken_full("make_component", "raise ValueError('no')")
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        build_kv_cache(odd_config())
    assert str(caught.value) == (
        f"components.odd: make_component raised ValueError: no; {FACTORY_ERROR}"
    )


def test_a_component_factory_that_returns_something_else(site: FakeSite) -> None:
    site.install("uhrc-odd", {"odd": "odd_module"}, broken_full("make_component", "return 7"))
    with pytest.raises(PluginError) as caught:
        build_kv_cache(odd_config())
    assert str(caught.value) == (
        "components.odd: make_component returned 7: input should be an instance of TreeComponent; "
        + FACTORY_ERROR
    )


RETURNS = {
    "features": ("None", "None: input should be a valid frozenset"),
    "num_units_min": ("None", "None: input should be a valid integer"),
    "with_num_units": ("None", "None: input should be an instance of ComponentParams"),
    "settled": ("7", "7: input should be an instance of ComponentParams"),
    "num_units": ("property(lambda self: 'x')", "'x': input should be a valid integer"),
    "backend_name": ("property(lambda self: 7)", "7: input should be a valid string"),
}


@pytest.mark.parametrize(("method", "value", "mistake"), [(k, *v) for k, v in RETURNS.items()])
def test_a_table_whose_methods_return_something_else(
    site: FakeSite, method: str, value: str, mistake: str
) -> None:
    attribute = value if value.startswith("property") else f"lambda self, *args: {value}"
    source = f"""
    class Odd(FakeParams):
        {method} = {attribute}

    @hookimpl
    def uhrc_component_specs():
        return [fake_spec("odd", params_model=Odd)]
    """
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        resolve(odd_config())
    assert str(caught.value) == f"components.odd: {method} returned {mistake}; {FACTORY_ERROR}"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("'x'", "plan_pool returned 'x': input should be an instance of PoolPlan"),
        ("PoolPlan((), 0)", "plan_pool returned num_units = 0: input should be greater than "),
        (
            "PoolPlan((BufferPlan('a', (-1,), 'int8'),), 5)",
            "plan_pool returned buffers.0.shape.0 = -1: input should be greater than ",
        ),
        (
            "PoolPlan((BufferPlan('a', (1,), 'nodtype'),), 5)",
            "plan_pool raised TypeError: data type 'nodtype' not understood",
        ),
    ],
)
def test_a_plan_that_is_none_is_a_plugin_error(site: FakeSite, plan: str, message: str) -> None:
    source = "from uhrc_core.registry.plan import BufferPlan, PoolPlan\n"
    source += dedent(broken_full("plan_pool", f"return {plan}"))
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        resolve(odd_config(), hf_config=LLAMA)
    assert str(caught.value).startswith(f"components.odd: {message}")


@pytest.mark.parametrize("made", ["None", "'lru'"])
def test_a_policy_that_is_none_is_found_before_the_first_insert(site: FakeSite, made: str) -> None:
    source = f"""
    @hookimpl
    def uhrc_eviction_policies():
        return [EvictionPolicySpec("odd", NoOptions, lambda options: {made})]
    """
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        resolve(config(cache={"eviction_policy": "odd"}))
    assert str(caught.value) == (
        f"cache.eviction_policy = 'odd': make_policy returned {made}: input should be an instance "
        f"of EvictionPolicy; {FACTORY_ERROR}"
    )


@pytest.mark.parametrize("factory", ["plan_pool", "make_device_pool"])
def test_pool_factories_that_raise_are_plugin_errors(site: FakeSite, factory: str) -> None:
    site.install("uhrc-odd", {"odd": "odd_module"}, broken_full(factory, "raise OSError('no')"))
    with pytest.raises(PluginError) as caught:
        make_device_pools(resolve(odd_config(), hf_config=LLAMA))
    assert str(caught.value) == f"components.odd: {factory} raised OSError: no; {FACTORY_ERROR}"


@pytest.mark.parametrize("method", ["features", "num_units_min", "with_num_units"])
def test_a_table_whose_methods_raise_is_a_plugin_error(site: FakeSite, method: str) -> None:
    source = f"""
    class Odd(FakeParams):
        def {method}(self, *args):
            raise ValueError("no")

    @hookimpl
    def uhrc_component_specs():
        return [fake_spec("odd", params_model=Odd)]
    """
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        resolve(odd_config())
    assert str(caught.value) == f"components.odd: {method} raised ValueError: no; {FACTORY_ERROR}"


def test_a_table_whose_validator_breaks_is_a_plugin_error(site: FakeSite) -> None:
    source = """
    class Odd(FakeParams):
        def model_post_init(self, context):
            raise KeyError("no")

    @hookimpl
    def uhrc_component_specs():
        return [fake_spec("odd", params_model=Odd)]
    """
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    with pytest.raises(PluginError) as caught:
        odd_config()
    assert str(caught.value) == f"components.odd: Odd raised KeyError: 'no'; {FACTORY_ERROR}"


def test_device_pools_have_the_bytes_that_were_planned() -> None:
    resolved = resolve(config(), hf_config=LLAMA)
    pool = make_device_pools(resolved)[ComponentType.FULL]
    (full,) = resolved.components
    assert full.pool is not None
    assert pool.layout.total_bytes == full.pool.num_bytes == 4096 * BYTES_PER_TOKEN
    assert [spec.shape for spec in pool.layout.buffers] == [b.shape for b in full.pool.buffers]


def test_device_pools_need_a_model() -> None:
    with pytest.raises(ConfigError, match=r"model.hf_config: not set, so the pools have no shape"):
        make_device_pools(resolve(config()))


def test_a_kind_of_layer_without_a_component_to_pick(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HYBRID.replace('return [fake_spec("state", "RECURRENT")]', "return []")
    site.install("uhrc-state", {"state": "state_module"}, source)
    monkeypatch.setenv("UHRC_PLUGINS", "full,state")
    found = problems(config(components={}), hf_config={"model_type": "hybrid"})
    assert found == (
        "components: the model has RECURRENT layers, and the installed components of that kind "
        "are: none; name one as [components.<name>]",
    )


def test_a_component_under_a_name_that_brings_none() -> None:
    (params,) = config().components.values()
    source = config().model_copy(update={"components": {"engine": params}})
    assert problems(source) == ("components.engine: no such component",)


def test_a_path_is_not_taken_for_a_config() -> None:
    with pytest.raises(ConfigError, match=r"'my.toml' is no Config; .*load_config"):
        build_kv_cache("my.toml")  # pyright: ignore[reportArgumentType]
