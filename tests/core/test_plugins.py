"""Plugins: found without being imported, isolated from each other, their mistakes named."""

from __future__ import annotations

import sys

import pytest

from tests.core.fake_plugins import FakeSite
from uhrc_core import InsertParams, MatchPrefixParams, RadixKey, build_kv_cache, parse_config
from uhrc_core.errors import PluginError
from uhrc_core.registry.catalog import installed_plugins

FULL = {"cache": {"enable_unified_radix_tree": True}, "components": {"full": {"num_tokens": 8192}}}

POLICY = """
@hookimpl
def uhrc_eviction_policies():
    from uhrc_core.cache.eviction import LRU
    return [EvictionPolicySpec("hot_first", NoOptions, lambda options: LRU())]
"""


def load_error(*names: str) -> str:
    with pytest.raises(PluginError) as caught:
        installed_plugins({}).load(names)
    return str(caught.value)


# -- discovery ---------------------------------------------------------------------------------


def test_discovery_imports_nothing(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "raise RuntimeError('imported')")
    assert "bomb" in installed_plugins({}).names
    assert "bomb_module" not in sys.modules


def test_a_config_imports_only_the_plugins_it_names(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "raise RuntimeError('imported')")
    site.install("uhrc-quiet", {"quiet": "quiet_module"})
    assert build_kv_cache(parse_config(FULL)).page_size == 1
    assert not {"bomb_module", "quiet_module"} & set(sys.modules)


def test_a_plugin_appears_with_its_distribution_and_version(site: FakeSite) -> None:
    site.install("uhrc-hot", {"hot_first": "hot_module"}, POLICY, version="2.5")
    (entry,) = [each for each in installed_plugins({}).entries if each.name == "hot_first"]
    assert (entry.distribution, entry.version, entry.target) == ("uhrc-hot", "2.5", "hot_module")


def test_a_module_registered_under_two_names_is_loaded_once(site: FakeSite) -> None:
    source = """
    @hookimpl
    def uhrc_component_specs():
        return [fake_spec("one"), fake_spec("two")]
    """
    site.install("uhrc-pair", {"one": "pair_module", "two": "pair_module"}, source)
    registry = installed_plugins({}).load(["one", "two"])
    assert sorted(registry.components) == ["one", "two"]


# -- UHRC_PLUGINS ------------------------------------------------------------------------------


def test_the_environment_limits_discovery(site: FakeSite) -> None:
    site.install("uhrc-hot", {"hot_first": "hot_module"}, POLICY)
    catalog = installed_plugins({"UHRC_PLUGINS": "hot_first, full"})
    assert catalog.names == ("full", "hot_first")
    limited = installed_plugins({"UHRC_PLUGINS": "full"})
    with pytest.raises(PluginError) as caught:
        limited.load(["hot_first"])
    assert str(caught.value) == (
        "plugin 'hot_first' is installed, but UHRC_PLUGINS leaves it out; add it there"
    )


def test_an_empty_limit_is_no_limit() -> None:
    assert installed_plugins({"UHRC_PLUGINS": ""}).names == installed_plugins({}).names


def test_a_limit_that_names_what_is_not_installed_is_an_error() -> None:
    with pytest.raises(PluginError, match="UHRC_PLUGINS names 'fulll', not installed; installed"):
        installed_plugins({"UHRC_PLUGINS": "fulll"})


# -- plugins that are not there ----------------------------------------------------------------


def test_a_known_plugin_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("uhrc_core.registry.catalog._KNOWN_DISTRIBUTIONS", {"paged": "uhrc-paged"})
    assert load_error("paged") == "plugin 'paged' is not installed; run: pip install uhrc-paged"


