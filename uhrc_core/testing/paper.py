"""PaperDevice: an engine and its pools on paper, where each place remembers what was written there.

A place of a token pool holds the prefix whose last token was written to it, a slot the tokens its
state has seen. So a wrong index, a stale snapshot and a page freed too early all show as another
sequence's data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from uhrc_core.cache.base import BasePrefixCache
from uhrc_core.cache.key import TOKEN_BYTES, ExtraKey, Namespace, RadixKey
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import MatchResult
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType

_REC = ComponentType.RECURRENT

#: A forward adds at most this many pages of tokens.
FORWARD_PAGES = 3

#: The tokens of a sequence up to some length, in their namespace.
Prefix = tuple[Namespace, bytes]
#: A component, a dp rank and one of its indices there.
Place = tuple[ComponentType, int, int]


@dataclass
class PlainRequest:
    """The least an engine's request must have."""

    rid: str
    token_ids: list[int]
    extra_key: ExtraKey = None
    dp_rank: int = 0
    priority: int = 0

    def key(self, seqlen: int) -> RadixKey:
        """Of its first ``seqlen`` tokens."""
        return RadixKey(self.token_ids[:seqlen], self.extra_key, self.dp_rank)


class PaperDevice:
    """Runs requests of one cache as an engine does; raises AssertionError at what a model would
    read wrong.

    Args:
        window_tokens: how many tokens a token of the SWA component's layers attends to, itself
            included; ``None``: not known, so not checked.
    """

    def __init__(self, cache: BasePrefixCache, window_tokens: int | None = None) -> None:
        self.cache = cache
        self.window_tokens = window_tokens
        self._written: dict[Place, Prefix] = {}

    def read(self, place: Place) -> Prefix | None:
        """What was written there last, if anything was."""
        return self._written.get(place)

    def write(self, place: Place, prefix: Prefix) -> None:
        self._written[place] = prefix

    def admit(self, req: PlainRequest) -> bool:
        """Match and admit; ``False``: it must wait."""
        match = self.cache.match_req(req)
        self.check_hit(req.key(len(req.token_ids)), match)
        num_tokens = len(req.token_ids) - match.hit_len
        return self.cache.admit_req(req, match, num_tokens) is not None

    def start(self, req: PlainRequest) -> None:
        """Copy the state that the request's hit ends with, if there is any."""
        computed = self.cache.request_state(req.rid).computed_len
        slots = self.cache.state_slots(req, computed, computed + 1)
        if slots is not None and slots.clone_src is not None:
            seen = _prefix(req.key(computed), computed)
            assert (req.dp_rank, slots.clone_src) in self._locked_slots(), (
                f"{req.rid}: slot {slots.clone_src}, which it is to copy, is not locked in the tree"
            )
            assert self.read((_REC, req.dp_rank, slots.clone_src)) == seen, (
                f"{req.rid}: the snapshot in slot {slots.clone_src} is not the state after its "
                f"{computed} tokens"
            )
            self.write((_REC, req.dp_rank, slots.running), seen)
        elif slots is not None:
            assert computed == 0, f"{req.rid}: a hit of {computed} tokens without a snapshot"
            self.write((_REC, req.dp_rank, slots.running), _prefix(req.key(0), 0))
        self.cache.started_req(req)

    def _locked_slots(self) -> set[tuple[int, int]]:
        """(dp rank, slot) of every snapshot that cannot be evicted now."""
        slots = ((node.dp_rank, node.component_data[_REC]) for node in self.cache.nodes())
        return {
            (dp_rank, int(data.value[0]))
            for dp_rank, data in slots
            if data.value is not None and data.lock_ref
        }

    def extend(self, req: PlainRequest, stop: int) -> int | None:
        """Take memory for a forward towards ``stop`` tokens; where it ends, if there was any.

        It ends where the cache cuts it, and after `FORWARD_PAGES` pages.
        """
        state = self.cache.request_state(req.rid)
        start = state.computed_len
        stop = min(stop, start + FORWARD_PAGES * self.cache.page_size)
        stop = next(iter(self.cache.cuts(req, start, stop)), stop)
        missing = max(stop - state.allocated_len, 0)
        return stop if self.cache.extend_req(req, missing) is not None else None

    def forward(self, req: PlainRequest, stop: int) -> None:
        """Compute up to ``stop`` tokens: read what is there, write what is new."""
        start = self.cache.request_state(req.rid).computed_len
        key = req.key(stop)
        for kind, indices in self.cache.token_indices(req, stop).items():
            needed = self._first_read(kind, start)
            for position, index in enumerate(indices.tolist()):
                place = (kind, req.dp_rank, index)
                assert index >= 0 or position < needed, (
                    f"{req.rid}: a forward from token {start} reads token {position}, which has no "
                    f"{kind.name} index"
                )
                if position >= start:
                    self.write(place, _prefix(key, position + 1))
                elif index >= 0:
                    self._check_token(place, key, position, req.rid)
        slots = self.cache.state_slots(req, start, stop)
        if slots is not None:
            assert slots.clone_src is None, f"{req.rid}: its state would be copied a second time"
            seen = self.read((_REC, req.dp_rank, slots.running))
            assert seen == _prefix(key, start), (
                f"{req.rid}: its running slot {slots.running} is not the state after {start} tokens"
            )
            for slot in (slots.running, slots.track):
                if slot is not None:
                    self.write((_REC, req.dp_rank, slot), _prefix(key, stop))
        self.cache.advance_req(req, stop - start)

    def _first_read(self, kind: ComponentType, start: int) -> int:
        """The first token that the token at ``start`` attends to in this component's layers."""
        if kind is not ComponentType.SWA:
            return 0
        return start if self.window_tokens is None else start + 1 - self.window_tokens

    def serve(self, req: PlainRequest) -> None:
        """A whole request, from arrival to `cache_finished_req`."""
        self.compute(req)
        self.cache.cache_finished_req(req)

    def compute(self, req: PlainRequest) -> None:
        """Admit a request, prefill as its cuts say and publish each piece; it stays live."""
        assert self.admit(req), (
            f"{req.rid} was not admitted; the pools are too small for this check"
        )
        self.start(req)
        while self.cache.request_state(req.rid).computed_len < len(req.token_ids):
            stop = self.extend(req, len(req.token_ids))
            assert stop is not None, f"{req.rid}: the pools are too small for this check"
            self.forward(req, stop)
            self.cache.cache_unfinished_req(req)

    # -- checks --------------------------------------------------------------------------------

    def check_hit(self, key: RadixKey, match: MatchResult) -> None:
        """The indices of a hit hold the key's own tokens."""
        for position, index in enumerate(match.device_indices.tolist()):
            self._check_token((ComponentType.FULL, key.dp_rank, index), key, position, "a hit")

    def check_tree(self) -> None:
        """What the tree holds at every node is what its tokens say."""
        for node in self.cache.nodes()[1:]:
            tokens = b"".join(part.key.data for part in [*node.path_to_root()][::-1])
            for component in self.cache.components:
                value = component.data(node).value
                for position, index in positions(node, value):
                    said = (node.key.namespace, tokens[: TOKEN_BYTES * (position + 1)])
                    where = f"{component.kind.name} at {node}"
                    found = self.read((component.kind, node.dp_rank, index))
                    assert found == said, f"{where}: index {index} holds another sequence's data"

    def _check_token(self, place: Place, key: RadixKey, position: int, who: str) -> None:
        kind, _, index = place
        assert self.read(place) == _prefix(key, position + 1), (
            f"{who}: token {position} at {kind.name} index {index} is another sequence's"
        )


def positions(node: UnifiedTreeNode, value: IndexArray | None) -> Iterable[tuple[int, int]]:
    """(position, index) of a node's value; a slot's position is that of the edge's last token."""
    indices: list[int] = [] if value is None else value.tolist()
    return enumerate(indices, node.end - len(indices))


def _prefix(key: RadixKey, seqlen: int) -> Prefix:
    return key.namespace, key.data[: TOKEN_BYTES * seqlen]
