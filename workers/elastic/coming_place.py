"""The place that a rank is to have in the next generation: it copies layers and builds modules for it beside training.

Knows no plan: the controller's orders name the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.config import FreezeConfig
from workers.elastic.copies_ahead import CopiesAhead
from workers.elastic.layer_source import Held, LayerSource
from workers.elastic.modules_ahead import ModulesAhead
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.layers.layer import Layer
from workers.process.host_memory import collect_objects
from workers.protocol.orders import Assignment, CopyAhead
from workers.protocol.reports import Report, WarningReport
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer
from workers.transport.membership import ChannelMembership


@dataclass(kw_only=True, eq=False)
class ComingPlace:
    """The coming place of one rank."""

    rank: int
    """Its number."""
    source: LayerSource
    """Builds modules and copies."""
    membership: ChannelMembership
    freeze: FreezeConfig
    """The job's own settings."""
    optimizer: Optimizer
    secret: bytes = field(repr=False)
    """The job's, with which ranks authenticate each other."""
    report: Callable[[Report], None]
    _copies: CopiesAhead | None = field(default=None, init=False)
    """Layers that it copies while it has no place."""
    _newest: tuple[int, int] = field(default=(0, 0), init=False)
    """Epoch and change of the newest order."""

    def __post_init__(self) -> None:
        self.modules: ModulesAhead[tuple[Layer, LayerState]] = ModulesAhead(
            self.source.build_ahead, self._unbuilt
        )

    def follow(self, order: CopyAhead) -> None:
        """Copy layers in threads, and build modules. Takes the place of an earlier order; one that another has
        overtaken, or for a generation that is over, is ignored. One without layers lets go of what was copied and
        built."""
        freeze = FreezeSettings(self.freeze, FreezePlans(order.freeze))
        with self.membership.lasting(order.generation) as lasts:
            if not lasts or (order.epoch, order.change) < self._newest:
                return
            self._newest = order.epoch, order.change
            self.source.end()
            self.source.begin(freeze)
            self.modules.ready(order.building)
            before, self._copies = self._copies, None
            if order.sources:
                self._copies = CopiesAhead(
                    order,
                    self.rank,
                    source=self.source,
                    freeze=freeze,
                    optimizer=self.optimizer,
                    secret=self.secret,
                    report=self.report,
                    built=lambda: self.modules.done,
                    gave_up=lambda: self._let_go(order),
                )
        if before is not None:
            before.close()
        del before
        collect_objects()

    def copies_for(self, assignment: Assignment) -> Held:
        """End copying; returns the layers, or shards, with which the rank can follow `assignment`: all, or none."""
        copies, self._copies = self._copies, None
        return {} if copies is None else copies.for_assignment(assignment, self.membership.over)

    def close(self) -> None:
        """Build and copy no more."""
        self.modules.stop()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _let_go(self, order: CopyAhead) -> None:
        """The change of ranks that `order` is for does not come: drop what was built for it, unless there is a newer
        one."""
        with self.membership.lasting(order.generation) as lasts:
            if lasts and self._newest == (order.epoch, order.change):
                self.modules.stop()
        collect_objects()

    def _unbuilt(self, why: str) -> None:
        self.report(WarningReport(rank=self.rank, text=f"{why}; it is built while the ranks wait"))
