"""`uhrc generate`, `uhrc chat` and `uhrc run` on the tiny checkpoint."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uhrc_core.cli.app import make_app
from uhrc_engine import Engine
from uhrc_engine.workload import compare as compare_module

CONFIG = """
[cache]
enable_unified_radix_tree = true
page_size = 16
max_requests = 2
max_context_len = 512
[components.full]
num_tokens = 1024
[scheduler]
chunked_prefill_size = 64
[engine]
model = "{model}"
decode_rows = [2]
[workload]
conversations = "talk.toml"
max_new_tokens = 6
"""
TALK = """
[[conversation]]
system = "A system prompt that is longer than a page."
questions = ["one", "two"]
[[conversation]]
system = "A system prompt that is longer than a page."
questions = ["three", "four"]
"""


@pytest.fixture
def config(tmp_path: Path, tiny_checkpoint: Path) -> str:
    (tmp_path / "talk.toml").write_text(TALK)
    (tmp_path / "run.toml").write_text(CONFIG.format(model=tiny_checkpoint))
    return str(tmp_path / "run.toml")


def uhrc(*arguments: str, stdin: str = "") -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_run_compares_and_writes_json(config: str, tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    code, output = uhrc("run", config, "--json", str(written))
    assert code == 0, output
    assert "identical outputs" in output
    assert "yes" in output
    report = json.loads(written.read_text())
    assert report["identical_outputs"] is True
    without, with_cache = report["runs"]
    assert without["cached_tokens"] == 0
    assert with_cache["cached_tokens"] > with_cache["prompt_tokens"] // 2
    assert without["prompt_tokens"] == with_cache["prompt_tokens"]
    assert len(with_cache["turns"]) == 4


def test_run_leaves_with_1_when_the_answers_differ(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*args, **kwargs):  # type: ignore[no-untyped-def]
        comparison = real(*args, **kwargs)
        first, second = comparison.talks
        wrong = replace(second.turns[-1], token_ids=(0,))
        second = replace(second, turns=(*second.turns[:-1], wrong))
        return replace(comparison, talks=(first, second))

    real = compare_module.compare
    monkeypatch.setattr(compare_module, "compare", forgetful)
    code, output = uhrc("run", config)
    assert code == 1
    assert "NO" in output
    assert "((1, 1),)" in output


def test_run_is_left_cleanly_with_ctrl_c(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(engine: Engine) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "warmup", interrupted)
    written = tmp_path / "out.json"
    code, output = uhrc("run", config, "--json", str(written))
    assert code == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    assert not written.exists()


def test_generate_continues_the_prompt(config: str) -> None:
    code, output = uhrc("generate", config, "--prompt", "abc", "--max-new-tokens", "4")
    again = uhrc("generate", config, "--prompt", "-", "--max-new-tokens", "4", stdin="abc")[1]
    assert code == 0
    assert output == again
    assert output.strip()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--temperature", "-1"),
        ("--temperature", "inf"),
        ("--temperature", "nan"),
        ("--max-new-tokens", "0"),
        ("--seed", str(2**32)),
    ],
)
def test_a_bad_option_is_refused_before_the_model_is_loaded(
    config: str, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", None)
    for command in (["generate", config, "--prompt", "abc"], ["chat", config]):
        code, output = uhrc(*command, option, value)
        assert code == 2
        assert f"Invalid value for '{option}'" in output


def test_a_config_without_a_model_says_how_to_name_one(config: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text(CONFIG.replace('model = "{model}"', ""))
    code, output = uhrc("generate", str(bare), "--prompt", "x")
    assert code == 1
    assert "engine.model: not set" in output


def test_chat_shows_what_each_turn_reused(config: str) -> None:
    lines = "hello there, how are you today?\nand now?\n/reset\nhello there, how are you today?\n"
    code, output = uhrc("chat", config, "--max-new-tokens", "6", stdin=lines)
    assert code == 0, output
    costs = [line for line in output.splitlines() if "prompt tokens from the cache" in line]
    cached = [int(line.split("[")[1].split()[0]) for line in costs]
    assert len(cached) == 3
    assert cached[0] == 0
    assert cached[1] > 32
    assert cached[2] > 32  # the first question again, after /reset


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, count = Engine.step, iter(range(1000))

    def press_at_third(engine: Engine):  # type: ignore[no-untyped-def]
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", press_at_third)
    code, output = uhrc("chat", config, "--max-new-tokens", "50", stdin="hello\nagain\n")
    assert code == 0, output
    costs = [line for line in output.splitlines() if "prompt tokens from the cache" in line]
    assert [int(line.split(" tokens in")[0].split()[-1]) for line in costs] == [3, 50]


def test_chat_starts_over_when_the_context_is_full(config: str) -> None:
    code, output = uhrc("chat", config, stdin="x" * 600 + "\nhi\n")
    assert code == 0
    assert "filled the context" in output
    assert "prompt tokens from the cache" in output
