"""The cache's state, checked, hashed and drawn: read-only views."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from uhrc_core.cache.component import TreeComponent
from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.errors import InvariantError
from uhrc_core.indices import IndexArray
from uhrc_core.kinds import ComponentType

if TYPE_CHECKING:
    from uhrc_core.cache.holding import RequestState
    from uhrc_core.cache.locks import Grants
    from uhrc_core.pools import ReqToTokenPool

_INDENT_MAX = 40
_DUMP_LINES_MAX = 400

Held = Mapping[ComponentType, Sequence[IndexArray]]


class Audited(Protocol):
    """What can be audited: a cache that keeps its prefixes in tree nodes."""

    page_size: int
    dp_size: int
    req_to_token: ReqToTokenPool

    @property
    def components(self) -> Sequence[TreeComponent]: ...
    def nodes(self) -> list[UnifiedTreeNode]: ...
    def receipts(self) -> Iterable[tuple[int, UnifiedTreeNode, Grants]]: ...
    def clock(self) -> int: ...
    def live_requests(self) -> Sequence[RequestState]: ...


def check_invariants(cache: Audited, held: Held, further: Iterable[str] = ()) -> None:
    """Verify the numbered rules below; raise `InvariantError` naming each that is broken.

    ``further`` are problems of rules that only the caller knows.
    """
    problems = list(further)
    for rule in (_structure, _auxiliary, _locks, _receipts, _access_order, _host_fields):
        problems.extend(rule(cache))
    for component in cache.components:
        for dp_rank in range(cache.dp_size):
            problems.extend(_ownership(cache, component, dp_rank, held))
    problems.extend(_requests(cache))
    for component in cache.components:
        problems.extend(component.problems(cache.nodes()[1:], cache.live_requests()))
    if problems:
        state = render(cache).splitlines()
        cut = [f"… {len(state) - _DUMP_LINES_MAX} more lines"][: len(state) > _DUMP_LINES_MAX]
        raise InvariantError("\n".join([*problems, *state[:_DUMP_LINES_MAX], *cut]))


def _below_root(cache: Audited) -> Iterator[tuple[UnifiedTreeNode, UnifiedTreeNode]]:
    """Every node but the root, with its parent."""
    for node in cache.nodes()[1:]:
        if node.parent is not None:
            yield node, node.parent


def _structure(cache: Audited) -> Iterator[str]:
    # 1. Every registered node hangs in the tree and the tree holds no other.
    root = cache.nodes()[0]
    reached: list[UnifiedTreeNode] = []
    todo = [root]
    while todo:
        node = todo.pop()
        reached.append(node)
        todo.extend(node.children.values())
    if sorted(node.id for node in reached) != sorted(node.id for node in cache.nodes()):
        yield "registered nodes and reachable nodes differ"
    # 2. Edges are non-empty, whole pages, start where the parent ends; a node's children differ in
    #    their first page and share its namespace.
    for node, parent in _below_root(cache):
        if not len(node.key) or len(node.key) % cache.page_size:
            yield f"{node}: edge of {len(node.key)} tokens is not whole pages"
        if node.start != parent.end:
            yield f"{node}: starts at {node.start}, its parent {parent} ends at {parent.end}"
        if parent is not root and node.key.namespace != parent.key.namespace:
            yield f"{node}: namespace differs from its parent's {parent}"
        page = node.key.page(0, cache.page_size)
        key = page if parent is not root else (node.key.namespace, page)
        if parent.children.get(key) is not node:
            yield f"{node}: its parent {parent} does not find it by its first page"


def _auxiliary(cache: Audited) -> Iterator[str]:
    # 3. Auxiliary data requires FULL on the node; FULL is contiguous from the root; a value has the
    #    size its component says.
    for node, _ in _below_root(cache):
        if node.component_data[ComponentType.FULL].value is None:
            yield f"{node}: no FULL value"
        for component in cache.components:
            value = component.data(node).value
            if value is not None and len(value) != component.units_at(node):
                yield (
                    f"{node}: {component.kind.name} value has {len(value)} indices, "
                    f"not {component.units_at(node)}"
                )
    used = {component.kind for component in cache.components}
    for node in cache.nodes():
        for kind in ComponentType:
            if kind not in used and node.component_data[kind].value is not None:
                yield f"{node}: holds {kind.name} data, a component this cache does not have"
    root = cache.nodes()[0]
    if any(data.value is not None for data in root.component_data):
        yield "the root holds data"


def _locks(cache: Audited) -> Iterator[str]:
    # 4. FULL's lock_ref is at least every other's on the node, and at least any child's.
    for node, parent in _below_root(cache):
        full = node.component_data[ComponentType.FULL].lock_ref
        for kind in ComponentType:
            lock_ref = node.component_data[kind].lock_ref
            if not 0 <= lock_ref <= full:
                yield f"{node}: {kind.name} lock_ref {lock_ref}, FULL lock_ref {full}"
        above = parent.component_data[ComponentType.FULL].lock_ref
        if parent.parent is not None and above < full:
            yield f"{node}: FULL lock_ref {full} exceeds its parent's {above}"


def _receipts(cache: Audited) -> Iterator[str]:
    # 5. Every lock_ref is what the outstanding receipts add up to.
    held = Counter[tuple[int, ComponentType]]()
    for _, anchor, grants in cache.receipts():
        for component, grant in zip(cache.components, grants, strict=True):
            if grant is not None:
                held.update((n.id, component.kind) for n in component.locked_by(anchor, grant))
    for node in cache.nodes():
        for kind, data in zip(ComponentType, node.component_data, strict=True):
            if data.lock_ref != held[node.id, kind]:
                yield (
                    f"{node}: {kind.name} lock_ref {data.lock_ref}, its receipts are "
                    f"{held[node.id, kind]}"
                )


def _access_order(cache: Audited) -> Iterator[str]:
    # 6. An ancestor's FULL access time is never older than a descendant's.
    for node, parent in _below_root(cache):
        mine = node.component_data[ComponentType.FULL].last_access_time
        above = parent.component_data[ComponentType.FULL].last_access_time
        if parent.parent is not None and above < mine:
            yield f"{node}: FULL used at {mine}, its parent last at {above}"


def _host_fields(cache: Audited) -> Iterator[str]:
    # 7. No host tier holds anything.
    for node in cache.nodes():
        for kind, data in zip(ComponentType, node.component_data, strict=True):
            if data.host_value is not None or data.host_lock_ref:
                yield f"{node}: {kind.name} host fields are set"


def queue_problems(
    components: Sequence[TreeComponent], nodes: Sequence[UnifiedTreeNode]
) -> Iterator[str]:
    """8. The eviction queues hold exactly the candidates a recount finds, each once."""
    for component in components:
        queued = [n.id for queue in component.queues for n in queue.candidates()]
        recount = [n.id for n in nodes if component.is_candidate(n)]
        if sorted(queued) != sorted(recount):
            yield (
                f"{component.kind.name}: queued candidates {sorted(queued)}, "
                f"a recount finds {sorted(recount)}"
            )


def _ownership(cache: Audited, component: TreeComponent, dp_rank: int, held: Held) -> Iterator[str]:
    # 9. active + tree_evictable + tree_protected + free == capacity, each counted from its owner:
    #    the live requests (and what the caller says it holds), the tree's nodes, the free list.
    pool = component.allocator
    live = [state for state in cache.live_requests() if state.dp_rank == dp_rank]
    active = [state.holding(component.kind).owned() for state in live]
    if component.kind in held:
        active.append(np.asarray(held[component.kind][dp_rank], np.int32))
    nodes = [node for node, _ in _below_root(cache) if node.dp_rank == dp_rank]

    def values(wanted: Callable[[int], bool]) -> list[IndexArray]:
        return [
            data.value
            for data in map(component.data, nodes)
            if data.value is not None and wanted(data.lock_ref)
        ]

    counts = pool.ledger.counts[dp_rank]
    owners = {
        "active": (_pages_of(component, active), counts.active),
        "evictable": (
            _pages_of(component, values(lambda lock_ref: lock_ref == 0)),
            counts.evictable,
        ),
        "protected": (
            _pages_of(component, values(lambda lock_ref: lock_ref > 0)),
            counts.protected,
        ),
        "free": (pool.free_pages(dp_rank).tolist(), counts.free),
    }
    where = f"{component.kind.name} on dp_rank {dp_rank}"
    for name, (pages, count) in owners.items():
        if len(pages) != count:
            yield f"{where}: the ledger counts {count} {name} pages, a recount finds {len(pages)}"
    everything = sorted(page for pages, _ in owners.values() for page in pages)
    if everything != list(range(pool.ledger.num_pages)):
        yield f"{where}: pages do not have exactly one owner each: {everything}"
    tree = sorted(owners["evictable"][0] + owners["protected"][0])
    if pool.ledger.pages_of_tree(dp_rank).tolist() != tree:
        yield f"{where}: the ledger's map of the tree's pages is not the tree's"


def _pages_of(component: TreeComponent, indices: Sequence[IndexArray]) -> list[int]:
    return [page for part in indices for page in component.allocator.pages(part).tolist()]


def _requests(cache: Audited) -> Iterator[str]:
    # 10. A live request's row begins with the tree's own indices, up to its locked node.
    for state in cache.live_requests():
        node = state.lock.node
        if node.end != state.protected_len:
            yield f"request {state.request.rid!r}: locked {node}, not {state.protected_len} tokens"
        for part in node.path_to_root():
            value = part.component_data[ComponentType.FULL].value
            if value is None or not np.array_equal(value, state.indices(part.start, part.end)):
                yield f"request {state.request.rid!r}: its row differs from the tree at {part}"
        heads = state.indices(0, state.allocated_len)[:: cache.page_size]
        table = state.holding(ComponentType.FULL).page_table(state.allocated_len)
        if table is not None and not np.array_equal(heads, table * cache.page_size):
            yield f"request {state.request.rid!r}: its page table is not its row"
        if not state.protected_len <= state.computed_len <= state.allocated_len:
            yield f"request {state.request.rid!r}: lengths out of order"


def digest(cache: Audited) -> str:
    """blake2b over nodes, slots, locks, clock, free lists, receipts and live requests."""
    state = hashlib.blake2b(digest_size=16)

    def add(*parts: object) -> None:
        state.update(repr(parts).encode())

    for node in sorted(cache.nodes(), key=lambda node: node.id):
        parent_id = None if node.parent is None else node.parent.id
        add(node.id, parent_id, node.key.namespace, node.end, node.priority)
        state.update(node.key.data)
        for data in node.component_data:
            add(data.lock_ref, data.last_access_time, data.hit_count, data.value is None)
            if data.value is not None:
                state.update(data.value.tobytes())
    for component in cache.components:
        for dp_rank in range(cache.dp_size):
            state.update(component.allocator.free_pages(dp_rank).tobytes())
            add(component.allocator.ledger.counts[dp_rank])
    for live in cache.live_requests():
        add(live.request.rid, live.row, live.protected_len, live.computed_len, live.allocated_len)
        add(None if live.leaf is None else live.leaf.id)
        for holding in live.holdings:
            add(holding.digest(), holding.locked)
            state.update(holding.owned().tobytes())
        state.update(live.indices(0, live.allocated_len).tobytes())
    add(cache.clock(), cache.req_to_token.free_rows)
    for receipt_id, anchor, _ in cache.receipts():
        add(receipt_id, anchor.id)
    return state.hexdigest()


def render(cache: Audited) -> str:
    """The tree as text: a line of totals per component, then one node a line, indented by depth."""
    lines: list[str] = []
    for component in cache.components:
        for dp_rank, counts in enumerate(component.allocator.ledger.counts):
            lines.append(f"{component.kind.name} rank {dp_rank}: {counts}")
    todo = [(child, 0) for child in reversed(cache.nodes()[0].children.values())]
    while todo:
        node, level = todo.pop()
        slots = " ".join(
            f"{component.kind.name}={_slot(component, node)}" for component in cache.components
        )
        lines.append(f"{'  ' * min(level, _INDENT_MAX)}{node} {slots}")
        todo.extend((child, level + 1) for child in reversed(node.children.values()))
    return "\n".join(lines)


def _slot(component: TreeComponent, node: UnifiedTreeNode) -> str:
    data = component.data(node)
    held = "tombstone" if data.value is None else f"{len(data.value)}"
    return f"{held} lock {data.lock_ref} used {data.last_access_time}"
