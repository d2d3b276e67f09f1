"""Layers that a rank outside the group copies before it gets a place: it follows their owners' commits.

A planned change then needs no transfer while the ranks wait. The copies are of one generation, and count only for the
one that forms after it, at the step at which it ended. Knows no plan.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from planner.shards import Piece
from workers.copies.standby import Base, Standbys
from workers.elastic.layer_source import LayerSource
from workers.freezing.plans import FreezeSettings
from workers.protocol.errors import StateStreamError
from workers.protocol.orders import Assignment, CopyAhead
from workers.protocol.reports import CopiedAhead, WarningReport
from workers.state.layer_state import bytes_of, load_
from workers.state.optim import Optimizer
from workers.state_stream.follow import FollowedOwner, follow
from workers.state_stream.following import CommittedChange, Parcels, Subscription

MOST_SIGNS = 2
"""Signs of life without a change after which the owner has no more: a rank that waits for its last change gives up."""
LAST_S = 10.0
"""Seconds, at most, to wait for the last changes once the generation is over."""
JOIN_S = 5.0


class _Owner:
    """The layers of one owner, or its shards of them, as far as they have come."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = {piece.layer: piece for piece in pieces}
        """By layer: an owner has one piece of each."""
        self.layers = tuple(self.pieces)
        self.following: FollowedOwner | None = None
        """Connection that its thread waits on."""
        self.copies: Standbys | None = None
        self.step: int | None = None
        """The newest commit that they have; None: they have not come yet."""
        self.current = False
        """Whether there was nothing more to apply at some time."""
        self.signs = 0
        """Signs of life since the newest change."""
        self.error: str | None = None


