"""What the engine does apart from numbers: recompute once, skip a bad step, wait out times, fail loudly."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jobs import FAMILIES, job, small_config
from small_models import Head, Residual, Vectors, cross_entropy

from benchmarks.parts.rank_threads import run_threads
from planner.ir import Action, ActionKind
from workers.checkpoint.folder import checkpoints, read_manifest
from workers.config import CheckpointConfig, DataConfig, EmulatedConfig, ModelConfig, OptimizerConfig
from workers.data.dataset import Batch
from workers.data.read_ahead import SLOW_READS
from workers.data.sampling import train_indices
from workers.devices.emulated import EmulatedDevice, layer_times
from workers.launch.ranks import run_processes
from workers.layers.blamed import blamed
from workers.layers.deferred.queue import Workspace
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.protocol.errors import JobError
from workers.protocol.reports import CheckpointReport, StepReport, TimelineReport


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_recomputed_exactly_once_per_microbatch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed: list[int] = []
    original = Layer.recompute

    def counting(self: Layer, done: object) -> None:
        if self.compared is not None:  # the comparison with plain autograd recomputes too
            recomputed.append(self.index)
        original(self, done)

    monkeypatch.setattr(Layer, "recompute", counting)
    config = small_config(tmp_path, steps=2)
    run_threads(job(config, ranks=2, schedule=family, recompute=True))
    assert sorted(recomputed) == sorted(list(range(8)) * config.microbatches * config.job.steps)


READ_S = 0.05


class SlowVectors(Vectors):
    """Takes its time to read a microbatch."""

    def train(self, indices: list[int]) -> Batch:
        time.sleep(READ_S)
        return super().train(indices)


class PoisonedVectors(Vectors):
    """Vectors where the first sample of the fourth step has an infinite feature."""

    def train(self, indices: list[int]) -> Batch:
        batch = super().train(indices)
        if train_indices(3, 3, 0, 4, 2, self.train_samples)[0] == indices[0]:
            batch.inputs[0][0, 0] = torch.inf
        return batch


def test_a_step_whose_norm_is_not_finite_changes_nothing_and_is_said(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        "batchnorm",
        steps=6,
        data=DataConfig(source="test_engine_conduct:PoisonedVectors"),
        checkpoint=CheckpointConfig(every_steps=1, keep=20),
    )
    runs = [run_threads(job(config, ranks=ranks, schedule="1f1b")) for ranks in (1, 2)]
    assert runs[0].state_sha256 == runs[1].state_sha256
    steps = [r for r in runs[0].reports if isinstance(r, StepReport)]
    skipped = [r.step for r in steps if r.skipped]
    assert skipped == [4]
    weights = {ref.step: read_manifest(ref).files for ref in checkpoints(config.job.folder)}
    assert weights[4] == weights[3]
    assert weights[5] != weights[4]


def test_an_emulated_device_waits_out_its_times_and_keeps_the_bits(tmp_path: Path) -> None:
    real = run_threads(job(small_config(tmp_path, device="cpu"), ranks=2, schedule="zb-h1"))
    times = EmulatedConfig(forward_s=0.004, input_grad_s=0.003, weight_grad_s=(0.002,) * 8)
    config = small_config(tmp_path, device="emulated", emulated=times)
    run = run_threads(job(config, ranks=2, schedule="zb-h1"))
    assert run.state_sha256 == real.state_sha256
    modelled_s = {"F": 0.016, "I": 0.012, "W": 0.008}
    timelines = [r for r in run.reports if isinstance(r, TimelineReport)]
    assert all(timeline.memory_bytes > 2**24 for timeline in timelines), "a process with PyTorch"
    assert {t.rank for t in timelines} == {0, 1}
    for timeline in timelines:
        # Later actions make up for one that overslept; none gets ahead.
        ahead_s = 0.0
        for span in timeline.spans:
            ahead_s += modelled_s[Action.parse(span.action).kind.value] - (span.end_s - span.start_s)
            assert ahead_s <= 1e-6


def test_reading_counts_on_the_first_and_the_last_stage_and_waiting_does_not(tmp_path: Path) -> None:
    source = DataConfig(source="test_engine_conduct:SlowVectors")
    # As many as are read before any is read ahead.
    config = small_config(tmp_path, microbatches=SLOW_READS, steps=1, data=source)
    run = run_threads(job(config, ranks=4, schedule="1f1b"))
    forward_s = {
        timeline.rank: [span.end_s - span.start_s for span in timeline.spans if "F" in span.action]
        for timeline in run.reports
        if isinstance(timeline, TimelineReport)
    }
    assert min(*forward_s[0], *forward_s[3]) >= READ_S
    # The first rank's reading is not the last one's. The least counts: other work only adds.
    assert min(forward_s[3]) < 2 * READ_S
    assert min(*forward_s[1], *forward_s[2]) < READ_S


def test_an_emulated_recompute_lasts_as_long_as_the_layers_that_recompute(tmp_path: Path) -> None:
    times = EmulatedConfig(forward_s=0.02, input_grad_s=0.0, weight_grad_s=0.0)
    config = small_config(tmp_path, steps=2, timeline_every=1, device="emulated", emulated=times)
    run = run_threads(job(config, ranks=2, schedule="1f1b", recompute=(1, 4, 5)))
    for rank, recomputing in ((0, 1), (1, 2)):
        timelines = [r for r in run.reports if isinstance(r, TimelineReport) and r.rank == rank]
        assert [timeline.step for timeline in timelines] == [1, 2]
        # Actions make up for one that overslept, but a step's together take no less than their times, and other work
        # only adds to that.
        recomputed_s = [
            sum(span.end_s - span.start_s for span in timeline.spans if {"F", "R"} & {*span.action})
            / config.microbatches
            - 4 * 0.02
            for timeline in timelines
        ]
        assert 0.02 * recomputing - 1e-6 < min(recomputed_s) < 0.02 * (recomputing + 0.9)


def test_an_emulated_device_makes_good_what_it_oversleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 0.0
    late_s = iter((0.5, 0.25, 0.0, 0.0, 0.0))

    def sleep(seconds: float) -> None:
        nonlocal clock_s
        clock_s += seconds + next(late_s)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s)
    device = EmulatedDevice({"forward_s": (1.0,), "input_grad_s": (1.0,), "weight_grad_s": (1.0,)})
    device.start_window()

    def act(computed_s: float) -> float:
        nonlocal clock_s
        begun_s = clock_s
        device.begin()
        clock_s += computed_s
        device.end(Action(ActionKind.FORWARD, 0, 0), (0,))
        return clock_s - begun_s

    assert act(0.0) == 1.5
    assert act(0.0) == 0.75
    # A quarter is still owed. A computation too long for a sleep pays back what is left of its modelled time.
    assert act(0.875) == 0.875
    assert act(0.0) == 0.875
    assert act(2.0) == 2.0
    assert act(0.0) == 1.0


def test_modelled_times_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has 3 times, but the model has 8 layers"):
        layer_times(EmulatedConfig(forward_s=(0.1, 0.1, 0.1)), 8)
    with pytest.raises(JobError, match="zero or more seconds"):
        layer_times(EmulatedConfig(forward_s=-1.0), 8)
    profile = tmp_path / "profile.json"
    profile.write_text('{"forward_s": 1}')
    with pytest.raises(JobError, match="cannot read layer times"):
        layer_times(EmulatedConfig(profile=str(profile)), 8)


class Broken(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("this layer cannot run")


class Shrinking(torch.nn.Module):
    """Returns one row less of some microbatches, so that the shape changes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.detach().sum()) > 0 else self.linear(x)[:1]


