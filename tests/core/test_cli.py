"""The ``uhrc`` command: what it prints, how it exits, what plugins add to it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import uhrc_core
from tests.core.fake_plugins import FakeSite
from uhrc_core.cli.app import make_app

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}

FILE = """
[cache]
enable_unified_radix_tree = true
page_size = 16
max_context_len = 1024
[components.full]
num_tokens = 4096
[model]
hf_config = "config.json"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid config file with a model beside it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "cache.toml"
    path.write_text(FILE)
    return path


def uhrc(*arguments: object) -> Result:
    return CliRunner().invoke(make_app(), [str(each) for each in arguments])


# -- check -------------------------------------------------------------------------------------


def test_check_accepts_a_valid_file(file: Path) -> None:
    result = uhrc("check", file)
    assert (result.exit_code, result.stdout) == (
        0,
        "ok: UnifiedRadixCache, page_size 16, components full\n",
    )


def test_check_prints_every_problem_and_exits_1(file: Path) -> None:
    result = uhrc("check", file, "--set", "cache.page_sze=1", "--set", "memory.hbm_bytes=0")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: cache.page_sze: unknown key; did you mean page_size?",
        "error: memory.hbm_bytes = 0: input should be greater than or equal to 1",
    ]


def test_check_finds_what_does_not_fit_together(file: Path) -> None:
    result = uhrc("check", file, "--page-size", 48)
    assert result.exit_code == 1
    assert result.stderr == (
        "error: components.full.num_tokens = 4096: not whole pages of cache.page_size = 48; 4080 "
        "would be\n"
    )


def test_check_prints_a_missing_plugin(file: Path) -> None:
    result = uhrc("check", file, "--set", "components.fulll.x=1")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: components.fulll: plugin 'fulll' is not installed; did you mean 'full'?\n"
    )


# -- flags -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "table", "key", "value"),
    [
        (["--page-size", "32"], "cache", "page_size", 32),
        (["--dp-size", "2"], "cache", "dp_size", 2),
        (["--enable-unified-radix-tree"], "cache", "enable_unified_radix_tree", True),
        (["--chunked-prefill-size", "256"], "scheduler", "chunked_prefill_size", 256),
        (["--dp-schedule-policy", "cache_aware"], "scheduler", "dp_schedule_policy", "cache_aware"),
        (["--set", "cache.page_size=8", "--page-size", "32"], "cache", "page_size", 8),
    ],
)
def test_a_flag_sets_its_key(
    file: Path, flags: list[str], table: str, key: str, value: object
) -> None:
    result = uhrc("describe", file, "--json", *flags)
    assert json.loads(result.stdout)[table][key] == value


def test_a_flag_wins_over_the_file(file: Path) -> None:
    for flag, cache in (
        ("--enable-unified-radix-tree", "UnifiedRadixCache"),
        ("--disable-unified-radix-tree", "RadixCache"),
        ("--disable-radix-cache", "ChunkCache"),
    ):
        facts = json.loads(uhrc("describe", file, "--json", flag).stdout)
        assert facts["cache_class"] == cache


def test_the_recurrent_flags_set_keys_of_the_recurrent_table(file: Path) -> None:
    file.write_text(FILE.partition("[model]")[0])
    result = uhrc(
        "check", file, "--enable-recurrent-extra-buffer", "--recurrent-track-interval", 250
    )
    assert result.exit_code == 1
    assert result.stderr == (
        "error: components.recurrent.track_interval = 250: not whole pages of cache.page_size = "
        "16; set a multiple\n"
    )


MODEL_ONLY = FILE.replace("[components.full]\nnum_tokens = 4096\n", "")


def test_flags_change_what_the_model_picks(file: Path) -> None:
    model = Path(__file__).parents[2] / "configs" / "hybrid" / "gdn" / "config.json"
    text = MODEL_ONLY.replace("config.json", str(model)) + "[memory]\nhbm_bytes = 1_000_000_000\n"
    file.write_text(text)
    result = uhrc("check", file, "--enable-recurrent-extra-buffer")
    assert (result.exit_code, result.stdout) == (
        0,
        "ok: UnifiedRadixCache, page_size 16, components full, recurrent\n",
    )
    result = uhrc("check", file)
    assert result.stderr.startswith("error: with [components.recurrent] + ")
    assert len(result.stderr.splitlines()) == 1


