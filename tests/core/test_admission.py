"""The headroom rule: what must be free or evictable for an admission."""

from __future__ import annotations

from uhrc_core.scheduling import TokenNeed, admission_tokens


def test_a_new_request_needs_what_it_will_compute_and_its_headroom() -> None:
    assert TokenNeed(allocated_len=0, known_len=10, max_len=100).reserve(4, page_size=1) == 14
    assert TokenNeed(allocated_len=6, known_len=10, max_len=100).reserve(4, page_size=1) == 8


def test_headroom_stops_at_the_most_the_request_can_hold() -> None:
    assert TokenNeed(allocated_len=0, known_len=10, max_len=12).reserve(64, page_size=1) == 12


def test_the_rest_of_the_last_page_is_not_needed_twice() -> None:
    assert TokenNeed(allocated_len=17, known_len=17, max_len=100).reserve(15, page_size=16) == 0
    assert TokenNeed(allocated_len=17, known_len=17, max_len=100).reserve(16, page_size=16) == 16


def test_running_requests_keep_their_headroom() -> None:
    new = TokenNeed(allocated_len=16, known_len=40, max_len=41)
    decoding = TokenNeed(allocated_len=32, known_len=33, max_len=90)
    prefilling = TokenNeed(allocated_len=0, known_len=100, max_len=101)
    # new: 48 - 16; decoding: 64 - 32 for 33 + 20; prefilling: 112 - 0
    assert admission_tokens(new, [decoding, prefilling], 20, 16) == 32 + 32 + 112
