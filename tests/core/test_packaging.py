"""The six distributions: what their wheels hold, and what installing one makes appear."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Distribution, its folder, its package.
PROJECTS = {
    "uhrc-core": (".", "uhrc_core"),
    "uhrc-full": ("plugins/full", "uhrc_full"),
    "uhrc-swa": ("plugins/swa", "uhrc_swa"),
    "uhrc-recurrent": ("plugins/recurrent", "uhrc_recurrent"),
    "uhrc-hicache-stub": ("plugins/hicache_stub", "uhrc_hicache_stub"),
    "uhrc-engine": ("engine", "uhrc_engine"),
}

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"

IMPORT_COST = """
import sys
import numpy, pydantic
from pydantic import BaseModel
before = set(sys.modules)
import uhrc_core
print(*sorted(set(sys.modules) - before))
"""


def run(*command: object, cwd: Path = ROOT) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("UHRC_")}
    result = subprocess.run(
        [str(each) for each in command], cwd=cwd, env=environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    return {
        name: folder / run(sys.executable, "-c", BUILD, folder, cwd=ROOT / where).split()[-1]
        for name, (where, _) in PROJECTS.items()
    }


class CleanEnvironment:
    """A virtual environment with our dependencies and none of our distributions."""

    def __init__(self, folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        self.python = folder / "venv/bin/python"
        dependencies = folder / "dependencies"
        dependencies.mkdir()
        installed = Path(pytest.__file__).parents[1]
        for entry in installed.iterdir():
            if "uhrc" not in entry.name and entry.suffix != ".pth":
                (dependencies / entry.name).symlink_to(entry)
        (site,) = (folder / "venv/lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(f"{dependencies}\n")

    def pip(self, *arguments: object) -> None:
        run(
            sys.executable,
            *("-m", "pip", "--disable-pip-version-check", "--python", self.python),
            *arguments,
        )

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--quiet", "--no-deps", "--no-index", *wheels)

    def plugins(self) -> Mapping[str, list[str]]:
        """What ``uhrc plugins`` lists: distribution to names."""
        uhrc = self.python.with_name("uhrc")
        rows = json.loads(run(uhrc, "plugins", "--json", cwd=self.python.parent))
        return {row["distribution"]: row["names"] for row in rows}


def test_every_wheel_holds_its_package_alone(wheels: dict[str, Path]) -> None:
    for name, path in wheels.items():
        files = zipfile.ZipFile(path).namelist()
        package = PROJECTS[name][1]
        tops = {file.partition("/")[0] for file in files}
        assert tops == {package, f"{name.replace('-', '_')}-0.1.0.dist-info"}, name
        assert f"{package}/py.typed" in files
        assert not [file for file in files if "test_" in file or "__pycache__" in file]


def test_core_depends_on_numpy_pydantic_and_pluggy_only(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["uhrc-core"]) as wheel:
        metadata = wheel.read("uhrc_core-0.1.0.dist-info/METADATA").decode()
    needs = [line.split()[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    required = [
        line
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and ";" not in line
    ]
    assert len(required) == 3
    assert {need.partition(">")[0] for need in needs[:3]} == {"numpy", "pluggy", "pydantic"}


def test_plugins_appear_and_vanish_with_their_distributions(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    clean = CleanEnvironment(tmp_path)
    clean.install(wheels["uhrc-core"])
    assert clean.plugins() == {}
    clean.install(*(wheels[name] for name in PROJECTS if name != "uhrc-core"))
    assert clean.plugins() == {
        "uhrc-full": ["full"],
        "uhrc-swa": ["swa"],
        "uhrc-recurrent": ["gdn", "gla", "kda", "recurrent"],
        "uhrc-hicache-stub": ["stub"],
        "uhrc-engine": ["engine", "workload"],
    }
    clean.pip("uninstall", "--yes", "--quiet", "uhrc-full")
    assert "uhrc-full" not in clean.plugins()


def test_importing_the_core_is_cheap_and_imports_no_jax() -> None:
    """Told by the modules and not by the time: what a machine is busy with must not matter."""
    imported = run(sys.executable, "-c", IMPORT_COST).split()
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert "uhrc_core" in packages
    assert packages <= {"uhrc_core", "numpy", "pydantic", "annotated_types", "pluggy"}
    assert not {"asyncio", "multiprocessing", "concurrent.futures"} & set(imported)


def test_plugins_are_declared_without_importing_jax() -> None:
    code = (
        "import sys; from uhrc_core.registry.catalog import installed_plugins as found; "
        "catalog = found(); catalog.load(catalog.names); assert 'jax' not in sys.modules"
    )
    run(sys.executable, "-c", code)


def test_constraints_pin_every_requirement_to_one_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    names = {name.lower().replace("_", "-") for name in pins}
    assert {"jax", "numpy", "pydantic", "pluggy", "typer", "rich", "pytest", "ruff"} <= names


@pytest.mark.parametrize("page", ["config.md", "plugins.md"])
def test_the_generated_pages_are_current(page: str) -> None:
    output = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True
    )
    assert page not in output.stderr, output.stderr