def test_where_the_environment_contradicts_itself_it_is_said(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UHRC_ENABLE_UNIFIED_RADIX_TREE", "0")
    monkeypatch.setenv("SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE", "1")
    result = uhrc("check", file)
    assert result.stdout == "ok: RadixCache, page_size 16, components full\n"
    assert result.stderr == (
        "warning: UHRC_ENABLE_UNIFIED_RADIX_TREE = '0' counts, not "
        "SGLANG_JAX_ENABLE_UNIFIED_RADIX_TREE = '1'; unset one of them\n"
    )


# -- describe ----------------------------------------------------------------------------------


def test_describe_gives_pools_with_bytes(file: Path) -> None:
    facts = json.loads(uhrc("describe", file, "--json").stdout)
    (full,) = facts["components"]
    assert (full["kind"], full["eviction_priority"]) == ("FULL", 2)
    assert (full["num_units"], full["unit"], full["num_layers"]) == (4096, "tokens", 2)
    assert full["pool_bytes"] == facts["pool_bytes"] == 4096 * 1024
    assert full["buffers"] == [
        {"shape": [256, 16, 2, 32], "dtype": "float32", "count": 4, "bytes": 2**20}
    ]
    assert facts["combination"] == "(FULL) is allowed"


def test_describe_counts_bytes_of_one_dp_rank(file: Path) -> None:
    facts = json.loads(uhrc("describe", file, "--json", "--dp-size", 2).stdout)
    assert facts["pool_bytes"] == 4096 * 1024


def test_describe_prints_the_same_for_people(file: Path) -> None:
    output = uhrc("describe", file, "--set", "memory.hbm_bytes=8388608").stdout
    for part in (
        "combination (FULL) is allowed",
        "4,096 tokens",
        "4 MiB",
        "2 (leaf 0)",
        "full: 4 x float32[256, 16, 2, 32], 1 MiB each",
        "full: kernel paged_attention (reference, xla)",
        "50.0% of memory.hbm_bytes = 8,388,608 per dp rank",
    ):
        assert part in output


def test_describe_lists_the_kernels_of_the_recurrent_backend_too(file: Path) -> None:
    file.write_text(FILE.partition("[model]")[0])
    chosen = ("components.recurrent.backend=gla", "components.recurrent.enable_extra_buffer=true")
    settings = [part for setting in chosen for part in ("--set", setting)]
    _, recurrent = json.loads(uhrc("describe", file, "--json", *settings).stdout)["components"]
    assert recurrent["kernels"].keys() == {
        *("copy_slots", "track_scatter"),
        *("gla_step", "gla_prefill"),
    }


def test_describe_without_a_model_says_that_bytes_are_unknown(file: Path) -> None:
    file.write_text(FILE.partition("[model]")[0])
    assert "bytes unknown: set model.hf_config" in uhrc("describe", file).stdout


# -- schema and plugins ------------------------------------------------------------------------


def test_schema_prints_json_schema() -> None:
    schema = json.loads(uhrc("schema").stdout)
    assert {"cache", "components", "scheduler", "memory", "model"} <= set(schema["properties"])


def test_plugins_lists_each_module_with_what_it_brings(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "1 / 0", version="7.0")
    rows = {row["module"]: row for row in json.loads(uhrc("plugins", "--json").stdout)}
    assert rows["uhrc_full.plugin"]["brings"] == ["component full", "layer kinds"]
    assert rows["uhrc_full.plugin"]["problem"] is None
    bomb = rows["bomb_module"]
    assert (bomb["names"], bomb["distribution"], bomb["version"]) == (["bomb"], "uhrc-bomb", "7.0")
    assert bomb["brings"] == []
    assert "does not import: ZeroDivisionError" in bomb["problem"]


def test_a_broken_plugin_is_one_line_in_the_list(site: FakeSite) -> None:
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "1 / 0")
    result = uhrc("plugins")
    lines = [line for line in result.stdout.splitlines() if "ZeroDivisionError" in line]
    assert result.exit_code == 0 and len(lines) == 1


# -- commands of plugins -----------------------------------------------------------------------

COMMAND = """
from typing import Annotated
import typer
from uhrc_core.cli.options import with_config

def hello(name: str = "you"):
    "Say hello."
    print(f"hello {name}")

@with_config
def size(config, factor: Annotated[int, typer.Option(help="Multiplies.")] = 1):
    "Print the page size."
    print(config.cache.page_size * factor)

@hookimpl
def uhrc_cli_commands():
    return [CliCommandSpec("hello", hello), CliCommandSpec("size", size)]
"""


