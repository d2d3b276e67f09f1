"""The place that a rank is to have in the next generation: it copies layers and builds modules for it beside training.

Knows no plan: the controller's orders name the layers.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.config import FreezeConfig
from workers.elastic.copies_ahead import CopiesAhead
from workers.elastic.layer_source import Held, LayerSource
from workers.elastic.modules_ahead import ModulesAhead
from workers.freezing.plans import Plans, Settings
from workers.layers.layer import Layer
from workers.process.host_memory import collect_objects
from workers.protocol import Assignment, CopyAhead, Report, WarningReport
from workers.state.layer_state import LayerState
from workers.state.optim import Optimizer
from workers.transport.membership import Membership


class ComingPlace:
    """The coming place of one rank.

    Args:
        rank: its number.
        source: builds modules and copies.
        freeze: the job's own settings.
        secret: the job's, with which ranks authenticate each other.
    """

    def __init__(
        self,
        rank: int,
        source: LayerSource,
        membership: Membership,
        *,
        freeze: FreezeConfig,
        optimizer: Optimizer,
        secret: bytes,
        report: Callable[[Report], None],
    ) -> None:
        self._rank = rank
        self._source = source
        self._membership = membership
        self._freeze = freeze
        self._optimizer = optimizer
        self._secret = secret
        self._report = report
        self._copies: CopiesAhead | None = None
        """Layers that it copies while it has no place."""
        self._newest = (0, 0)
        """Epoch and change of the newest order."""
        self.modules: ModulesAhead[tuple[Layer, LayerState]] = ModulesAhead(source.build_ahead, self._unbuilt)

    def follow(self, order: CopyAhead) -> None:
        """Copy layers in threads, and build modules. Takes the place of an earlier order; one that another has
        overtaken, or for a generation that is over, is ignored. One without layers lets go of what was copied and
        built."""
        freeze = Settings(self._freeze, Plans(order.freeze))
        with self._membership.lasting(order.generation) as lasts:
            if not lasts or (order.epoch, order.change) < self._newest:
                return
            self._newest = order.epoch, order.change
            self._source.end()
            self._source.begin(freeze)
            self.modules.ready(order.building)
            before, self._copies = self._copies, None
            if order.sources:
                self._copies = CopiesAhead(
                    order,
                    self._rank,
                    source=self._source,
                    freeze=freeze,
                    optimizer=self._optimizer,
                    secret=self._secret,
                    report=self._report,
                    built=lambda: self.modules.settled,
                    gave_up=lambda: self._let_go(order),
                )
        if before is not None:
            before.close()
        del before
        collect_objects()

    def copies_for(self, assignment: Assignment) -> Held:
        """End copying; returns the layers, or shards, with which the rank can follow `assignment`: all, or none."""
        copies, self._copies = self._copies, None
        return {} if copies is None else copies.for_assignment(assignment, self._membership.over)

    def close(self) -> None:
        """Build and copy no more."""
        self.modules.stop()
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    def _let_go(self, order: CopyAhead) -> None:
        """The change of ranks that `order` is for does not come: drop what was built for it, unless there is a newer
        one."""
        with self._membership.lasting(order.generation) as lasts:
            if lasts and self._newest == (order.epoch, order.change):
                self.modules.stop()
        collect_objects()

    def _unbuilt(self, why: str) -> None:
        self._report(WarningReport(rank=self._rank, text=f"{why}; it is built while the ranks wait"))
