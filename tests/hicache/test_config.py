"""``[hicache]``: from a table to hooks that are called; what is wrong with it, by its key."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from tests.core.fake_plugins import FakeSite
from tests.support import PlainRequest, admit, run_tokens
from uhrc_core import Config, build_kv_cache, load_config, parse_config, resolve
from uhrc_core.baseline import ChunkCache
from uhrc_core.cache.hicache import NO_HICACHE
from uhrc_core.cache.host_tier import WriteBackEvent, WriteThroughEvent
from uhrc_core.cache.params import EvictParams
from uhrc_core.cli.app import make_app
from uhrc_core.config.schema import config_schema
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.kinds import ComponentType
from uhrc_core.registry.catalog import installed_plugins
from uhrc_core.registry.specs import HiCacheParams
from uhrc_core.testing import CopyingTier, PaperPool
from uhrc_hicache_stub.hooks import RecordingHooks
from uhrc_hicache_stub.plugin import StubParams

FULL = ComponentType.FULL

OTHER = """
from uhrc_core.registry.specs import HiCacheSpec

class DiskParams(HiCacheParams):
    path: str

def make_hooks(params, context):
    from uhrc_hicache_stub.hooks import RecordingHooks
    made = RecordingHooks()
    made.context = context
    made.params = params
    return made if params.path else params.path

@hookimpl
def uhrc_hicache_hooks():
    return [HiCacheSpec("disk", DiskParams, make_hooks)]
"""


def tables(**hicache: Any) -> dict[str, Any]:
    return {
        "cache": {"enable_unified_radix_tree": True, "max_context_len": 32},
        "components": {"full": {"num_tokens": 64}},
        "hicache": hicache,
    }


def problems(raw: dict[str, Any], *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(parse_config(raw, overrides))
    return caught.value.problems


# -- what it builds ------------------------------------------------------------------------------


def test_the_named_tier_is_told_and_keeps_the_latest() -> None:
    cache = build_kv_cache(parse_config(tables(name="stub", num_records_max=2)))
    hooks = cache.hicache.hooks
    assert isinstance(hooks, RecordingHooks)
    for tokens in ([1, 2, 3], [1, 2, 4, 5]):
        req = PlainRequest("r", tokens)
        admit(cache, req)
        run_tokens(cache, req, len(tokens))
        cache.cache_finished_req(req)
    cache.evict(EvictParams(num_tokens=1))
    cache.reset()
    assert (hooks.lookups, hooks.resets) == (2, 1)
    assert (hooks.write_throughs.calls, hooks.write_throughs.units[FULL]) == (2, 7)
    assert (hooks.write_backs.calls, hooks.write_backs.units[FULL]) == (1, 1)
    assert hooks.write_backs.num_bytes == 0, "no model is known"
    latest = [(record.event, record.start, record.stop) for record in hooks.records]
    assert latest == [(WriteThroughEvent, 0, 4), (WriteBackEvent, 2, 3)]
    assert hooks.records[-1].namespace == (None, 0) and hooks.records[-1].units == {FULL: 1}


def test_no_table_no_tier() -> None:
    raw = tables()
    del raw["hicache"]
    config = parse_config(raw)
    assert config.hicache is None and build_kv_cache(config).hicache is NO_HICACHE


def test_a_cache_that_shares_nothing_calls_nobody() -> None:
    cache = build_kv_cache(parse_config(tables(name="stub"), ["cache.disable_radix_cache=true"]))
    assert isinstance(cache, ChunkCache) and cache.hicache is NO_HICACHE


def test_a_tier_learns_the_cache_it_is_made_for(site: FakeSite) -> None:
    site.install("uhrc-disk", {"disk": "disk_module"}, OTHER)
    raw = tables(name="disk", path="/tmp")
    raw["components"]["recurrent"] = {"backend": "kda", "num_slots": 6}
    raw["cache"]["dp_size"] = 2
    pool = object()
    cache = build_kv_cache(parse_config(raw), {FULL: pool})
    hooks: Any = cache.hicache.hooks
    assert hooks.params.path == "/tmp"
    context = hooks.context
    assert (context.page_size, context.dp_size) == (1, 2)
    assert {kind.name: part.num_units for kind, part in context.components.items()} == {
        "FULL": 64,
        "RECURRENT": 6,
    }
    assert context.components[FULL].device_pool is pool
    assert context.components[ComponentType.RECURRENT].device_pool is None


COPYING = """
from uhrc_core.registry.specs import HiCacheSpec
from uhrc_core.testing import CopyingTier

@hookimpl
def uhrc_hicache_hooks():
    return [HiCacheSpec("copying", HiCacheParams, lambda params, context: CopyingTier(context))]