def test_a_plugin_adds_commands(site: FakeSite, file: Path) -> None:
    site.install("uhrc-hello", {"hello": "hello_module"}, COMMAND)
    assert "Say hello." in uhrc("--help").stdout
    assert uhrc("hello", "--name", "all").stdout == "hello all\n"


def test_a_command_with_a_config_has_the_shared_flags_and_its_own(
    site: FakeSite, file: Path
) -> None:
    site.install("uhrc-hello", {"hello": "hello_module"}, COMMAND)
    assert uhrc("size", file, "--page-size", 32, "--factor", 3).stdout == "96\n"
    result = uhrc("size", file, "--page-size", 0)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cache.page_size = 0: ")


def test_a_broken_plugin_does_not_break_the_others_commands(site: FakeSite) -> None:
    site.install("uhrc-hello", {"hello": "hello_module"}, COMMAND)
    site.install("uhrc-bomb", {"bomb": "bomb_module"}, "1 / 0")
    result = uhrc("--help")
    assert result.exit_code == 0
    assert "hello" in result.stdout and "check" in result.stdout


BROKEN = {
    "an exit": "@hookimpl\ndef uhrc_component_specs():\n    raise SystemExit(3)\n",
    "an import": "raise SystemExit",
    "no name": "@hookimpl\ndef uhrc_component_specs():\n    return [fake_spec([])]\n",
    "no function": "@hookimpl\ndef uhrc_cli_commands():\n    return [CliCommandSpec('o', None)]\n",
    "unknown annotation": (
        "def odd(x: 'NotThere'):\n    pass\n"
        "@hookimpl\ndef uhrc_cli_commands():\n    return [CliCommandSpec('odd', odd)]\n"
    ),
    "unknown field type": (
        "class Odd(ConfigTable):\n    x: 'NotThere' = 1\n"
        "@hookimpl\ndef uhrc_config_tables():\n    return [ConfigTableSpec('odd', Odd)]\n"
    ),
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_costs_a_line_and_nobody_elses_command(
    site: FakeSite, file: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    site.install("uhrc-odd", {"odd": "odd_module", "also_odd": "odd_module"}, source)
    result = uhrc("check", file)
    assert result.stdout == "ok: UnifiedRadixCache, page_size 16, components full\n"
    (warning,) = capsys.readouterr().err.splitlines()
    assert "uhrc-odd 0.3.1 (odd_module)" in warning
    assert "components" in json.loads(uhrc("schema").stdout)["properties"]
    rows = {row["module"]: row for row in json.loads(uhrc("plugins", "--json").stdout)}
    assert rows["odd_module"]["problem"] == warning.removeprefix("warning: ")


def test_a_component_may_have_any_name_in_the_schema(site: FakeSite) -> None:
    source = "@hookimpl\ndef uhrc_component_specs():\n    return [fake_spec('_model_config')]\n"
    site.install("uhrc-odd", {"_model_config": "odd_module"}, source)
    tables = json.loads(uhrc("schema").stdout)["$defs"]["ComponentTables"]
    assert {"_model_config", "full"} <= set(tables["properties"])


def test_a_plugin_cannot_replace_a_command_of_the_core(site: FakeSite, file: Path) -> None:
    site.install(
        "uhrc-hello", {"hello": "hello_module"}, COMMAND.replace('"hello", h', '"check", h')
    )
    assert uhrc("check", file).stdout.startswith("ok: ")


def test_a_wrong_limit_of_plugins_is_a_warning_in_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UHRC_PLUGINS", "fulll")
    assert uhrc("--help").exit_code == 0
    result = uhrc("plugins")
    assert result.exit_code == 1 and "UHRC_PLUGINS names 'fulll'" in result.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_the_command_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from uhrc_core.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        f"uhrc: the command line needs {missing}; run: pip install 'uhrc-core[cli]'\n"
    )


@pytest.mark.parametrize(
    "command", [[Path(sys.executable).with_name("uhrc")], [sys.executable, "-m", "uhrc_core"]]
)
def test_the_version_is_the_distributions(command: list[object]) -> None:
    result = subprocess.run(
        [*map(str, command), "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"uhrc {version('uhrc-core')}\n" == f"uhrc {uhrc_core.__version__}\n"
