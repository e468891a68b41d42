"""The README's Python is run, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import PlainRequest

README = Path(__file__).parents[2] / "README.md"


def _snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_cache_is_embedded_in_at_most_20_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = _snippets()[0]
    assert len(snippet.splitlines()) <= 20
    monkeypatch.chdir(README.parent)
    names: dict[str, Any] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    cache, generate = names["cache"], names["generate"]
    stored: dict[int, int] = {}

    def forward(new: list[int], row: Any) -> int:
        """A model whose next token is the sum of all tokens so far, read where they were stored."""
        stored.update(zip(row[len(row) - len(new) :].tolist(), new, strict=True))
        return sum(stored[index] for index in row.tolist()) % 1000

    document = list(range(100, 150))
    prompts = [[*document, 1, 2], [*document, 3, 4], [*document, 1, 2]]
    requests = [PlainRequest(str(n), prompt) for n, prompt in enumerate(prompts)]
    hits: list[int] = []
    for req in requests:
        generate(req, forward, 3)
        hits.append(cache.stats().hit_num_tokens - sum(hits))
        cache.check_invariants()
    assert hits == [0, 48, 48]
    assert [req.token_ids[52:] for req in requests] == [_sums(prompt[:52]) for prompt in prompts]


def _sums(tokens: list[int]) -> list[int]:
    for _ in range(3):
        tokens = [*tokens, sum(tokens) % 1000]
    return tokens[-3:]
