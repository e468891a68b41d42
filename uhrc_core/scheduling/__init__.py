"""Scheduling rules that are the cache's business, as pure functions: admission, chunking."""

from uhrc_core.scheduling.admission import TokenNeed, admission_tokens
from uhrc_core.scheduling.chunking import next_chunk_end

__all__ = ["TokenNeed", "admission_tokens", "next_chunk_end"]
