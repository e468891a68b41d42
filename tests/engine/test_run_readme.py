"""The README's Python is run, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support import PlainRequest

README = Path(__file__).parents[2] / "README.md"


def _snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_cache_is_embedded_in_at_most_20_lines() -> None:
    snippet = _snippets()[0]
    assert len(snippet.splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    written: dict[int, int] = {}

    def forward(token_ids: list[int], indices: Any) -> None:
        written.update(zip(indices.tolist(), token_ids, strict=True))

    document = list(range(100, 150))
    hits = [
        names["prefill"](PlainRequest("a", [*document, 1, 2]), forward),
        names["prefill"](PlainRequest("b", [*document, 3, 4]), forward),
        names["prefill"](PlainRequest("c", [*document, 1, 2]), forward),
    ]
    assert hits == [0, 48, 48]
    names["cache"].check_invariants()
    key = names["uhrc"].RadixKey(document)
    found = names["cache"].match_prefix(names["uhrc"].MatchPrefixParams(key=key)).device_indices
    assert [written[index] for index in found.tolist()] == document[:48]


def test_the_engine_is_used_as_shown(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = tmp_path / "cache.toml"
    config.write_text(
        "[cache]\nenable_unified_radix_tree = true\nmax_context_len = 256\n"
        "[components.full]\nnum_tokens = 512\n[scheduler]\nchunked_prefill_size = 64\n"
    )
    snippet = _snippets()[1].replace("path/to/model", str(tiny_checkpoint))
    names: dict[str, Any] = {}
    exec(compile(snippet.replace("cache.toml", str(config)), "README.md", "exec"), names)
    assert len(names["done"].token_ids) == 8
