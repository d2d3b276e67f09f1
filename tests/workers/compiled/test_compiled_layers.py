"""Compiled layers: the same bits whatever is cut, kept, split or frozen; what cannot be compiled computes as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import compiled_models
import pytest
import torch
from compiled_models import Counts, Mixed, Raises, Transposed
from jobs import DEVICE, job, small_config
from small_models import WIDTH, Vectors, cross_entropy
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

import workers.step.equipment
from benchmarks.parts.configs import changed
from benchmarks.parts.rank_threads import Hub, LocalChannel, run_threads
from workers.build import build_layers
from workers.checkpoint.coordination import manifest_mismatch
from workers.checkpoint.manifest import Manifest
from workers.config import FreezeConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.launch.ranks import LaunchedRun, run_processes
from workers.layers.compiled.kernels import Kernels
from workers.layers.compiler import Compiler
from workers.layers.layer import Layer
from workers.models.definition import LayerBuilder, ModelDefinition
from workers.profiling.layer_times import LayerTimes
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import PrefixFrozen, WarningReport
from workers.rank import Rank
from workers.reproducibility import rng
from workers.state.optim import make_optimizer
from workers.state.precision import boundary_dtype

# Compiling takes seconds: one process does it once for all tests here.
pytestmark = pytest.mark.xdist_group("compiled")

CPU = torch.device("cpu")
ROWS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads of a rank; a trace holds for as many only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def compiler_in(precision: str, device: torch.device = CPU) -> Compiler:
    """The compiler of `compiled_models.model`."""
    return Compiler(
        compiled_models.model(),
        lambda: tuple(t.to(device) for t in Vectors().train(list(range(ROWS))).inputs),
        precision=precision,
        device=device,
        threads=1,
    )


def built(
    kinds: Sequence[Callable[[], torch.nn.Module]] = (Mixed, Mixed), *, precision: str = "float32"
) -> list[Layer]:
    definition = ModelDefinition(
        tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy
    )
    layers = build_layers(
        definition,
        range(len(kinds)),
        seed=1,
        precision=precision,
        device=CPU,
        optimizer=make_optimizer(OptimizerConfig(), 1),
    )
    return [layer for layer, _ in layers.values()]


def compiled(kind: Callable[[], torch.nn.Module] = Mixed, *, precision: str = "float32") -> Layer:
    """A layer that is not the first, compiled."""
    layer = built((Mixed, kind), precision=precision)[1]
    compiler_in(precision).compile([layer])
    return layer


def passes(
    layer: Layer,
    *,
    keep: bool = True,
    split: bool = True,
    carries: bool = True,
    frozen: frozenset[str] = frozenset(),
) -> dict[str, Tensor]:
    """What two microbatches leave, by name: outputs, input gradients, gradients, buffers."""
    left: dict[str, Tensor] = {}
    dtype = boundary_dtype(layer._precision) or torch.float32
    generator = torch.Generator().manual_seed(3)
    for microbatch in range(2):
        x, grad = (torch.randn(ROWS, WIDTH, generator=generator).to(layer.device, dtype) for _ in range(2))
        (output,), done = layer.forward((x.requires_grad_(carries),), microbatch, keep=keep, frozen=frozen)
        left[f"output {microbatch}"] = output.detach()
        if not keep:
            layer.recompute(done)
        grads = layer.backward(done, (grad,), weights=not split)
        if grads:
            left[f"input gradient {microbatch}"] = grads[0]
        if split:
            layer.weight_grad(done)
    left |= {n: p.grad.clone() for n, p in layer.module.named_parameters() if p.grad is not None}
    left |= {n: buffer.clone() for n, buffer in layer.module.named_buffers()}
    layer.summed.drop()
    return left


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name))}


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_a_compiled_layer_computes_the_same_however_it_is_used(precision: str) -> None:
    layer, plain = compiled(precision=precision), built(precision=precision)[1]
    assert layer.compiled is not None
    known = counters["stats"]["unique_graphs"]
    begun = {name: value.clone() for name, value in layer.module.state_dict().items()}
    expected = passes(layer)
    reference = passes(plain)
    assert expected.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(
            expected[name], value, rtol=2e-2, atol=1e-5 if precision == "float32" else 6e-2
        )
    # It is compiled code that ran: its last bits are others.
    assert differing(expected, reference)

    def again(**how: object) -> set[str]:
        layer.module.load_state_dict(begun)
        return differing(passes(layer, **how), expected)  # type: ignore[arg-type]

    for keep in (True, False):
        for split in (True, False):
            assert not again(keep=keep, split=split)
    assert again(carries=False) == {"input gradient 0", "input gradient 1"}
    frozen = frozenset({"up.weight", "norm.bias"})
    assert again(frozen=frozen) == frozen
    every = frozenset(name for name, _ in layer.module.named_parameters())
    assert again(frozen=every) == every
    # All of it was traced before the first pass.
    assert counters["stats"]["unique_graphs"] == known
    layer = compiled(precision=precision)
    assert counters["stats"]["unique_graphs"] == known + 1
    assert not differing(passes(layer), expected)
    assert counters["stats"]["unique_graphs"] == known + 1


def test_transposed_matrices_defer_their_gradients_too() -> None:
    layer, plain = compiled(Transposed), built((Mixed, Transposed))[1]
    assert layer.compiled is not None
    assert layer.uncovered == ()
    begun = {name: value.clone() for name, value in layer.module.state_dict().items()}
    x, grad = torch.randn(2, ROWS, WIDTH)
    _, done = layer.forward((x.requires_grad_(),), 0, keep=True)
    layer.backward(done, (grad,), weights=False)
    parameters = dict(layer.module.named_parameters())
    assert {name for name, each in parameters.items() if each.grad is None} == {"up.weight", "down.weight"}
    layer.weight_grad(done)
    assert all(each.grad is not None for each in parameters.values())
    layer.summed.drop()
    expected, reference = passes(layer), passes(plain)
    assert expected.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(expected[name], value, rtol=2e-2, atol=1e-5)
    layer.module.load_state_dict(begun)
    assert not differing(passes(layer, split=False), expected)


def test_layers_of_one_class_do_not_matter_to_each_other() -> None:
    expected = passes(compiled())
    breaks, counts, fine = built((Mixed, lambda: Mixed(breaks=True), Counts, Mixed))[1:]
    compiler = compiler_in("float32")
    compiler.compile([breaks, counts, fine])
    assert breaks.compiled is None
    assert counts.compiled is None
    assert "data-dependent expression" in compiler.why_not["l1"]
    assert "compiled_models.py" in compiler.why_not["l1"]
    assert compiler.why_not["l2"] == "what its code depends on changes from pass to pass"
    assert counts.module.calls == 0
    assert set(passes(breaks)) == set(expected)
    other = built((Mixed, Mixed))[1]
    compiler.compile([other])
    assert not differing(passes(other), expected)


def test_warming_up_changes_neither_buffers_nor_generators() -> None:
    compiled()
    layer = built()[1]
    before = {name: buffer.clone() for name, buffer in layer.module.named_buffers()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    compiler_in("float32").compile([layer])
    assert torch.equal(torch.get_rng_state(), state)
    assert not differing(before, dict(layer.module.named_buffers()))
    assert all(parameter.grad is None for parameter in layer.module.parameters())


def test_a_pass_that_cannot_be_traced_is_made_once_and_uncompiled() -> None:
    layer = compiled()
    expected, still = passes(compiled()), passes(built()[1])
    setattr(layer.module, "breaks", True)  # noqa: B010 (torch's stub takes tensors and modules alone)
    # Buffers advance once, draws are those of the layer that is not compiled: all of its bits are.
    assert not differing(passes(layer), still)
    back = built()[1].module
    layer.module.load_state_dict(back.state_dict())
    setattr(layer.module, "breaks", False)  # noqa: B010
    assert not differing(passes(layer), expected)


def test_draws_of_a_thread_beside_the_compiler_stay_its_own() -> None:
    layers = built((Mixed,) * 5)[1:]
    compiling = threading.Thread(target=lambda: compiler_in("float32").compile(layers))
    compiler_in("float32").compile([built()[1]])
    with rng.keyed(7):
        expected = torch.rand(8)
    compiling.start()
    rounds = 0
    while compiling.is_alive():
        with rng.keyed(7):
            drawn = []
            for _ in range(8):
                drawn.append(torch.rand(1))
                threading.Event().wait(1e-4)
        assert torch.equal(torch.cat(drawn), expected)
        rounds += 1
    assert rounds > 3
    assert all(layer.compiled is not None for layer in layers)


def test_a_users_mistake_is_told_as_ever() -> None:
    errors = []
    for layer in (compiled(Raises), built((Mixed, Raises))[1]):
        assert layer.compiled is None
        with pytest.raises(JobError, match="the forward pass of layer l1 raised RuntimeError") as raised:
            passes(layer)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_no_memory_is_no_reason_to_go_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = built()[1]

    def short(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    compiler_in("float32").compile([built()[1]])
    monkeypatch.setattr(Kernels, "compiled", short)
    with pytest.raises(torch.OutOfMemoryError):
        compiler_in("float32").compile([layer])


def test_a_machine_without_a_compiler_says_so_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    compiler = Compiler(
        compiled_models.model(),
        lambda: (torch.zeros(ROWS, WIDTH),),
        precision="float32",
        device=CPU,
        threads=1,
    )
    with pytest.raises(JobError, match=r"no C\+\+ compiler: install g\+\+.*job.compile = false"):
        compiler.compile(built()[1:])


def test_a_compiler_that_fails_ends_the_job_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ $# -lt 2 ] && exec /usr/bin/env -S c++ "$@"\necho "x.cpp:1: fatal error: Python.h: No such file"'
        " >&2\nexit 1\n"
    )
    compiler.chmod(0o700)
    monkeypatch.setattr(inductor.cpp, "cxx", (str(compiler),))
    layer = built()[1]
    failing = Compiler(
        compiled_models.model(),
        lambda: (torch.zeros(ROWS, WIDTH),),
        precision="float32",
        device=CPU,
        threads=1,
    )
    with pytest.raises(JobError, match=r"C\+\+ compiler failed \(.*Python.h.*python3-dev"):
        failing.compile([layer])


def test_a_checkpoint_is_of_one_way_to_compute() -> None:
    config = small_config(Path("x"))
    spec = config.model_dump(mode="json")
    manifest = Manifest(step=1, generation=1, spec=spec, plan={}, layers=(), samples=0, files={})
    now = changed(config, compile=True)
    assert manifest_mismatch(manifest, config) == {}
    assert manifest_mismatch(manifest, now) == {"job.compile": (False, True)}


def with_one_compiler(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Have the ranks of this process share the compiler of these tests."""
    monkeypatch.setattr(workers.step.equipment, "_compiler_of", lambda *_: compiler_in(precision, DEVICE))


