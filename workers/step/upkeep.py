"""Copies kept up to date step by step, under one plan: what a rank sends of its own layers, what it applies to those
that it keeps for others, and whether it could follow the next plan with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from planner.shards import Piece
from workers.commit.commit import CommitDecision
from workers.commit.next_plan import NextPlan
from workers.commit.unfinished import Greeting
from workers.copies.held_updates import HeldUpdates
from workers.copies.redundancy import Shipping
from workers.elastic.followed import Followed
from workers.elastic.modules_ahead import ModulesAhead
from workers.elastic.standby_watch import StandbyWatch
from workers.protocol.reports import Report
from workers.state.layer_state import LayerState
from workers.step.generation import GenerationSetup
from workers.transport.channel import Channel

Energies = Mapping[int, Sequence[float]]
"""Layer -> freezing statistics, where the job freezes."""


class Upkeep:
    """One rank's part.

    Args:
        step: the last step committed before the plan.
        warn: receives a sentence if what the next plan takes cannot be built.
    """

    def __init__(
        self, setup: GenerationSetup, channel: Channel, step: int, warn: Callable[[str], None]
    ) -> None:
        self._setup = setup
        self._step = step
        self._standbys = setup.standbys
        self._owned = frozenset(setup.plan.pieces_of_place(setup.place))
        self.shipping = Shipping(
            channel,
            setup.plan,
            setup.place,
            setup.layers,
            setup.tags.standbys,
            setup.held,
            on_host=self._standbys.host is not None,
        )
        to_go = {piece.layer for piece, _ in setup.held if piece in self._owned}
        self._held_updates = HeldUpdates({layer: setup.layers[layer] for layer in to_go}, setup.optimizer)
        self._followed = Followed(setup.followers, setup.layers, to_go)
        self._watch = StandbyWatch(self._standbys, setup.rank, setup.place, setup.coming)
        self.modules = ModulesAhead(setup.build, warn)
        """Modules of the shards that the rank takes over with the next plan."""

    def bring(self, owners: Sequence[Greeting], sharing: int) -> None:
        """Begin to fetch the bases that are not here, beside training.

        Args:
            owners: every rank's greeting, by place.
            sharing: ranks on this host.
        """
        setup = self._setup
        if self._standbys.host is not None:
            self._standbys.host.sharing = sharing
        self._standbys.bring(
            lambda piece, stopped: setup.bring(piece, owners[setup.plan.owner_of(piece)], stopped)
        )

    @property
    def bases_done(self) -> bool:
        """Whether no copy waits for its base any longer."""
        return self._standbys.bases_done

    def states(self) -> list[LayerState]:
        """The copies that are on the device."""
        return self._standbys.states()

    def send(self, step: int, energies: Energies, buffers: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Send the gradients and buffers of `step`, which are final, to those who keep or follow these layers."""
        self._followed.send(step, self.shipping.send(energies, buffers), energies)

    def receive(self, step: int) -> tuple[Mapping[Piece, Tensor], Report | None]:
        """The parcels of `step` for the copies here. Waits for bases, for a bounded time, where updates pile up; the
        second result says so."""
        parcels = self.shipping.receive()
        return parcels, self._watch.let_come(step)

    def holds(self, layer: int) -> bool:
        """Whether updates of `layer`, an own one, are held back."""
        return self._held_updates.holds(layer)

    def hold(self, step: int, energies: Energies, decision: CommitDecision) -> None:
        """Keep the gradients of `step`, which is committed, of the layers whose updates are held back."""
        self._held_updates.hold(step, energies, decision)

    def apply(
        self,
        step: int,
        parcels: Mapping[Piece, Tensor],
        decision: CommitDecision,
        freeze: tuple[int, int] | None,
    ) -> None:
        """Apply the commit of `step` to the copies here, and pass it on to those who follow own layers.

        Args:
            freeze: epoch and version of the newest freeze plan.
        """
        self._standbys.apply(step, parcels, decision)
        self._followed.commit(decision, freeze)

    def news(self, step: int) -> list[Report]:
        """New reports on the copies once all ranks have passed the commit of `step`."""
        return self._watch.news(step)

    def release(self) -> None:
        """Bring the layers whose updates are held back to the newest step."""
        self._held_updates.release()

    def ready_for(self, plan: NextPlan | None) -> bool:
        """Whether the rank could follow `plan` from the next step on; begins what that still takes."""
        place, standbys = self._setup.place, self._standbys
        standbys.raise_to_device(() if plan is None else plan.plan.pieces_of_place(place))
        if plan is None:
            return False
        coming = {*standbys.pieces} - standbys.up_to_date - {*standbys.given_up}
        built = self.modules.ready(plan.modules(place, self._owned))
        return built and plan.ready(place, self._owned, standbys.live, coming)

    def hand_over(self, step: int) -> None:
        """After `step`, the last under this plan: send the gradients held back to the layers' new owners."""
        if self._setup.held:
            got = self.shipping.flush_held(self._held_updates.parcels, step - self._step)
            for piece, parcels in got.items():
                self._standbys.supply(piece, parcels)

    def end(self, *, torn: bool) -> None:
        """Hold no updates back any longer, unless an update broke off half-way."""
        if not torn:
            self._held_updates.end()
