"""ReceiptBook: who holds which lock. A release must present the receipt of its acquisition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from uhrc_core.cache.node import UnifiedTreeNode
from uhrc_core.cache.params import DecLockRefParams, IncLockRefResult
from uhrc_core.errors import ReceiptError

#: What each component answered to `TreeComponent.acquire`, in the cache's order of components.
Grants = tuple[object | None, ...]


@dataclass(frozen=True, slots=True)
class _Receipt:
    node: UnifiedTreeNode
    grants: Grants


class ReceiptBook:
    """The outstanding receipts of one cache; numbers are never reused."""

    def __init__(self) -> None:
        self._receipts: dict[int, _Receipt] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._receipts)

    def outstanding(self) -> Iterator[tuple[int, UnifiedTreeNode, Grants]]:
        """Number, anchor and grants of every receipt, oldest first."""
        for receipt_id, receipt in self._receipts.items():
            yield receipt_id, receipt.node, receipt.grants

    def issue(self, node: UnifiedTreeNode, grants: Grants) -> IncLockRefResult:
        """Record an acquisition anchored at ``node``."""
        receipt_id = self._next_id
        self._next_id += 1
        self._receipts[receipt_id] = _Receipt(node, grants)
        return IncLockRefResult(receipt_id, node)

    def redeem(self, node: UnifiedTreeNode, params: DecLockRefParams) -> Grants:
        """Strike a receipt out and return what was acquired.

        Raises:
            ReceiptError: it was redeemed already, is unknown, or was issued for another node.
        """
        receipt = self._find(node, params)
        del self._receipts[params.receipt_id]
        return receipt.grants

    def take_part(
        self, node: UnifiedTreeNode, params: DecLockRefParams, index: int
    ) -> object | None:
        """Strike one component's grant out of a receipt that stays outstanding; returns it."""
        receipt = self._find(node, params)
        grant = receipt.grants[index]
        if grant is not None:
            rest = (*receipt.grants[:index], None, *receipt.grants[index + 1 :])
            self._receipts[params.receipt_id] = _Receipt(node, rest)
        return grant

    def _find(self, node: UnifiedTreeNode, params: DecLockRefParams) -> _Receipt:
        receipt = self._receipts.get(params.receipt_id)
        if receipt is None:
            raise ReceiptError(
                f"receipt {params.receipt_id} is not outstanding: released before, or not "
                "this cache's; each inc_lock_ref is undone once"
            )
        if receipt.node is not node:
            raise ReceiptError(
                f"receipt {params.receipt_id} was given for {receipt.node}, not for {node}; "
                "release the node you locked"
            )
        return receipt
