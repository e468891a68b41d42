"""Installs plugin distributions for a test: real metadata and modules in a folder on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

HEADER = """
from uhrc_core.plugin_api import *
from tests.core.fake_component import FakeParams, fake_spec
UHRC_API = (1, 0)
"""


class FakeSite:
    """A folder on sys.path to install distributions into; gone after the test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(folder)

    def install(
        self,
        distribution: str,
        names: dict[str, str],
        source: str = "",
        *,
        header: str = HEADER,
        version: str = "0.3.1",
    ) -> None:
        """A distribution whose entry points are ``names`` and whose module they share has this
        source (for all of its modules)."""
        info = self._folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        points = "\n".join(f"{name} = {module}" for name, module in names.items())
        (info / "entry_points.txt").write_text(f"[uhrc.plugins]\n{points}\n")
        for module in set(names.values()):
            (self._folder / f"{module}.py").write_text(header + dedent(source))
            self._monkeypatch.delitem(sys.modules, module, raising=False)
        self._monkeypatch.syspath_prepend(self._folder)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """Where a test installs its plugins."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.delenv("UHRC_PLUGINS", raising=False)
    fake = FakeSite(folder, monkeypatch)
    yield fake
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(folder) in str(
            sys.modules[module].__file__
        ):
            del sys.modules[module]
