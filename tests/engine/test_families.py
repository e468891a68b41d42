"""Families are found by entry points, and each needs only the plugins of its own layers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from uhrc_engine.models import ENTRY_POINT_GROUP
from uhrc_engine.models.contract import Model

CONFIGS = Path(__file__).parents[2] / "configs"

SERVE = """
import json, sys
from pathlib import Path

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Missing())
from uhrc_core.config.loading import parse_config
from uhrc_engine import Engine, Request
from uhrc_engine.assembly import build_parts
from uhrc_engine.weights import load_seeded

config = json.loads(Path({config!r}).read_text()) | {changes!r}
path = Path({folder!r})
(path / "config.json").write_text(json.dumps(config))
cache = {{"enable_unified_radix_tree": True, "max_requests": 2, "max_context_len": 512}}
tables = {{
    "cache": cache | {cache!r},
    "components": {components!r},
    "engine": {{"prefill_widths": [64], "decode_rows": [1]}},
    "scheduler": {{"chunked_prefill_size": 64}},
}}
engine = Engine(build_parts(load_seeded(path, 1), parse_config(tables)))
prompt = list(range(100))
hits = [engine.generate([Request(prompt, 2)])[0].cached_tokens for _ in range(2)]
assert hits == [0, {hit}], hits
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "layer_types": None,
    "sliding_window": None,
    "num_hidden_layers": 1,
}
SWA = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def serve(missing: str, plugins: str, tmp_path: Path, **changes: object) -> str:
    """A model served in a process without one of the packages; what it says on failure."""
    values = {
        "missing": missing,
        "folder": str(tmp_path),
        "config": str(CONFIGS / "swa/config.json"),
        "changes": {},
        "cache": {"page_size": 16},
        "components": {"full": {"num_tokens": 1024}},
        "hit": 96,
    }
    code = SERVE.format(**(values | changes))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "", "JAX_PLATFORMS": "cpu", "UHRC_PLUGINS": plugins},
    )
    return done.stderr


def test_every_family_of_ours_loads() -> None:
    ours = [p for p in entry_points(group=ENTRY_POINT_GROUP) if p.value.startswith("uhrc_engine.")]
    assert len(ours) > 30
    assert all(issubclass(point.load(), Model) for point in ours)


@pytest.mark.parametrize("missing", ["uhrc_swa", "uhrc_recurrent", "uhrc_hicache_stub"])
def test_without_a_plugin_the_others_models_are_served(missing: str, tmp_path: Path) -> None:
    assert not serve(missing, "full,engine", tmp_path, changes=LLAMA)


def test_windows_need_no_recurrent_plugin(tmp_path: Path) -> None:
    components = {"full": {"num_tokens": 1024}, "swa": {}}
    plugins = "full,swa,engine"
    assert not serve("uhrc_recurrent", plugins, tmp_path, changes=SWA, components=components)


def test_a_family_without_its_plugin_says_what_is_missing(tmp_path: Path) -> None:
    config = str(CONFIGS / "hybrid/gdn/config.json")
    said = serve("uhrc_recurrent", "full,engine", tmp_path, config=config)
    assert "PluginError: model class 'Qwen3NextForCausalLM' of uhrc-engine" in said
    assert "No module named 'uhrc_recurrent" in said