def config_in(folder: Path, **changes: Any) -> WorkerConfig:
    model = ModelConfig(factory="compiled_models:model")
    return small_config(folder, microbatch_size=ROWS, steps=3, compile=True, model=model, **changes)


def test_a_layer_that_comes_while_the_rank_trains_is_compiled_before_it_counts_as_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one_compiler(monkeypatch, "float32")
    rank = Rank(config_in(tmp_path), 0, lambda _: None)
    rank.setup()
    assert rank._source is not None
    came: dict[int, Layer] = {}

    def come() -> None:
        assert rank._source is not None
        came.update((n, one) for n, (one, _) in rank._source.build([1, 3], 0, beside_training=True).items())

    coming = threading.Thread(target=come)
    coming.start()
    coming.join()
    before = counters["stats"]["unique_graphs"]
    assert not differing(passes(came[1]), passes(rank._source.build([1], 0)[1][0]))
    assert counters["stats"]["unique_graphs"] == before + 1  # of the second layer, as it was built
    rank.close()


def test_a_profile_times_compiled_layers_and_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_one_compiler(monkeypatch, "float32")
    compiled()
    met: list[int] = []
    stock = LayerTimes.repeat

    def repeat(times: LayerTimes, microbatches: int) -> None:
        assert [layer.compiled is not None for layer in times._chain.layers] == [
            True,
            True,
            False,
            True,
            True,
        ]
        stock(times, microbatches)
        met.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(LayerTimes, "repeat", repeat)
    rank = Rank(config_in(tmp_path), 0, lambda _: None)
    rank.setup()
    generation = Generation(number=1, epoch=1, members=(0,), store_host="", store_port=0, timeout_s=10.0)
    rank.join(generation, LocalChannel(Hub(1), 0))
    measured = rank.profile(0.05)
    assert all(layer.forward_s > 0 and layer.activation_bytes > 0 for layer in measured.layers)
    assert len(set(met)) == 1
    rank.close()


