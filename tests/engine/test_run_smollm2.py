"""The main job on the real model, cut short."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from uhrc_core.cli.app import make_app
from uhrc_engine.models.errors import FetchError
from uhrc_engine.weights.smollm2 import fetch_smollm2

CONFIG = Path(__file__).parents[2] / "configs" / "smollm2.toml"


@pytest.mark.slow
def test_smollm2_answers_the_same_with_and_without_the_cache(tmp_path: Path) -> None:
    try:
        fetch_smollm2(quiet=True)
    except FetchError as error:
        pytest.skip(str(error))
    written = tmp_path / "run.json"
    arguments = ["run", str(CONFIG), "--json", str(written)]
    arguments += ["--set", "workload.turns=1", "--set", "workload.max_new_tokens=8"]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    without, with_cache = json.loads(written.read_text())["runs"]
    assert without["cached_tokens"] == 0
    assert [turn["cached_tokens"] // 900 for turn in with_cache["turns"]] == [0, 1, 0, 1]
    assert with_cache["turns"][0]["text"].startswith("The Tidehouse is")
