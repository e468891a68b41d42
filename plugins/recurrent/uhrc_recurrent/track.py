"""RequestSlots: the recurrent slots of one running request, and what state each of them holds.

Beside its *running* slot, which every forward rewrites, a request of the extra-buffer path owns K
*track* slots. A forward that ends on a track boundary also leaves its final state in the next track
slot, in turn (ping-pong), so that with K = 2 the kept state survives while a further forward is in
flight. A kept state is given to the tree as a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TrackSlot:
    """``seqlen``: tokens after which the slot's state was taken; 0: it holds nothing of use."""

    slot: int
    seqlen: int = 0


@dataclass(slots=True)
class RequestSlots:
    """Slots of one request; knows positions, not memory (that is `HybridReqToTokenPool`).

    Attributes:
        running: rewritten by every forward.
        tracks: K slots, the next to be written first. The base path has none, or one for the
            branching state.
        interval: tokens between track boundaries; ``None`` on the base path, which has none.
        clone_src: the snapshot to copy into ``running`` before the first forward, until copied.
        branching_seqlen: an extra position to keep a state at; see `MatchResult`.
        spare: secured to replace a track slot that goes to the tree; ``None`` as a rule.
    """

    running: int
    tracks: list[TrackSlot]
    interval: int | None
    clone_src: int | None
    branching_seqlen: int | None
    spare: int | None = None

    def boundaries(self, start: int, stop: int) -> list[int]:
        """Positions in ``(start, stop]`` at which a forward leaves a state to keep, ascending."""
        if not self.tracks:
            return []
        found: set[int] = set()
        if self.interval is not None:
            first = (start // self.interval + 1) * self.interval
            found.update(range(first, stop + 1, self.interval))
        if self.branching_seqlen is not None and start < self.branching_seqlen <= stop:
            found.add(self.branching_seqlen)
        return sorted(found)

    def target(self, start: int, stop: int) -> int | None:
        """The slot a forward over ``[start, stop)`` must leave its final state in, if any."""
        return self.tracks[0].slot if stop in self.boundaries(start, stop) else None

    def dispatched(self, start: int, stop: int) -> None:
        """That forward has been dispatched: what it tracks counts as kept."""
        if stop in self.boundaries(start, stop):
            self.tracks[0].seqlen = stop
            self.tracks.append(self.tracks.pop(0))

    def latest(self, upto: int) -> TrackSlot | None:
        """The kept state furthest on, but not beyond ``upto`` tokens."""
        kept = [track for track in self.tracks if 0 < track.seqlen <= upto]
        return max(kept, key=lambda track: track.seqlen, default=None)

    def holder(self, seqlen: int) -> int:
        """The slot with the state after ``seqlen`` tokens: a track slot, else the running one."""
        return next((track.slot for track in self.tracks if track.seqlen == seqlen), self.running)

    def replace(self, slot: int) -> None:
        """A slot has gone to the tree; the spare, if there is one, takes a track slot's place."""
        for track in [track for track in self.tracks if track.slot == slot]:
            if self.spare is None:
                self.tracks.remove(track)
            else:
                track.slot, track.seqlen, self.spare = self.spare, 0, None

    def digest(self) -> tuple[int, ...]:
        """Every field, -1 for ``None``."""
        open_fields = (self.interval, self.clone_src, self.branching_seqlen, self.spare)
        tracks = (number for track in self.tracks for number in (track.slot, track.seqlen))
        return (self.running, *(-1 if each is None else each for each in open_fields), *tracks)