def test_a_distribution_that_does_not_bring_the_plugin_yet_is_told_apart(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uhrc_core.registry.catalog._KNOWN_DISTRIBUTIONS", {"paged": "uhrc-paged"})
    site.install("uhrc-paged", {}, version="0.1.0")
    assert load_error("paged") == (
        "plugin 'paged' is not installed; uhrc-paged 0.1.0 is there, but 'paged' is not built in "
        "it: take 'paged' out of the config"
    )


def test_a_misspelt_plugin_is_matched_with_the_installed_ones() -> None:
    assert load_error("ful") == "plugin 'ful' is not installed; did you mean 'full'?"


def test_an_unknown_plugin_lists_what_is_installed() -> None:
    message = load_error("zzzz")
    assert message.startswith("plugin 'zzzz' is not installed; installed are: ")
    assert "full" in message and "entry-point group 'uhrc.plugins'" in message


# -- broken plugins ----------------------------------------------------------------------------


def test_a_named_plugin_that_does_not_import_names_everything(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "import not_there_at_all")
    assert load_error("bomb") == (
        "plugin 'bomb' of uhrc-bomb 0.3.1 (bomb_module) does not import: ModuleNotFoundError: No "
        "module named 'not_there_at_all'. Upgrade or reinstall uhrc-bomb, or take it out of the "
        "config"
    )


def test_the_cause_of_a_failed_import_is_kept(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "1 / 0")
    with pytest.raises(PluginError) as caught:
        installed_plugins({}).load(["bomb"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_plugin_that_exits_at_import_is_a_broken_plugin(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "raise SystemExit('bye')")
    assert "does not import: SystemExit: bye" in load_error("bomb")


def test_two_distributions_with_one_name_are_both_named(site: FakeSite) -> None:
    site.install("uhrc-one", {"same": "one_module"})
    site.install("uhrc-two", {"same": "two_module"}, version="9.0")
    assert load_error("same") == (
        "plugin name 'same' is claimed by uhrc-one 0.3.1 (one_module) and uhrc-two 9.0 "
        "(two_module); uninstall one of them, or ask its author for another name"
    )
    assert installed_plugins({}).load(["full"]).components.keys() == {"full"}


@pytest.mark.parametrize("api", ["(2, 0)", "(1, 1)", "(0, 9)", "1", "'1.0'", "None"])
def test_a_wrong_api_version_says_what_both_sides_speak(site: FakeSite, api: str) -> None:
    site.install("uhrc-new", {"new": "new_module"}, header=f"UHRC_API = {api}\n")
    assert load_error("new") == (
        f"plugin 'new' of uhrc-new 0.3.1 (new_module) declares UHRC_API = {api}, but this "
        "uhrc-core speaks (1, 0): install versions of uhrc-new and uhrc-core made for each other"
    )


def test_a_module_without_api_version_is_refused(site: FakeSite) -> None:
    site.install("uhrc-new", {"new": "new_module"}, header="")
    assert "declares UHRC_API = None" in load_error("new")


def declares(hook: str, result: str) -> str:
    return f"@hookimpl\ndef {hook}():\n    return {result}\n"


BROKEN = {
    "misspelt hook": (
        "@hookimpl\ndef uhrc_component_spec():\n    return []\n",
        "uhrc-bad 0.3.1 (bad_module) defines uhrc_component_spec, which is no hook of uhrc-core; "
        "did you mean uhrc_component_specs?",
    ),
    "unmarked hook": (
        "def uhrc_component_specs():\n    return []\n",
        "uhrc-bad 0.3.1 (bad_module) defines uhrc_component_specs without @hookimpl, so it would "
        "never be called; decorate it with uhrc_core.registry.hookspecs.hookimpl",
    ),
    "hook that raises": (
        "@hookimpl\ndef uhrc_component_specs():\n    raise KeyError('x')\n",
        "uhrc-bad 0.3.1 (bad_module): uhrc_component_specs raised KeyError: 'x'; hooks only "
        "declare: report this to the plugin's author",
    ),
    "no list": (
        declares("uhrc_component_specs", "fake_spec('bad')").replace("fake_spec('bad')", "7"),
        "uhrc-bad 0.3.1 (bad_module): uhrc_component_specs must return a list of ComponentSpec, "
        "got 7",
    ),
    "list of something else": (
        declares("uhrc_combination_rules", "['rule']"),
        "uhrc-bad 0.3.1 (bad_module): uhrc_combination_rules must return a list of Rule, got "
        "['rule']",
    ),
    "name that no entry point has": (
        declares("uhrc_component_specs", "[fake_spec('other')]"),
        "uhrc-bad 0.3.1 (bad_module) declares 'other' but is not registered under that name; add "
        "the entry point other = 'bad_module' to its pyproject.toml",
    ),
    "one name twice": (
        declares("uhrc_cli_commands", "[CliCommandSpec('go', print), CliCommandSpec('go', print)]"),
        "uhrc-bad 0.3.1 (bad_module) declares CliCommandSpec 'go', which exists already; rename it",
    ),
    "eviction priority": (
        declares("uhrc_component_specs", "[fake_spec('bad', 'SWA', eviction_priority=2)]"),
        "uhrc-bad 0.3.1 (bad_module): component 'bad': SWA has eviction_priority 2: must be 1 "
        "(RECURRENT 0 < SWA 1 < FULL 2)",
    ),
    "params model": (
        declares("uhrc_component_specs", "[fake_spec('bad', params_model=NoOptions)]"),
        "uhrc-bad 0.3.1 (bad_module): uhrc_component_specs returned a wrong ComponentSpec: "
        "params_model = <class 'uhrc_core.registry.specs.NoOptions'>: input should be a subclass "
        "of ComponentParams",
    ),
    "size key": (
        "class Odd(FakeParams):\n    size_key = 'num_slot'\n\n"
        + declares("uhrc_component_specs", "[fake_spec('bad', params_model=Odd)]"),
        "uhrc-bad 0.3.1 (bad_module): Odd.size_key = 'num_slot', which is no key of "
        "[components.bad]; name the one that sets the pool's size",
    ),
    "exit": (
        "@hookimpl\ndef uhrc_component_specs():\n    raise SystemExit(3)\n",
        "uhrc-bad 0.3.1 (bad_module): uhrc_component_specs raised SystemExit: 3; hooks only "
        "declare: report this to the plugin's author",
    ),
    "a record that cannot be printed": (
        "class Odd:\n    def __repr__(self):\n        raise RuntimeError('no')\n\n"
        + declares("uhrc_component_specs", "[Odd()]"),
        "uhrc-bad 0.3.1 (bad_module): uhrc_component_specs raised RuntimeError: no; hooks only "
        "declare: report this to the plugin's author",
    ),
    "an api version that cannot be compared": (
        "class Odd:\n    def __eq__(self, other):\n        raise RuntimeError('no')\n\n"
        "UHRC_API = Odd()\n",
        "plugin 'bad' of uhrc-bad 0.3.1 (bad_module) raised RuntimeError: no; report this to the "
        "plugin's author",
    ),
}

WRONG_FIELDS = {
    "replace(fake_spec('bad'), kind=7)": "kind = 7: input should be an instance of ComponentType",
    "replace(fake_spec('bad'), kind=0)": "kind = 0: input should be an instance of ComponentType",
    "fake_spec([])": "name = []: input should be a valid string",
    "fake_spec('bad', params_model=None)": "params_model = None: input should be a subclass of ",
    "fake_spec('bad', make_component=5)": "make_component = 5: input should be callable",
    "fake_spec('bad', kernels=None)": "kernels = None: input should be a valid dictionary",
    "fake_spec('bad', kernels={'k': 'xla'})": "kernels.k = 'xla': input should be a valid tuple",
    "EvictionPolicySpec('bad', None, print)": "options_model = None: input should be a subclass ",
    "EvictionPolicySpec('bad', dict, print)": "options_model = <class 'dict'>: input should be a ",
    "ConfigTableSpec('bad', None)": "table_model = None: input should be a subclass of ConfigTable",
    "ConfigTableSpec('bad', BaseModel)": "table_model = <class 'pydantic.main.BaseModel'>: input",
    "CliCommandSpec('bad', None)": "function = None: input should be callable",
    "CliCommandSpec(5, print)": "name = 5: input should be a valid string",
    "Rule.model_construct(because='x', when=None)": "when = None: input should be a valid ",
    "RecurrentBackendSpec('bad', NoOptions, print, print, 0)": "kernel_chunk = 0: input should be ",
}

HOOK_OF = {
    "fake_spec": "uhrc_component_specs",
    "replace": "uhrc_component_specs",
    "EvictionPolicySpec": "uhrc_eviction_policies",
    "ConfigTableSpec": "uhrc_config_tables",
    "CliCommandSpec": "uhrc_cli_commands",
    "Rule.model_construct": "uhrc_combination_rules",
    "RecurrentBackendSpec": "uhrc_recurrent_backends",
}


@pytest.mark.parametrize(("record", "message"), WRONG_FIELDS.items())
def test_every_field_of_a_record_is_checked(site: FakeSite, record: str, message: str) -> None:
    hook = HOOK_OF[record.partition("(")[0]]
    source = "from uhrc_core.plugin_api import RecurrentBackendSpec, Rule"
    source += "\nfrom dataclasses import replace\nfrom pydantic import BaseModel\n"
    source += declares(hook, f"[{record}]")
    site.install("uhrc-bad", {"bad": "bad_module"}, source)
    assert load_error("bad").startswith(f"uhrc-bad 0.3.1 (bad_module): {hook} returned a wrong ")
    assert message in load_error("bad")


@pytest.mark.parametrize(
    "record",
    [
        "fake_spec('bad', params_model=Odd)",
        "ConfigTableSpec('bad', Odd)",
        "EvictionPolicySpec('bad', Odd, print)",
    ],
)
def test_a_table_of_unknown_types_is_refused(site: FakeSite, record: str) -> None:
    source = "class Odd(FakeParams):\n    odd: 'NotThere' = 1\n\n"
    source += declares(HOOK_OF[record.partition("(")[0]], f"[{record}]")
    site.install("uhrc-bad", {"bad": "bad_module"}, source)
    message = "uhrc-bad 0.3.1 (bad_module): the JSON Schema of Odd raised PydanticUndefinedAnnotat"
    assert load_error("bad").startswith(message)
    assert len(load_error("bad").splitlines()) == 1


def test_a_plugin_cannot_replace_a_table_of_the_core(site: FakeSite) -> None:
    source = declares("uhrc_config_tables", "[ConfigTableSpec('cache', NoOptions)]")
    site.install("uhrc-bad", {"cache": "bad_module"}, source)
    assert load_error("cache") == (
        "uhrc-bad 0.3.1 (bad_module) declares ConfigTableSpec 'cache', which exists already; "
        "rename it"
    )


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_mistake_in_a_plugin_is_named_with_the_plugin(
    site: FakeSite, source: str, message: str
) -> None:
    site.install("uhrc-bad", {"bad": "bad_module"}, source)
    assert load_error("bad") == message


def test_a_hook_with_unknown_parameters_is_refused(site: FakeSite) -> None:
    site.install("uhrc-bad", {"bad": "bad_module"}, "@hookimpl\ndef uhrc_layer_kinds(config): ...")
    message = load_error("bad")
    assert message.startswith("uhrc-bad 0.3.1 (bad_module): ")
    assert "uhrc_layer_kinds" in message and message.endswith("correct the hook's parameters")


def test_a_refused_plugin_leaves_nothing_behind(site: FakeSite) -> None:
    source = declares("uhrc_eviction_policies", "[EvictionPolicySpec('bad', NoOptions, print)]")
    source += declares("uhrc_combination_rules", "7")
    site.install("uhrc-bad", {"bad": "bad_module"}, source)
    registry, broken = installed_plugins({}).load_each(["bad", "full"])
    assert list(broken) == ["bad"]
    assert "bad" not in registry.policies
    assert registry.brought == ["component full", "layer kinds"]


def test_two_plugins_that_know_one_model_are_named(site: FakeSite) -> None:
    claim = "@hookimpl\ndef uhrc_layer_kinds(hf_config):\n    return []\n"
    site.install("uhrc-one", {"one": "one_module"}, claim)
    site.install("uhrc-two", {"two": "two_module"}, claim)
    registry = installed_plugins({}).load(["one", "two"])
    with pytest.raises(PluginError) as caught:
        registry.layer_kinds({})
    assert str(caught.value) == (
        "the model is claimed by uhrc-one 0.3.1 (one_module) and uhrc-two 0.3.1 (two_module); "
        "limit the plugins with UHRC_PLUGINS, or uninstall one"
    )


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "hidden_size": 256,
}

FAILS_AT_MODELS = {
    "a hook that raises": "@hookimpl\ndef uhrc_layer_kinds(hf_config):\n    raise SystemExit(3)\n",
    "a hook that returns no layers": (
        "from uhrc_core.registry.plan import LayerKind\n"
        "@hookimpl\ndef uhrc_layer_kinds(hf_config):\n    return [LayerKind(7, {})]\n"
    ),
    "a backend that raises": (
        "from uhrc_core.registry.recurrent import RecurrentBackendSpec\n"
        "def broken(hf_config):\n    raise KeyError('no')\n"
        + declares(
            "uhrc_recurrent_backends", "[RecurrentBackendSpec('odd', NoOptions, print, broken)]"
        )
    ),
    "a backend that returns no model": (
        "from uhrc_core.registry.recurrent import RecurrentBackendSpec, RecurrentModel\n"
        "def broken(hf_config):\n    return RecurrentModel(NoOptions(), (), 2**40)\n"
        + declares(
            "uhrc_recurrent_backends", "[RecurrentBackendSpec('odd', NoOptions, print, broken)]"
        )
    ),
}


@pytest.mark.parametrize("source", FAILS_AT_MODELS.values(), ids=FAILS_AT_MODELS)
def test_a_plugin_that_fails_at_a_model_is_no_matter_to_one_that_knows_it(
    site: FakeSite, source: str
) -> None:
    site.install("uhrc-odd", {"odd": "odd_module"}, source)
    registry = installed_plugins({}).load(["full", "odd"])
    assert len(registry.layer_kinds(LLAMA) or ()) == 2
    with pytest.raises(PluginError, match="odd"):
        registry.layer_kinds({"model_type": "nobody's"})


# -- the request path --------------------------------------------------------------------------


def test_pluggy_is_not_on_the_request_path() -> None:
    cache = build_kv_cache(parse_config(FULL))
    indices = cache.token_allocator.alloc(4)
    assert indices is not None
    key = RadixKey([1, 2, 3, 4])
    modules: set[str] = set()
    sys.setprofile(lambda frame, *_: modules.add(frame.f_globals["__name__"]))
    try:
        cache.insert(InsertParams(key=key, value=indices))
        match = cache.match_prefix(MatchPrefixParams(key=key))
    finally:
        sys.setprofile(None)
    assert match.hit_len == 4
    assert "uhrc_core.cache.tree" in modules
    assert not {name for name in modules if name.startswith("pluggy")}
