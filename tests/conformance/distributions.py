"""Installs a distribution for a test without pip: its wheel, unpacked into a folder on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

_BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


class Site:
    """A folder of installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def install(self, project: Path) -> None:
        """Build the project's wheel and unpack it."""
        name = self.run(sys.executable, "-c", _BUILD, self.folder, cwd=project).split()[-1]
        with zipfile.ZipFile(self.folder / name) as wheel:
            wheel.extractall(self.folder)

    def run(self, *command: object, cwd: Path) -> str:
        """What a command that must succeed prints, with the folder on its path."""
        environ = {key: value for key, value in os.environ.items() if not key.startswith("UHRC_")}
        result = subprocess.run(
            [str(each) for each in command],
            cwd=cwd,
            env=environ | {"PYTHONPATH": str(self.folder)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout
