"""The config: what it accepts, what it says about the rest, who overrides whom."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from tests.core.fake_plugins import FakeSite
from uhrc_core import Config, load_config, parse_config, resolve
from uhrc_core.config.schema import config_schema
from uhrc_core.errors import ConfigError, PluginError
from uhrc_core.registry.catalog import installed_plugins
from uhrc_core.registry.tables import CacheConfig, ConfigTable
from uhrc_full.params import FullParams

FILE = """
[cache]
enable_unified_radix_tree = true
page_size = 128
dp_size = 2
max_requests = 64
max_context_len = 8192
eviction_policy = "slru"
eviction_options = { protect_hits = 3 }
[components.full]
attention = "gqa"
num_tokens = 65536
[scheduler]
chunked_prefill_size = 256
dp_schedule_policy = "cache_aware"
[memory]
hbm_bytes = 16_000_000_000
[model]
hf_config = "model/config.json"
"""

HOT = """
@hookimpl
def uhrc_eviction_policies():
    return [EvictionPolicySpec("hot", NoOptions, print)]
"""

TOY = """
class ToyTable(ConfigTable):
    depth: int = 3
    path: ConfigPath | None = None
    sizes: tuple[int, ...] = (1, 2)

@hookimpl
def uhrc_config_tables():
    return [ConfigTableSpec("toy", ToyTable)]