def faulty(kind: str) -> ModelDefinition:
    middle = {"broken": Broken, "shrinking": Shrinking}[kind]
    kinds = [Residual, Residual, Residual, middle, Residual, Residual, Residual, Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", k) for i, k in enumerate(kinds)), cross_entropy)


@pytest.mark.parametrize("hosts", [run_threads, run_processes])
def test_the_error_of_the_rank_that_failed_first_is_the_one_that_is_raised(
    tmp_path: Path, hosts: object
) -> None:
    model = ModelConfig(factory="test_engine_conduct:faulty", arguments={"kind": "broken"})
    with pytest.raises(
        (JobError, RuntimeError),
        match=r"the forward pass of layer l3 raised ValueError: this layer cannot run, at .*test_engine_conduct\.py:",
    ):
        hosts(job(small_config(tmp_path, model=model), ranks=2, schedule="1f1b"))


def test_a_message_of_another_shape_names_its_edge(tmp_path: Path) -> None:
    model = ModelConfig(factory="test_engine_conduct:faulty", arguments={"kind": "shrinking"})
    with pytest.raises(
        JobError,
        match=r"forward stage 0 -> 1 .* carries float32 \[.*\] with a gradient, but this message is float32 \[.*\]",
    ):
        run_threads(job(small_config(tmp_path, model=model), ranks=2, schedule="gpipe"))


class Both(torch.nn.Module):
    """Uses its matrix through its module and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.linear.weight


def test_a_matrix_with_two_paths_is_refused_not_summed_in_some_order() -> None:
    layer = Layer(0, "both", Both(), precision="float32", device=torch.device("cpu"), workspace=Workspace())
    _, done = layer.forward((torch.randn(3, 8),), 0, keep=True)
    with pytest.raises(JobError, match=r"layer both raised .*linear\.weight is used both through"):
        layer.backward(done, (torch.ones(3, 8),), weights=True)


class InPlace(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x)
        out = self.linear(hidden)
        hidden.mul_(2.0)
        return out


def test_an_input_changed_after_its_use_is_noticed() -> None:
    layer = Layer(
        0, "in-place", InPlace(), precision="float32", device=torch.device("cpu"), workspace=Workspace()
    )
    _, done = layer.forward((torch.randn(3, 8),), 0, keep=True)
    with pytest.raises(JobError, match=r"layer in-place raised .*changed in place"):
        layer.backward(done, (torch.ones(3, 8),), weights=True)


class Activated(torch.nn.Module):
    """Changes in place what autograd needs for the backward pass, or its input, which autograd refuses."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.at_once = at_once

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_once:
            x += 1
        return self.linear(x).exp().mul_(2.0)


def test_an_error_of_autograd_names_the_layer_and_the_line() -> None:
    def layer(at_once: bool) -> Layer:
        module = Activated(at_once)
        device = torch.device("cpu")
        return Layer(0, "act", module, precision="float32", device=device, workspace=Workspace())

    inputs = (torch.randn(3, 8, requires_grad=True),)
    line = r"at .*test_engine_conduct\.py:\d+ in forward"
    with pytest.raises(
        JobError,
        match=f"the forward pass of layer act raised RuntimeError: a view of a leaf .*a new tensor, {line}",
    ):
        layer(at_once=True).forward(inputs, 0, keep=True)
    second = layer(at_once=False)
    _, done = second.forward(inputs, 0, keep=True)
    with pytest.raises(JobError, match=r"(?s)the backward pass of layer act raised .*inplace .*a new tensor"):
        second.backward(done, (torch.ones(3, 8),), weights=True)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), OSError("read"), RuntimeError("CUDA error: 719")]
)
def test_an_error_of_the_machine_is_not_the_layers(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, blamed("a layer"):
        raise error
    assert caught.value is error


class Putting(torch.nn.Module):
    """Uses an operation without a deterministic kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.put(torch.tensor([0]), torch.tensor([1.0]))


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("deterministic")
def test_an_operation_that_gives_other_bits_each_time_is_named_with_the_ways_out() -> None:
    device = torch.device("cpu")
    layer = Layer(0, "put", Putting(), precision="float32", device=device, workspace=Workspace())
    with pytest.raises(
        JobError,
        match=r"the forward pass of layer put uses put_, for which this device has no kernel that gives the same bits"
        r".* write it with other operations, or .*cluster\.device\), at .*test_engine_conduct\.py:\d+ in forward",
    ):
        layer.forward((torch.randn(3, 8),), 0, keep=True)


class Doubling(torch.nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2.0))


def test_a_layer_that_changes_its_input_is_refused_where_autograd_would_not_notice() -> None:
    layer = Layer(
        0, "doubling", Doubling(), precision="float32", device=torch.device("cpu"), workspace=Workspace()
    )
    for keep in (True, False):
        with pytest.raises(JobError, match="layer doubling changes its input in place"):
            layer.forward((torch.randn(3, 8),), 0, keep=keep)


class Table(torch.nn.Module):
    """Only a raw matrix, on integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.randn(5, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows[tokens]


@pytest.mark.parametrize("weights", [True, False])
def test_a_layer_of_one_raw_matrix_gets_its_gradient(weights: bool) -> None:
    module = Table()
    layer = Layer(0, "table", module, precision="float32", device=torch.device("cpu"), workspace=Workspace())
    tokens = torch.tensor([0, 3, 3])
    _, done = layer.forward((tokens,), 0, keep=True)
    assert layer.backward(done, (torch.ones(3, 4),), weights=weights) == ()
    if not weights:
        assert module.rows.grad is None
        layer.weight_grad(done)
    expected = torch.zeros(5, 4)
    expected[0], expected[3] = 1.0, 2.0
    assert module.rows.grad is not None
    assert module.rows.grad.equal(expected)


def test_no_decay_must_take_all_copies_of_a_tied_parameter_or_none(tmp_path: Path) -> None:
    for patterns, fine in ((("l0.*",), False), (("l0.up.weight", "l7.up.weight"), True)):
        config = small_config(tmp_path, "tied", optimizer=OptimizerConfig(no_decay=patterns))
        if fine:
            run_threads(job(config, ranks=2, schedule="1f1b"))
        else:
            with pytest.raises(
                JobError, match=r"no_decay matches l0\.up\.weight, which is tied with l7\.up\.weight"
            ):
                run_threads(job(config, ranks=2, schedule="1f1b"))


def test_processes_end_when_the_first_rank_fails_before_they_meet(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    run_threads(job(config))
    (whole,) = checkpoints(config.job.folder)
    next(Path(whole.path).glob("000-*.weights.safetensors")).write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"rank 0: .*000-l0\.weights\.safetensors"):
        run_processes(job(config, ranks=2, schedule="1f1b", start=whole))


def test_two_threads_per_rank_give_the_same_bits_every_time(tmp_path: Path) -> None:
    config = small_config(tmp_path, "raw-matrix", threads=2)
    try:
        digests = {
            run_threads(job(config, ranks=ranks, schedule="1f1b")).state_sha256 for ranks in (1, 2, 4, 2)
        }
        x = torch.randn(16, 256, requires_grad=True)
        index = torch.randint(0, 16, (4096,))
        grads = [torch.autograd.grad(x[index].square().sum(), x)[0] for _ in range(5)]
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    assert len(digests) == 1
    assert all(grad.equal(grads[0]) for grad in grads)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_when_a_checkpoint_cannot_be_written(tmp_path: Path, ranks: int) -> None:
    quiet = run_threads(job(small_config(tmp_path / "quiet"), ranks=ranks, schedule="1f1b"))
    config = small_config(tmp_path / "full", checkpoint=CheckpointConfig(every_steps=1, keep=9))
    folder = tmp_path / "full" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-00000003-gen-1").write_text("a file stands where the checkpoint's folder has to be made")
    run = run_threads(job(config, ranks=ranks, schedule="1f1b"))
    assert run.state_sha256 == quiet.state_sha256
    told = [r for r in run.reports if isinstance(r, CheckpointReport)]
    assert {r.step for r in told if r.error is not None} == {3}
    assert {r.step for r in told if r.error is None} == {1, 2, 4, 5}
    assert sorted(ref.step for ref in checkpoints(config.job.folder)) == [1, 2, 4, 5]
