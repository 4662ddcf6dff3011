"""Which layout do a publisher's buffers have now, and must it change? By tensors, wire dtypes and cut hints.

A layout is made once and used again for as long as its signature stays the same; the receivers' cut hints of a layout
epoch are fetched and merged once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.planner import Holder
from reshard.refit.deadline import Deadline
from reshard.refit.header import HEADER_BYTES
from reshard.refit.hints import merge_hints
from reshard.refit.layout import Cuts, PackedLayout, WireRule, build_layout, signature_of
from reshard.refit.preface import digest_region_bytes
from reshard.refit.tensors import LocalTensor

if TYPE_CHECKING:
    from reshard.rendezvous import Rendezvous
    from reshard.rendezvous.types import CutHints

__all__ = ["LayoutInForce"]


class LayoutInForce:
    """The layout that a publisher's buffers have.

    Parameters
    ----------
    rendezvous, model
        Where the receivers' cut hints are.
    holder
        Who holds the buffers.
    rule
        What tensors are cast to.
    follow_hints
        Whether cut hints are followed.
    layout, claim
        As in `reshard.planner.ShardPart`.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        model: str,
        holder: Holder,
        rule: WireRule,
        *,
        follow_hints: bool,
        layout: str,
        claim: str,
    ) -> None:
        self._rendezvous, self._model, self._holder, self._rule = rendezvous, model, holder, rule
        self._follow_hints = follow_hints
        self._name, self._claim = layout, claim
        self._hints: CutHints | None = None
        self._merged: Cuts = {}
        self._merged_for: dict[str, tuple[int, ...]] | None = None
        self._signature = b""
        self._layout: PackedLayout | None = None

    def of(
        self, tensors: Sequence[LocalTensor], cuts: Cuts | None, layout_epoch: int, deadline: Deadline
    ) -> tuple[PackedLayout, bool]:
        """The layout for ``tensors``, and whether it is another one than before.

        Parameters
        ----------
        cuts
            The grid to cut by; None follows the hints of ``layout_epoch``, if that is wanted.

        Raises
        ------
        PublishError, TableError
            As `reshard.refit.layout.build_layout`.
        RendezvousError
            The hints cannot be had.
        """
        if cuts is None and self._follow_hints:
            cuts = self._hints_of(layout_epoch, tensors, deadline)
        signature = signature_of(tensors, self._rule, cuts)
        if self._layout is not None and signature == self._signature:
            return self._layout, False
        made = build_layout(
            self._holder,
            tensors,
            self._rule,
            cuts=cuts,
            layout=self._name,
            claim=self._claim,
            extra_regions=lambda n_cells: (digest_region_bytes(n_cells), HEADER_BYTES),
        )
        self._layout, self._signature = made, signature
        return made, True

    def forget(self) -> None:
        """Have the next layout made anew."""
        self._layout = None

    def _hints_of(self, layout_epoch: int, tensors: Sequence[LocalTensor], deadline: Deadline) -> Cuts:
        """The receivers' cut hints of a layout epoch for these tensors, merged; none for epoch 0."""
        if not layout_epoch:
            return {}
        if self._hints is None or self._hints.layout_epoch != layout_epoch:
            self._hints = self._rendezvous.get_cuts(
                self._model, layout_epoch=layout_epoch, timeout_s=deadline.remaining("get cut hints")
            )
            self._merged_for = None
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        if self._merged_for != shapes:
            self._merged, self._merged_for = merge_hints(self._hints, shapes), shapes
        return self._merged