"""


def parse(
    tables: Mapping[str, Any], *overrides: str, env: Mapping[str, str] | None = None
) -> Config:
    return parse_config(tables, overrides, environ=env or {})


def problems(tables: Mapping[str, Any], *overrides: str, **env: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(tables, *overrides, env=env)
    return caught.value.problems


# -- what a file holds -------------------------------------------------------------------------


def test_a_file_gives_every_table(tmp_path: Path) -> None:
    path = tmp_path / "cache.toml"
    path.write_text(FILE)
    config = load_config(path, environ={})
    assert config.cache.page_size == 128
    assert config.cache.eviction_options == {"protect_hits": 3}
    assert config.components == {"full": FullParams(attention="gqa", num_tokens=65536)}
    assert config.scheduler.dp_schedule_policy == "cache_aware"
    assert config.memory.hbm_bytes == 16_000_000_000
    assert config.model.hf_config == tmp_path / "model/config.json"


def test_an_empty_file_has_the_defaults_of_the_rfc() -> None:
    config = parse({})
    assert config == Config()
    assert config.cache.enable_unified_radix_tree is False
    assert config.cache.page_size == 1
    assert config.scheduler.dp_schedule_policy == "min_running_queue"


def test_a_config_can_be_made_in_python() -> None:
    config = Config(cache=CacheConfig(page_size=16), components={"full": FullParams(num_tokens=32)})
    assert parse({"cache": {"page_size": 16}, "components": {"full": {"num_tokens": 32}}}) == config


def test_a_config_is_frozen() -> None:
    config = parse({})
    with pytest.raises(ValidationError):
        config.cache.page_size = 2  # pyright: ignore[reportAttributeAccessIssue]


# -- problems ----------------------------------------------------------------------------------


def test_all_problems_come_at_once_each_with_its_key() -> None:
    found = problems(
        {
            "cache": {"page_sze": 16, "dp_size": 0, "eviction_policy": "lrru"},
            "components": {"full": {"atention": "gqa", "num_tokens": -1}},
            "scheduler": {"dp_schedule_policy": "random"},
            "memmory": {},
        },
        "cache.max_requests=many",
    )
    assert found == (
        "memmory: unknown table; did you mean [memory]?",
        "cache.dp_size = 0: input should be greater than or equal to 1",
        "cache.max_requests = 'many': input should be a valid integer",
        "cache.page_sze: unknown key; did you mean page_size?",
        "scheduler.dp_schedule_policy = 'random': input should be 'min_running_queue', "
        "'round_robin', 'shape_aware' or 'cache_aware'",
        "components.full.num_tokens = -1: input should be greater than or equal to 1",
        "components.full.atention: unknown key; did you mean attention?",
    )


def test_an_unknown_key_without_a_close_match_lists_the_keys() -> None:
    assert problems({"memory": {"zzz": 1}}) == ("memory.zzz: unknown key; it can be hbm_bytes",)


@pytest.mark.parametrize("value", ["128", True, 128.0, 1.5, [128], {"x": 1}])
def test_no_type_is_converted_into_another(value: object) -> None:
    (problem,) = problems({"cache": {"page_size": value}})
    assert problem.startswith(f"cache.page_size = {value!r}: input should be a valid integer")


INT_KEYS = (
    "cache.page_size",
    "cache.dp_size",
    "cache.max_requests",
    "cache.max_context_len",
    "components.full.num_tokens",
    "scheduler.chunked_prefill_size",
    "memory.hbm_bytes",
)


@pytest.mark.parametrize("key", INT_KEYS)
@pytest.mark.parametrize("value", [0, -1, 2**63, 10**30])
def test_every_number_has_limits(key: str, value: int) -> None:
    (problem,) = problems({}, f"{key}={value}")
    assert problem.startswith(f"{key} = {value}: input should be ")


def test_options_of_the_eviction_policy_are_checked() -> None:
    cache = {"eviction_policy": "slru", "eviction_options": {"protect_hit": 3}}
    assert problems({"cache": cache}) == (
        "cache.eviction_options.protect_hit: unknown key; did you mean protect_hits?",
    )
    assert problems({"cache": {"eviction_options": {"protect_hits": 3}}}) == (
        "cache.eviction_options.protect_hits: unknown key; it has no keys",
    )


def test_components_must_be_tables() -> None:
    assert problems({"components": 3}) == (
        "components = 3: must hold tables, as in [components.full]",
    )
    (problem,) = problems({"components": {"full": 3}})
    assert problem.startswith("components.full = 3: input should be an object")


def test_a_key_outside_any_table() -> None:
    assert problems({"page_size": 16}) == (
        "page_size = 16: in no table; put it under one, as [cache]",
    )


def test_a_table_that_its_plugin_does_not_bring(site: FakeSite) -> None:
    site.install("uhrc-toy", {"toy": "toy_module"}, TOY)
    assert problems({"components": {"toy": {}}})[0] == (
        "components.toy: the plugin 'toy' brings no component of that name; for the table, write "
        "[toy]"
    )


@pytest.mark.parametrize(
    ("name", "beside", "message"),
    [
        ("full", {}, "; for the component, write [components.full]"),
        ("full", {"components": {"full": {"num_tokens": 64}}}, "; for the component, write "),
        ("kda", {}, "; for the backend, write components.recurrent.backend = 'kda'"),
        ("hot", {"cache": {"eviction_policy": "hot"}}, "; for the policy, write cache.eviction_"),
    ],
)
def test_a_table_named_like_something_else_says_what_to_write(
    site: FakeSite, name: str, beside: dict[str, Any], message: str
) -> None:
    site.install("uhrc-hot", {"hot": "hot_module"}, HOT)
    (problem,) = problems({name: {"junk": 1}, **beside})
    assert problem.startswith(f"{name}: the plugin {name!r} brings no table of that name{message}")


def deep(opening: str, closing: str, depth: int) -> str:
    return "cache.x=" + opening * depth + "1" + closing * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cache.page_size=" + "9" * 5000, "cache.toml: not valid TOML: Exceeds the limit"),
        (deep("[", "]", 5000), "cache.toml: not valid TOML: maximum recursion depth exceeded"),
        (deep("{a=", "}", 5000), "cache.toml: not valid TOML: maximum recursion depth exceeded"),
        (deep("[", "]", 40), "cache.x.0.0.0"),
        (deep("{a=", "}", 40), "cache.x.a.a.a"),
        ("cache.page_size=0x" + "f" * 5000, "cache.page_size: an integer of 20000 bits"),
    ],
    ids=["digits", "arrays", "tables", "fewer arrays", "fewer tables", "hexadecimal digits"],
)
def test_a_file_beyond_all_bounds_is_a_config_error(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "cache.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ={})
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot be read: No such file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[cache\n")
    with pytest.raises(ConfigError, match=r"bad.toml: not valid TOML: .*line 1"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.toml: not valid TOML"):
        load_config(tmp_path / "binary.toml")


# -- plugins -----------------------------------------------------------------------------------


def test_a_missing_plugin_alone_is_a_plugin_error_with_its_key() -> None:
    with pytest.raises(PluginError) as caught:
        parse({"components": {"full": {"num_tokens": 16}, "fulll": {}}})
    assert str(caught.value) == (
        "components.fulll: plugin 'fulll' is not installed; did you mean 'full'?"
    )


def test_a_missing_plugin_is_listed_with_the_other_problems() -> None:
    found = problems({"cache": {"dp_size": 0}, "components": {"full": {}, "fulll": {}}})
    assert [line.split(":")[0] for line in found] == ["cache.dp_size = 0", "components.fulll"]


def test_an_impossible_combination_is_reported_even_if_its_plugins_are_missing() -> None:
    tables = {"components": {"full": {}, "swa": {}, "recurrent": {}}}
    found = problems(tables, UHRC_PLUGINS="full,recurrent")
    assert [line.split(":")[0] for line in found] == [
        "components.swa",
        "with [components.swa], [components.recurrent] is not possible",
    ]


def test_a_missing_plugin_may_be_the_one_that_brings_full() -> None:
    with pytest.raises(PluginError) as caught:
        parse({"components": {"fulll": {}}})
    assert str(caught.value).startswith("components.fulll: plugin 'fulll' is not installed")
    assert problems({"components": {"swa": {"x": 1}}})[1].startswith(
        "always, [components.full] is required"
    )


def test_full_under_another_name_is_full(site: FakeSite) -> None:
    source = "@hookimpl\ndef uhrc_component_specs():\n    return [fake_spec('mine')]\n"
    site.install("uhrc-mine", {"mine": "mine_module"}, source)
    assert problems({"components": {"mine": {"num_slots": 0}}}) == (
        "components.mine.num_slots = 0: input should be greater than or equal to 1",
    )


def test_a_plugin_adds_a_table_of_its_own(site: FakeSite, tmp_path: Path) -> None:
    site.install("uhrc-toy", {"toy": "toy_module"}, TOY)
    path = tmp_path / "cache.toml"
    path.write_text("[toy]\ndepth = 5\npath = 'a/b'\nsizes = [4]\n")
    (table,) = load_config(path, environ={}).tables.values()
    assert table.model_dump() == {"depth": 5, "path": tmp_path / "a/b", "sizes": (4,)}
    assert problems({"toy": {"dept": 1}}) == ("toy.dept: unknown key; did you mean depth?",)


def test_a_value_of_several_types_is_one_problem_with_its_key(site: FakeSite) -> None:
    mode = 'mode: Literal["fast"] | ConfigPath | list[int] = "fast"'
    source = "from typing import Literal\n" + TOY.replace("depth: int = 3", mode)
    site.install("uhrc-toy", {"toy": "toy_module"}, source)
    assert problems({"toy": {"mode": 0}}) == (
        "toy.mode = 0: input should be 'fast', or input should be a valid string, or input should "
        "be a valid array",
    )
    assert problems({"toy": {"mode": [1, "x"]}})[-1] == (
        "toy.mode.1 = 'x': input should be a valid integer"
    )


def test_a_table_is_read_back_by_its_model() -> None:
    class Mine(ConfigTable):
        depth: int = 3

    assert Config(tables={"mine": Mine(depth=7)}).table(Mine).depth == 7
    assert Config().table(Mine).depth == 3


def test_a_policy_of_a_plugin_is_found_by_its_name(site: FakeSite) -> None:
    source = """
    from uhrc_core.cache.eviction import LRU

    @hookimpl
    def uhrc_eviction_policies():
        return [EvictionPolicySpec("hot_first", NoOptions, lambda options: LRU())]
    """
    site.install("uhrc-hot", {"hot_first": "hot_module"}, source)
    assert parse({"cache": {"eviction_policy": "hot_first"}}).cache.eviction_policy == "hot_first"
    assert problems({"cache": {"eviction_policy": "hot_frst"}}) == (
        "cache.eviction_policy = 'hot_frst': unknown policy; did you mean hot_first?",
    )


# -- overrides ---------------------------------------------------------------------------------


def test_overrides_are_toml_values() -> None:
    config = parse(
        {"cache": {"page_size": 16}},
        "cache.page_size=256",
        "cache.enable_unified_radix_tree=true",
        "memory.hbm_bytes = 1_000",
        'scheduler.dp_schedule_policy="round_robin"',
        "cache.eviction_policy=slru",
        "cache.eviction_options={protect_hits=4}",
    )
    assert config.cache.page_size == 256
    assert config.cache.enable_unified_radix_tree is True
    assert config.memory.hbm_bytes == 1000
    assert config.scheduler.dp_schedule_policy == "round_robin"
    assert config.cache.eviction_options == {"protect_hits": 4}


def test_the_last_override_wins() -> None:
    assert parse({}, "cache.page_size=2", "cache.page_size=4").cache.page_size == 4


@pytest.mark.parametrize("override", ["page_size=1", "cache.page_size", "cache.=1", "=1", ""])
def test_a_malformed_override_says_its_form(override: str) -> None:
    assert problems({}, override) == (
        f"--set {override}: must be TABLE.KEY=VALUE, as in cache.page_size=256",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.page_size=" + "9" * 5000, "cache.page_size = '9999"),
        ("cache.page_size=" + "[" * 5000, "cache.page_size = '[[[["),
        ("cache.eviction_options" + ".a" * 2000 + "=1", "cache.eviction_options.a.a.a"),
    ],
    ids=["digits", "arrays", "tables"],
)
def test_an_override_beyond_all_bounds_is_a_config_error(override: str, message: str) -> None:
    assert problems({}, override)[0].startswith(message)


def test_an_override_cannot_reach_into_a_value() -> None:
    found = problems({"cache": {"page_size": 16}}, "cache.page_size.x=1")
    assert found == ("cache.page_size.x: cache.page_size is no table",)


def test_an_override_cannot_smuggle_in_a_second_key() -> None:
    (problem,) = problems({}, "cache.page_size=1\ndp_size=2")
    assert "cache.page_size = '1\\ndp_size=2'" in problem


def test_overrides_leave_the_callers_tables_alone() -> None:
    tables = {"cache": {"page_size": 16}}
    parse(tables, "cache.page_size=32")
    assert tables == {"cache": {"page_size": 16}}


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("0", False), ("", False)]
)
def test_the_environment_switches_the_tree(text: str, value: bool) -> None:
    env = {"UHRC_ENABLE_UNIFIED_RADIX_TREE": text}
    file = {"cache": {"enable_unified_radix_tree": not value}}
    assert parse(file, env=env).cache.enable_unified_radix_tree is value
    flag = f"cache.enable_unified_radix_tree={str(not value).lower()}"
    assert parse(file, flag, env=env).cache.enable_unified_radix_tree is not value


def test_an_environment_value_that_is_no_switch() -> None:
    assert problems({}, UHRC_ENABLE_UNIFIED_RADIX_TREE="perhaps") == (
        "environment: UHRC_ENABLE_UNIFIED_RADIX_TREE = 'perhaps': must be 1 or 0",
    )


OURS, RFCS = "UHRC_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE"


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_name_that_the_rfc_gives_the_switch_is_known_too(value: str) -> None:
    file = {"cache": {"enable_unified_radix_tree": value == "0"}}
    assert parse(file, env={RFCS: value}).cache.enable_unified_radix_tree is (value == "1")
    assert parse(file, env={RFCS: value, OURS: value}).cache.enable_unified_radix_tree is (
        value == "1"
    )
    assert problems({}, **{RFCS: "perhaps"}) == (
        f"environment: {RFCS} = 'perhaps': must be 1 or 0",
    )


def test_where_both_names_of_the_switch_differ_ours_counts_and_it_is_said() -> None:
    with pytest.warns(UserWarning) as caught:
        config = parse({}, env={OURS: "1", RFCS: "0"})
    assert config.cache.enable_unified_radix_tree is True
    (warning,) = caught
    assert str(warning.message) == f"{OURS} = '1' counts, not {RFCS} = '0'; unset one of them"


@pytest.mark.parametrize("function", [parse_config, load_config, resolve, installed_plugins])
def test_no_signature_shows_the_process_environment(function: Callable[..., Any]) -> None:
    assert inspect.signature(function).parameters["environ"].default is None


# -- schema ------------------------------------------------------------------------------------


def test_the_schema_accepts_what_the_loader_accepts_and_refuses_misspellings() -> None:
    schema = config_schema(installed_plugins({}).load(["full"]))
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {"cache": {"page_size": 16}, "components": {"full": {"num_tokens": 32}}}
    jsonschema.validate(good, schema)
    for bad in ({"cach": {}}, {"cache": {"page_sze": 1}}, {"components": {"full": {"x": 1}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_the_schema_has_the_tables_of_plugins(site: FakeSite) -> None:
    site.install("uhrc-toy", {"toy": "toy_module"}, TOY)
    schema = config_schema(installed_plugins({}).load(["toy"]))
    jsonschema.validate({"toy": {"depth": 4}}, schema)
    assert schema["$defs"]["ToyTable"]["properties"]["depth"]["default"] == 3


def test_every_key_has_a_description() -> None:
    schema = config_schema(installed_plugins({}).load(["full"]))
    for table in schema["$defs"].values():
        if table.get("title") != "ComponentTables":
            for key, field in table["properties"].items():
                assert field.get("description"), f"{table['title']}.{key}"