"""


def test_a_tier_that_moves_data_is_not_assembled_without_pools(site: FakeSite) -> None:
    site.install("uhrc-copying", {"copying": "copying_module"}, COPYING)
    raw = tables(name="copying")
    raw["components"]["recurrent"] = {"backend": "kda", "num_slots": 6}
    message = (
        "hicache.name: this tier moves data, and the cache was built without the device pools of "
        "{}; pass them, build_kv_cache(resolved, make_device_pools(resolved)), or leave the "
        "[hicache] table out"
    )
    pools = {FULL: PaperPool(64), ComponentType.RECURRENT: PaperPool(6)}
    for given, missing in (({}, "FULL, RECURRENT"), ({FULL: pools[FULL]}, "RECURRENT")):
        with pytest.raises(ConfigError) as caught:
            build_kv_cache(parse_config(raw), given)
        assert str(caught.value) == message.format(missing)
    assert isinstance(build_kv_cache(parse_config(raw), pools).hicache.hooks, CopyingTier)


def test_a_config_made_in_python() -> None:
    raw = tables()
    del raw["hicache"]
    config = parse_config(raw).model_copy(update={"hicache": StubParams(name="stub")})
    assert isinstance(build_kv_cache(config).hicache.hooks, RecordingHooks)
    base = config.model_copy(update={"hicache": HiCacheParams(name="stub")})
    with pytest.raises(ConfigError, match="hicache: is a HiCacheParams, where 'stub' needs its"):
        resolve(base)


# -- what is wrong with it -----------------------------------------------------------------------


def test_an_empty_name_names_no_tier() -> None:
    with pytest.raises(PluginError, match=r"hicache\.name: plugin '' is not installed"):
        parse_config(tables(name=""))


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(PluginError) as caught:
        parse_config(tables(name="stubb"))
    assert str(caught.value) == (
        "hicache.name: plugin 'stubb' is not installed; did you mean 'stub'?"
    )
    assert problems(tables(name="full")) == (
        "hicache.name: the plugin 'full' brings no host tier of that name; for the component, "
        "write [components.full]",
    )
    assert problems(tables(name="stub", num_records=3)) == (
        "hicache.num_records: unknown key; did you mean num_records_max?",
    )
    assert problems(tables(name="stub", num_records_max=0)) == (
        "hicache.num_records_max = 0: input should be greater than or equal to 1",
    )
    assert problems(tables()) == ("hicache.name: required, but not set",)
    assert problems(tables(name=3)) == ("hicache.name = 3: input should be a valid string",)
    raw = {**tables(), "hicache": "stub"}
    assert "hicache = 'stub'" in problems(raw)[0]
    raw = {**tables(), "hicach": {"name": "stub"}}
    del raw["hicache"]
    assert problems(raw) == ("hicach: unknown table; did you mean [hicache]?",)


def test_it_needs_the_unified_tree() -> None:
    assert problems(tables(name="stub"), "cache.enable_unified_radix_tree=false") == (
        "hicache.name = 'stub': needs the unified tree; set cache.enable_unified_radix_tree = true",
    )


def test_a_name_that_is_a_plugin_without_a_tier() -> None:
    config = parse_config({key: value for key, value in tables().items() if key != "hicache"})
    config = config.model_copy(update={"hicache": HiCacheParams(name="full")})
    with pytest.raises(ConfigError, match=r"hicache\.name = 'full': no host tier; it can be stub"):
        resolve(config)


def test_a_factory_that_makes_something_else_is_the_plugins_fault(site: FakeSite) -> None:
    site.install("uhrc-disk", {"disk": "disk_module"}, OTHER)
    with pytest.raises(PluginError) as caught:
        build_kv_cache(parse_config(tables(name="disk", path="")))
    assert str(caught.value).startswith("hicache.name = 'disk': make_hooks returned ''")


def test_wrong_records_are_refused(site: FakeSite) -> None:
    source = """
    from uhrc_core.registry.specs import HiCacheSpec

    @hookimpl
    def uhrc_hicache_hooks():
        return [HiCacheSpec("disk", NoOptions, print)]
    """
    site.install("uhrc-disk", {"disk": "disk_module"}, source)
    with pytest.raises(PluginError, match="uhrc_hicache_hooks returned a wrong HiCacheSpec"):
        installed_plugins({}).load(["disk"])
    site.install("uhrc-two", {"other": "other_module"}, OTHER)
    with pytest.raises(PluginError, match="declares 'disk' but is not registered under that name"):
        installed_plugins({}).load(["other"])
    source = """
    @hookimpl
    def uhrc_config_tables():
        return [ConfigTableSpec("hicache", NoOptions)]
    """
    site.install("uhrc-table", {"hicache": "table_module"}, source)
    with pytest.raises(PluginError, match="'hicache', which exists already"):
        installed_plugins({}).load(["hicache"])


# -- where it shows ------------------------------------------------------------------------------


def test_the_schema_tells_tiers_apart_by_name(site: FakeSite) -> None:
    site.install("uhrc-disk", {"disk": "disk_module"}, OTHER)
    catalog = installed_plugins({})
    schema = config_schema(catalog.load(catalog.names))

    def valid(**hicache: Any) -> bool:
        return jsonschema.Draft202012Validator(schema).is_valid({"hicache": hicache})

    assert valid(name="stub", num_records_max=4) and valid(name="disk", path="x")
    assert not valid(name="disk") and not valid(name="stub", path="x") and not valid(name="no")
    one = config_schema(catalog.load(["stub"]))
    assert "hicache" in one["properties"]
    assert "hicache" not in config_schema(catalog.load(["full"]))["properties"]


def test_plugins_and_describe_show_it(tmp_path: Any) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(
        "[cache]\nenable_unified_radix_tree = true\nmax_context_len = 32\n"
        '[components.full]\nnum_tokens = 64\n[hicache]\nname = "stub"\n'
    )
    runner, app = CliRunner(), make_app()
    rows = json.loads(runner.invoke(app, ["plugins", "--json"]).stdout)
    assert [r["brings"] for r in rows if r["names"] == ["stub"]] == [["host tier stub"]]
    facts = json.loads(runner.invoke(app, ["describe", str(file), "--json"]).stdout)
    assert facts["hicache"] == {"name": "stub", "num_records_max": 1024}
    shown = runner.invoke(app, ["describe", str(file)]).stdout
    assert "host tier stub, num_records_max 1024" in shown
    config = load_config(file)
    assert isinstance(config, Config) and isinstance(config.hicache, StubParams)
