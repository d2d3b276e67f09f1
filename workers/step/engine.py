"""One rank's loop over a window: it interprets a `Schedule`, action by action. It is the only interpreter.

For each action: wait for the input, compute, send the result. Two stages on one rank pass references. It
knows neither optimizer nor commit: a window ends with summed gradients that stay on the rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from planner.final_gradients import final_gradients
from planner.ir import Action, ActionKind
from planner.lowering import first_forwards
from planner.rank_program import RankProgram
from workers.control.activity import Activity
from workers.data.dataset import Batch
from workers.devices.device import Device
from workers.fault_injection.points import FaultPhase, FaultPoints
from workers.gradients.sink import GradientSink
from workers.process.pinned_memory import to_device
from workers.protocol.reports import ActionSpan
from workers.step.stage import Stage
from workers.transport.channel import Channel, MessageStream

Tensors = tuple[Tensor, ...]
Batches = Callable[[int], Batch]
"""Microbatch of this window -> its batch, on the CPU."""


@dataclass(frozen=True)
class Window:
    """Result of one window on one rank."""

    losses: dict[int, float]
    """Global microbatch -> mean loss, on the rank with the last stage."""
    spans: tuple[ActionSpan, ...]
    waited_s: float = 0.0
    """Seconds that its actions waited for what other ranks send."""
    shares: dict[int, float] = field(default_factory=dict)
    """Global microbatch -> share of its targets that the loss is a mean over, if the loss says so."""

    @property
    def busy_s(self) -> float:
        return sum(span.end_s - span.start_s for span in self.spans)

    def followed_by(self, other: Window, offset_s: float) -> Window:
        """This window and one that began `offset_s` after it, as one."""
        later = (
            replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)
            for span in other.spans
        )
        waited_s = self.waited_s + other.waited_s
        shares = self.shares | other.shares
        return Window(self.losses | other.losses, (*self.spans, *later), waited_s, shares)


class Engine:
    """The interpreter of one rank's program.

    Args:
        program: this rank's part of the schedule.
        pipeline: the number of its pipeline.
        stages: the stages that the program names.
        sink: takes their gradients.
        channel: to the other ranks; place = pipeline * P + rank.
        faults: the injected faults of this rank.
        activity: receives what the rank computes.
        admit: returns once the next microbatch may go forward; None: each may at once.
    """

    def __init__(
        self,
        program: RankProgram,
        pipeline: int,
        stages: dict[int, Stage],
        sink: GradientSink,
        channel: Channel,
        device: Device,
        faults: FaultPoints,
        activity: Activity,
        admit: Callable[[], None] | None = None,
    ) -> None:
        assert set(stages) == set(program.own_stages)
        self._program = program
        self._goes_back = any(
            action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD) for action in program.actions
        )
        """Whether this rank has any backward pass: one whose layers all stay frozen may have none."""
        self._pipeline = pipeline
        self._numbers: Sequence[int] = ()
        """The window's global microbatches."""
        self._stages = stages
        self._sink = sink
        self._channel = channel
        self._device = device
        self._faults = faults
        self._activity = activity
        self._admit = admit
        self._bytes_per_s: float | None = None
        """The send bandwidth that an injected fault leaves this rank, if the channel itself cannot hold messages up;
        None: no limit."""
        self._waited_s = 0.0
        self._handed: dict[tuple[MessageStream, int], Tensors] = {}
        self._final = final_gradients(
            program.actions,
            rank=program.rank,
            stages=program.stages,
            frozen_stages=program.frozen_stages,
            rank_of_stage=program.rank_of_stage,
        )
        self._groups: dict[tuple[int | None, int], list[list[MessageStream]]] = {}

    def run(self, step: int, batches: Batches, numbers: Sequence[int]) -> Window:
        """Run one training window; gradients go to the sink.

        Args:
            numbers: the global microbatches of the window, in order.

        Raises:
            ChannelError: a neighbour is gone or sent a message that does not fit its stream.
        """
        self._numbers = numbers
        self._begin_faults(step + 1)
        self._waited_s = 0.0
        self._device.start_window()
        self._announce(None, purpose=0)
        self._expect(self._program.actions, purpose=0)
        losses: dict[int, Tensors] = {}
        with self._activity.until_done():
            for number, action in enumerate(self._program.actions):
                self._activity.begin(action)
                for stage in self._final.before.get(number, ()):
                    for layer in reversed(self._stages[stage].layers):
                        self._sink.finished(layer.index)
                self._execute(action, step, batches, losses, last=number in self._final.during)
            if self._armed is not None:
                if not self._goes_back:
                    self._armed.reach(FaultPhase.BACKWARD, step + 1)
                self._armed.poison(step + 1, self._poison)
            with self._activity.waiting():
                self._sink.launched()
                self._channel.flush()
            return Window(
                {g: float(loss) for g, (loss, *_) in losses.items()},
                self._device.spans(),
                self._waited_s,
                {g: float(share) for g, (_, *told) in losses.items() for share in told},
            )

    def evaluate(self, batches: Batches, microbatches: int, *, purpose: int) -> dict[int, Tensors]:
        """Run forward passes only, in evaluation mode, in the order of the schedule's own forwards.

        Args:
            microbatches: their number, counted from 0; at most the schedule's.
            purpose: from 1; messages of different shapes must have different purposes.

        Returns:
            On the rank with the last stage, per microbatch: what `Stage.evaluate` returns. Empty on other ranks.
        """
        program = [
            a for a in self._program.actions if a.kind is ActionKind.FORWARD and a.index < microbatches
        ]
        self._announce(microbatches, purpose)
        self._expect(program, purpose)
        results: dict[int, Tensors] = {}
        with self._activity.until_done():
            for action in program:
                self._activity.begin(action)
                stage = self._stages[action.stage]
                data = self._read(action, batches)
                received = self._received(action, purpose)
                outputs = stage.evaluate(
                    (*received, *data.inputs),
                    data.targets or None,
                    through=data.through,
                    samples=data.samples,
                )
                if action.stage == self._program.stages - 1:
                    results[action.index] = outputs
                else:
                    self._send(self._forward_stream(action.stage + 1, purpose), action.index, outputs)
        self._channel.flush()
        return results

    def _execute(
        self, action: Action, step: int, batches: Batches, losses: dict[int, Tensors], *, last: bool
    ) -> None:
        stage = self._stages[action.stage]
        microbatch = self._numbers[action.index]
        frozen = stage.frozen_shares(microbatch)
        match action.kind:
            case ActionKind.FORWARD:
                received = self._received(action, purpose=0)
                if self._admit is not None:
                    with self._activity.waiting():
                        self._admit()
                if self._armed is not None:
                    self._armed.reach(FaultPhase.FORWARD, step + 1)
                # Reading is part of the action, as it is of a profile's first and last layer.
                self._device.begin()
                data = self._read(action, batches)
                inputs = (*received, *data.inputs)
                sent = self._compare_ahead(action, step, microbatch, inputs)
                outputs = stage.forward(
                    microbatch, step, inputs, data.targets or None, through=data.through, samples=data.samples
                )
                self._device.end(action, [layer.index for layer in stage.layers[data.through :]])
                if action.stage == self._program.stages - 1:
                    losses[microbatch] = outputs
                elif not sent:
                    self._send(self._forward_stream(action.stage + 1, 0), action.index, outputs)
            case ActionKind.BACKWARD | ActionKind.INPUT_GRAD:
                grads = ()
                if action.stage < self._program.stages - 1:
                    grads = self._receive(self._backward_stream(action.stage, 0), action.index)
                if self._armed is not None:
                    self._armed.reach(FaultPhase.BACKWARD, step + 1)
                self._device.begin()
                grads = stage.backward(
                    microbatch, grads, weights=action.kind is ActionKind.BACKWARD, last=last
                )
                self._device.end(action, stage.going_back, frozen)
                if action.stage > self._program.frozen_stages:
                    self._send(self._backward_stream(action.stage - 1, 0), action.index, grads)
            case ActionKind.WEIGHT_GRAD:
                self._device.begin()
                stage.weight_grad(microbatch, last=last)
                self._device.end(action, stage.going_back, frozen)
            case ActionKind.RECOMPUTE:
                self._device.begin()
                stage.recompute(microbatch)
                self._device.end(action, stage.recomputing)
            case ActionKind.UPDATE:
                raise AssertionError(f"{action}: a synchronous window's updates follow its commit")

    def _compare_ahead(self, action: Action, step: int, microbatch: int, inputs: Tensors) -> bool:
        """Have the stage compare its layers, where that is due, while the next rank goes on; whether its outputs were
        sent."""
        if action.stage == self._program.stages - 1:
            return False
        stream = self._forward_stream(action.stage + 1, 0)
        if stream.target == stream.source:
            return False

        def send(outputs: Tensors) -> None:
            self._send(stream, action.index, outputs)

        return self._stages[action.stage].compare_ahead(microbatch, step, inputs, send)

    def _received(self, action: Action, purpose: int) -> Tensors:
        """The outputs of the stage before; the first stage has none before it."""
        if action.stage == 0:
            return ()
        return self._receive(self._forward_stream(action.stage, purpose), action.index)

    def _read(self, action: Action, batches: Batches) -> Batch:
        """Read the stage's part of the microbatch, on the device: inputs for the first stage, targets for the last."""
        first, last = action.stage == 0, action.stage == self._program.stages - 1
        if not (first or last):
            return Batch((), ())
        batch = batches(action.index)
        inputs, targets = batch.inputs if first else (), batch.targets if last else ()
        device = self._device.torch_device
        return Batch(
            inputs=tuple(to_device(t, device) for t in inputs),
            targets=tuple(to_device(t, device) for t in targets),
            # Of the inputs alone: a rank may hold the first stage and the last one.
            through=batch.through if first else 0,
            samples=batch.samples if first else (),
        )

    def _send(self, stream: MessageStream, microbatch: int, tensors: Tensors) -> None:
        if stream.target == stream.source:
            self._handed[stream, microbatch] = tensors
            return
        with self._activity.waiting():
            if self._bytes_per_s is not None:
                time.sleep(sum(t.nbytes for t in tensors) / self._bytes_per_s)
            self._channel.send(stream, tensors)

    def _receive(self, stream: MessageStream, microbatch: int) -> Tensors:
        if stream.target == stream.source:
            return self._handed.pop((stream, microbatch))
        begun_s = time.perf_counter()
        with self._activity.waiting():
            received = self._channel.receive(stream)
        self._waited_s += time.perf_counter() - begun_s
        return received

    def _announce(self, forwards: int | None, purpose: int) -> None:
        """Announce the next messages to the channel: the window's, or the first `forwards` forwards'."""
        known = (forwards, purpose)
        if known not in self._groups:
            groups = self._program.groups
            streams = {"forward": self._forward_stream, "backward": self._backward_stream}
            self._groups[known] = [
                [streams[transfer.direction](transfer.stage, purpose) for transfer in group]
                for group in (groups if forwards is None else first_forwards(groups, forwards))
            ]
        self._channel.window(self._groups[known])

    def _expect(self, program: Iterable[Action], purpose: int) -> None:
        due: dict[MessageStream, int] = {}
        for action in program:
            stream = None
            if action.kind is ActionKind.FORWARD and action.stage > 0:
                stream = self._forward_stream(action.stage, purpose)
            elif (
                action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
                and action.stage < self._program.stages - 1
            ):
                stream = self._backward_stream(action.stage, purpose)
            if stream is not None and stream.source != stream.target:
                due[stream] = due.get(stream, 0) + 1
        for stream, messages in due.items():
            self._channel.expect(stream, messages)

    def _forward_stream(self, stage: int, purpose: int) -> MessageStream:
        """The stream into `stage` from the stage before."""
        return self._stream(stage - 1, stage, 2 * stage, purpose, "forward")

    def _backward_stream(self, stage: int, purpose: int) -> MessageStream:
        """The stream into `stage` from the stage after."""
        return self._stream(stage + 1, stage, 2 * stage + 1, purpose, "backward")

    def _stream(self, source: int, target: int, tag: int, purpose: int, direction: str) -> MessageStream:
        base = self._pipeline * self._program.ranks
        rank_of = self._program.rank_of_stage
        return MessageStream(
            base + rank_of[source],
            base + rank_of[target],
            tag + purpose * 2 * self._program.stages,
            f"{direction} stage {source} -> {target}",
        )

    @property
    def _armed(self) -> FaultPoints | None:
        """This rank's injected faults, if any are armed."""
        return self._faults if self._faults.armed else None

    def _begin_faults(self, step: int) -> None:
        """Begin and end the faults that last for entire windows."""
        faults = self._armed
        self._device.slowdown = 1.0 if faults is None else faults.slowdown(step)
        bytes_per_s = None if faults is None else faults.bytes_per_s(step)
        self._bytes_per_s = None if self._channel.pace(bytes_per_s) else bytes_per_s

    def _poison(self) -> bool:
        """Put a NaN into the first gradient present; returns whether there is one."""
        for _, stage in sorted(self._stages.items()):
            for layer in stage.layers:
                for _, gradient in sorted(self._sink.so_far(layer.index).items()):
                    gradient[(0,) * gradient.dim()] = float("nan")
                    return True
        return False


def first_free_tag(stages: int) -> int:
    """The first tag that an engine does not use (it uses purposes 0 to 3)."""
    return 8 * stages