class CopiesAhead:
    """Copies of layers, kept up to date from outside the group by a thread for each owner.

    Args:
        order: which layers, and where they are.
        rank: this rank's number.
        freeze: the settings that the owners follow.
        report: receives `CopiedAhead` once: when all copies are up to date, or when it is known that they will not be.
            Receives a warning if they are not to be had in the end.
        built: whether what the rank builds of them is there.
        gave_up: called once the copies are dropped, because the change of ranks has not come in time.
    """

    def __init__(
        self,
        order: CopyAhead,
        rank: int,
        *,
        source: LayerSource,
        freeze: FreezeSettings,
        optimizer: Optimizer,
        secret: bytes,
        report: Callable[[CopiedAhead | WarningReport], None],
        built: Callable[[], bool] = lambda: True,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._order = order
        self._rank = rank
        self._source = source
        self._freeze = freeze
        self._optimizer = optimizer
        self._secret = secret
        self._report = report
        self._built = built
        self._gave_up = gave_up
        self._began_s = time.monotonic()
        self._told = False
        self._bytes = 0
        self._last: int | None = None
        """The step at which the generation ended."""
        self._stopped = threading.Event()
        self._impatient = False
        self._changed = threading.Condition()
        of_owner: dict[tuple[str, int], list[Piece]] = defaultdict(list)
        for one in order.sources:
            of_owner[one.host, one.port].append(one.piece)
        self._owners = {where: _Owner(tuple(pieces)) for where, pieces in of_owner.items()}
        self._running = len(self._owners)
        self._threads = [
            threading.Thread(
                target=self._run, args=(*where, owner), name=f"copies-ahead-{where[1]}", daemon=True
            )
            for where, owner in self._owners.items()
        ]
        for thread in self._threads:
            thread.start()

    def for_assignment(self, assignment: Assignment, over: int) -> dict[Piece, Base]:
        """End following, and return the layers, or shards, with which the rank can follow `assignment`: all, or none.

        Args:
            over: the generation that has ended.
        """
        # Copies of an earlier generation may be of commits that were taken back since. And where only weights are left
        # of a layer or shard, all ranks begin with the same moments.
        if self._order.generation != over or assignment.salvaged or not assignment.sources:
            self.close()
            return {}
        copies = self.at(assignment.step)
        if self.why is not None:
            text = f"layers that rank {self._rank} copied ahead are fetched again: {self.why}"
            self._report(WarningReport(rank=self._rank, text=text))
        return copies

    def at(self, step: int) -> dict[Piece, Base]:
        """End following, and return the layers, or shards, as they are at `step`, at which the generation ended.

        Returns:
            All of them; none if they do not come to that step. `why` says why.
        """
        with self._changed:
            self._last = step
            for owner in self._owners.values():
                owner.signs = 0
            self._changed.wait_for(self._done, LAST_S)
        self.close()
        if self.why is not None:
            return {}
        copies: dict[Piece, Base] = {}
        for owner in self._owners.values():
            assert owner.copies is not None
            copies |= owner.copies.held()
        return copies

    @property
    def why(self) -> str | None:
        """Why the layers are not to be had at the step at which the generation ended; None: they are."""
        for owner in self._owners.values():
            if owner.step != self._last:
                had = "have not come" if owner.step is None else f"are at step {owner.step}"
                return f"the copies of layers {list(owner.layers)} {had}: {owner.error or 'no more came'}"
        return None

    def close(self) -> None:
        """Follow no more."""
        self._stopped.set()
        for owner in self._owners.values():
            if owner.following is not None:
                owner.following.cut()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _done(self) -> bool:
        """Whether all layers are at the last step, or some will not come to it."""
        return self.why is None or any(self._over(owner) for owner in self._owners.values())

    def _over(self, owner: _Owner) -> bool:
        """Whether `owner` is not at the last step, and will not come there: before the generation's end it has sent its
        layers."""
        if owner.step == self._last or self._last is None:
            return False
        if owner.step is None or owner.step > self._last:
            return True
        return owner.error is not None or owner.signs >= MOST_SIGNS

    def _run(self, host: str, port: int, owner: _Owner) -> None:
        self._follow(host, port, owner)
        with self._changed:
            self._running -= 1
            over = self._impatient and not self._running
        if over:
            self._gave_up()

    def _follow(self, host: str, port: int, owner: _Owner) -> None:
        order, plans = self._order, self._freeze.plans
        subject = Subscription(layers=owner.layers, generation=order.generation, freeze=plans.newest)
        try:
            with follow(
                host,
                port,
                self._secret,
                subject,
                waited=lambda: self._waited(owner),
                stopped=self._stopped,
            ) as following:
                owner.following = following
                came = following.states()
                # Of all its layers an owner has the same shard.
                (shard,) = {piece.shard for piece in owner.pieces.values()}
                built = self._source.build(owner.layers, came.step, shard, beside_training=True)
                for state in came.states:
                    load_(built[state.layer][1], state)
                bases: dict[Piece, Base] = {owner.pieces[layer]: one for layer, one in built.items()}
                copies = Standbys(
                    [*bases],
                    bases,
                    freeze=self._freeze,
                    optimizer=self._optimizer,
                    step=came.step,
                )
                # At rest: this thread applies the changes itself.
                copies.rest()
                with self._changed:
                    if self._stopped.is_set():
                        return
                    owner.copies, owner.step = copies, came.step
                    self._bytes += sum(map(bytes_of, came.states))
                    self._changed.notify_all()
                for change, parcels in following.changes():
                    if not self._take(owner, copies, change, parcels):
                        return
        except StateStreamError as error:
            self._fail(owner, str(error))
        except Exception as error:
            self._fail(owner, f"{type(error).__name__}: {error}")

    def _take(self, owner: _Owner, copies: Standbys, change: CommittedChange, parcels: Parcels) -> bool:
        """Apply a change; returns whether more may come."""
        if change.step != (owner.step or 0) + 1:
            self._fail(owner, f"step {change.step} came after step {owner.step}")
            return False
        of_pieces = {owner.pieces[layer]: parcel for layer, parcel in parcels.of_layers.items()}
        copies.apply(change.step, of_pieces, change)
        if copies.failure is not None:
            self._fail(owner, copies.failure)
            return False
        with self._changed:
            if owner.copies is None:
                return False
            owner.step, owner.signs = change.step, 0
            owner.current = owner.current or not change.behind
            complete = all(one.current for one in self._owners.values())
            self._changed.notify_all()
        if complete and self._built():
            self._tell(change.step, None)
        self._check_patience()
        return True

    def _waited(self, owner: _Owner) -> None:
        with self._changed:
            owner.signs += 1
            self._changed.notify_all()
        self._check_patience()

    def _check_patience(self) -> None:
        """End following, and drop the copies, if the change of ranks that they are for does not come."""
        if time.monotonic() - self._began_s <= self._order.patience_s:
            return
        with self._changed:
            if self._last is not None or self._stopped.is_set():
                return
            self._stopped.set()
            self._impatient = True
            for owner in self._owners.values():
                owner.copies = owner.step = None
                owner.error = owner.error or f"the ranks did not regroup within {self._order.patience_s:g} s"

    def _fail(self, owner: _Owner, why: str) -> None:
        with self._changed:
            owner.error = owner.error or why
            self._changed.notify_all()
        if self._last is None and not self._stopped.is_set():
            self._tell(owner.step or 0, why)
            # Without these layers the others are not worth what they cost their owners.
            self._stopped.set()

    def _tell(self, step: int, error: str | None) -> None:
        with self._changed:
            told, self._told = self._told, True
        if told:
            return
        self._report(
            CopiedAhead(
                rank=self._rank,
                epoch=self._order.epoch,
                change=self._order.change,
                step=step,
                layers=tuple(sorted({layer for owner in self._owners.values() for layer in owner.layers})),
                bytes=self._bytes,
                seconds=time.monotonic() - self._began_s,
                error=error,
            )
        )
