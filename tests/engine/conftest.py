"""The tiny checkpoint, written once a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with random weights."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))
