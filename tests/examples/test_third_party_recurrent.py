"""examples/third_party_recurrent, built to a wheel and installed beside UHRC, and not installed.

The wheel goes into a folder of its own, which only subprocesses have on their path: to the rest of
the tests Mamba-2 is unknown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_recurrent"
OWN_TESTS = EXAMPLE / "tests"
MODELS = Path(__file__).with_name("third_party_models.py")
CONFIG = """
[cache]
enable_unified_radix_tree = true
page_size = 128

[components.full]
num_tokens = 65536

[components.recurrent]
backend = "mamba2"
enable_extra_buffer = true
"""
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
}
KINDS = """
import sys
import uhrc_core
cache = uhrc_core.build_kv_cache(uhrc_core.load_config(sys.argv[1]))
print(*(component.kind.name for component in cache.components))
"""
MODEL = """
import json, sys
from uhrc_engine.models import model_from_config
model_from_config(json.loads(sys.argv[1]))
"""


@dataclass(frozen=True)
class Place:
    """A working folder outside the checkout, and what is on the path there beside UHRC."""

    folder: Path
    installed: Path | None = None

    def run(self, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("UHRC_")}
        environ["PYTHONPATH"] = str(self.installed or "")
        command = [str(Path(sys.executable).with_name(program)), *map(str, arguments)]
        return subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False
        )

    def output(self, program: str, *arguments: object) -> str:
        result = self.run(program, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def plugins(self) -> dict[str, list[str]]:
        rows = json.loads(self.output("uhrc", "plugins", "--json"))
        return {row["distribution"]: row["names"] for row in rows}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("work")
    (folder / "cache.toml").write_text(CONFIG)
    (folder / "config.json").write_text(json.dumps(BAMBA))
    place = Place(folder)
    assert "uhrc-mamba2" not in place.plugins(), "uninstall it: these tests install their own"
    return place


@pytest.fixture(scope="module")
def wheel(without: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline, with the hatchling that is here."""
    folder = tmp_path_factory.mktemp("wheel")
    how = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder)
    without.output("python", "-m", "pip", "wheel", "--quiet", *how, EXAMPLE)
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(without: Place, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    target = tmp_path_factory.mktemp("site")
    how = ("--no-deps", "--no-index", "--target", target)
    without.output("python", "-m", "pip", "install", "--quiet", *how, wheel)
    return Place(without.folder, target)


def test_the_wheel_holds_its_package_alone(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    tops = {file.partition("/")[0] for file in files}
    assert tops == {"uhrc_mamba2", "uhrc_mamba2-0.1.0.dist-info"}
    assert "uhrc_mamba2/py.typed" in files


def test_nothing_in_the_core_or_its_plugins_names_it() -> None:
    for folder in ("uhrc_core", "plugins", "engine"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8").lower()
            assert not {"mamba2", "bamba", "granitemoehybrid"} & {
                *text.replace("_", " ").split()
            }, file
            assert "uhrc_mamba2" not in text, file


def test_it_is_listed_where_it_is_installed(installed: Place, without: Place) -> None:
    assert installed.plugins() == without.plugins() | {"uhrc-mamba2": ["mamba2"]}


def test_its_config_builds_a_full_and_recurrent_cache(installed: Place) -> None:
    assert installed.output("python", "-c", KINDS, "cache.toml").split() == ["FULL", "RECURRENT"]
    named = ("--set", "model.hf_config=config.json")
    assert "components full, recurrent" in installed.output("uhrc", "check", "cache.toml", *named)


def test_without_it_the_same_config_says_what_is_missing(without: Place) -> None:
    result = without.run("uhrc", "check", "cache.toml")
    assert result.returncode != 0
    assert " ".join(result.stderr.split()) == (
        "error: components.recurrent.backend = 'mamba2': no recurrent backend; it can be gdn, gla, "
        "kda; for another, install the distribution that brings it"
    )
    asked = without.run("uhrc", "check", "cache.toml", "--set", "model.hf_config=config.json")
    assert "no installed plugin knows model_type = 'bamba'" in asked.stderr
    served = without.run("python", "-c", MODEL, json.dumps(BAMBA))
    assert served.returncode != 0
    assert (
        "no model class for architectures = ['BambaForCausalLM'], model_type = 'bamba'"
        in served.stderr
    )


def test_without_it_the_others_are_as_before(without: Place) -> None:
    settings = ("--set", "components.recurrent.backend=kda")
    assert "components full, recurrent" in without.output("uhrc", "check", "cache.toml", *settings)


def run_tests(place: Place, marked: str, *paths: Path) -> None:
    """pytest where the example is installed; every test that `marked` selects must pass."""
    for path in paths:
        options = ("-q", "-p", "no:cacheprovider", "-m", marked)
        result = place.run("python", "-m", "pytest", *options, path)
        assert result.returncode == 0, result.stdout + result.stderr
        summary = result.stdout.splitlines()[-1]
        assert "passed" in summary and not {"skipped", "xfailed"} & {*summary.split()}, summary


def test_its_own_tests_pass(installed: Place) -> None:
    """Kernels, configs, the conformance kit, serving with hits."""
    run_tests(installed, "not slow", OWN_TESTS)


def test_its_model_equals_the_oracle(installed: Place) -> None:
    run_tests(installed, "not slow", MODELS)


@pytest.mark.slow
def test_the_slow_ones_pass(installed: Place) -> None:
    """Every option of the models, and the other family served."""
    run_tests(installed, "slow", OWN_TESTS, MODELS)