def told(run: LaunchedRun) -> list[str]:
    return [report.text for report in run.reports if isinstance(report, WarningReport)]


def test_layers_below_a_prefix_keep_their_functions_and_drop_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second step on two layers are frozen, and the first one above forms no input gradient: nothing is
    compiled anew for that, and the bits are those of one rank."""
    with_one_compiler(monkeypatch, "float32")
    config = config_in(tmp_path, freeze=FreezeConfig(method="prefix", schedule=((2, 2),)))
    expected = run_threads(job(config, layers=5))
    before = counters["stats"]["unique_graphs"]
    found = run_threads(job(config, layers=5, ranks=2, schedule="zb-h1"))
    assert counters["stats"]["unique_graphs"] == before + 4, "of each layer, as it was built"
    assert found.state_sha256 == expected.state_sha256
    assert [report.layers for report in found.reports if isinstance(report, PrefixFrozen)] == [2]
    whole = run_threads(job(changed(config, freeze=FreezeConfig()), layers=5))
    assert whole.state_sha256 != expected.state_sha256


# Each way compiles all layers again: in 16 bits there are two, for each of these values once.
WAYS = {
    "float32": [(2, "1f1b", False), (3, "zb-h1", False), (2, "zb-h1", True), (3, "1f1b", True)],
    "bfloat16": [(2, "1f1b", False), (3, "zb-h1", True)],
}


@pytest.mark.parametrize(
    ("precision", "ways", "processes"),
    [
        ("float32", [(3, "zb-h1", True)], 1),
        ("bfloat16", [(2, "1f1b", False)], 0),
        pytest.param("float32", WAYS["float32"], 2, marks=pytest.mark.soak),
        pytest.param("bfloat16", WAYS["bfloat16"], 0, marks=pytest.mark.soak),
    ],
)
def test_any_partition_has_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    ways: Sequence[tuple[int, str, bool]],
    processes: int,
) -> None:
    with_one_compiler(monkeypatch, precision)
    config = config_in(tmp_path, precision=precision)
    expected = run_threads(job(config, layers=5))
    (line,) = told(expected)
    assert line.startswith("layer l2 is not compiled: ")
    plain = run_threads(job(changed(config, compile=False), layers=5))
    assert plain.state_sha256 != expected.state_sha256
    assert not told(plain)
    for ranks, schedule, again in ways:
        before = counters["stats"]["unique_graphs"]
        run = run_threads(job(config, layers=5, ranks=ranks, schedule=schedule, recompute=again))
        # Each layer where it was built, and none as it trained.
        assert counters["stats"]["unique_graphs"] == before + 4
        assert run.state_sha256 == expected.state_sha256, (ranks, schedule, again)
        assert told(run) == [line]
    if processes:
        # Each compiles for itself.
        run = run_processes(job(config, layers=5, ranks=processes, schedule="zb-h1"))
        assert run.state_sha256 == expected.state_sha256
