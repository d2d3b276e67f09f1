"""Ranks that read a large model's files: which tensors, how long it takes, and the memory at most.

    python -m benchmarks.loading [--rounds N] [--ranks N]

A LLaMA of 0.5 B random parameters with a tied head, float32, in shards of 500 MB, which the page cache holds. The ranks
are processes with one thread each, which begin together; in turn with them one process calls `from_pretrained` with
all threads. That maps the files and reads nothing, so it then also makes what a rank has at the end: weights in memory
of their own, and two moments of zeros. Both have imported transformers before. Memory is what a process has of its own
(`RssAnon`) beyond what it had before, at most, over the bytes of its layers' states: weights, two moments, buffers.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.parts.forked_answers import forked_answers
from benchmarks.parts.targets import at_most
from workers.build import build_layers
from workers.config import ModelConfig, OptimizerConfig
from workers.launch.processes import forkserver
from workers.models.huggingface import source
from workers.models.huggingface.definition import model_of
from workers.models.registry import build_definition
from workers.state.layer_state import bytes_of
from workers.state.optim import make_optimizer

CLASS = "LlamaForCausalLM"
CONFIG: dict[str, Any] = {
    "architectures": [CLASS],
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "tie_word_embeddings": True,
}
LAYERS = CONFIG["num_hidden_layers"] + 2
MOST_MEMORY, MOST_TIME = 1.1, 1.0
LOOK_S = 0.002


@dataclass(frozen=True)
class Loaded:
    """What one process did."""

    seconds: float
    peak_bytes: int
    state_bytes: int
    reads: Counter[str]
    """Tensor of the files -> times that it was read."""


def write_model(folder: Path) -> None:
    """Write the model, with random values."""
    model = model_of(CONFIG, CLASS)
    with torch.device("meta"):
        whole = getattr(model.module, CLASS)(model.config)
    whole.to_empty(device="cpu").tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.02)
    whole.save_pretrained(folder, max_shard_size="500MB")


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@contextmanager
def _most_bytes(found: list[int]) -> Iterator[None]:
    """Append the most memory that this process has of its own meanwhile, beyond that at the beginning."""
    before, over = _own_bytes(), threading.Event()
    most = [before]

    def look() -> None:
        while not over.wait(LOOK_S):
            most[0] = max(most[0], _own_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        found.append(max(most[0], _own_bytes()) - before)


def _counted(reads: Counter[str]) -> None:
    """Have every tensor that is read from a file counted."""
    opened = source._opened

    class Counting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_tensor(self, key: str) -> Any:
            reads[key] += 1
            return self._file.get_tensor(key)

    @contextmanager
    def counting(path: Path) -> Iterator[Any]:
        with opened(path) as file:
            yield Counting(file)

    source._opened = counting


def _rank(folder: str, layers: range, begin: Barrier, pipe: Connection) -> None:
    torch.set_num_threads(1)
    config = ModelConfig(family="huggingface", path=folder)
    definition = build_definition(config, None)
    reads: Counter[str] = Counter()
    _counted(reads)
    most: list[int] = []
    begin.wait()
    begun_s = perf_counter()
    with _most_bytes(most):
        built = build_layers(
            definition,
            layers,
            seed=0,
            precision="float32",
            device=torch.device("cpu"),
            optimizer=make_optimizer(OptimizerConfig(), 1),
        )
        taken_s = perf_counter() - begun_s
    state_bytes = sum(bytes_of(state) for _, state in built.values())
    pipe.send(Loaded(seconds=taken_s, peak_bytes=most[0], state_bytes=state_bytes, reads=reads))


def _whole(folder: str, pipe: Connection) -> None:
    model_class = getattr(model_of(CONFIG, CLASS).module, CLASS)
    begun_s = perf_counter()
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    mapped_s = perf_counter() - begun_s
    states: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        states += [torch.zeros_like(parameter) for _ in range(2)]
    pipe.send((mapped_s, perf_counter() - begun_s))


def ranks_load(folder: str, ranks: int) -> list[Loaded]:
    """What each of `ranks` processes did that load equal shares of the layers."""
    begin = forkserver().Barrier(ranks)
    edges = [rank * LAYERS // ranks for rank in range(ranks + 1)]
    return forked_answers(_rank, ((folder, range(*ends), begin) for ends in pairwise(edges)))


def whole_loads(folder: str) -> tuple[float, float]:
    """Seconds that one process takes to map the whole model, and to have it with its moments in memory."""
    (taken_s,) = forked_answers(_whole, [(folder,)])
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        bytes_of_files = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        print(f"{date.today()}: {bytes_of_files / 1e9:.2f} GB in files, {given.ranks} ranks")
        rounds = [(whole_loads(folder), ranks_load(folder, given.ranks)) for _ in range(given.rounds)]
    reads: Counter[str] = Counter()
    for loaded in rounds[0][1]:
        reads += loaded.reads
    twice = sorted(key for key, times in reads.items() if times > 1)
    print(
        f"{len(reads)} tensors, each read once, but for {', '.join(twice)}, read {max(reads.values())} times"
    )
    shares = [one.peak_bytes / one.state_bytes for _, ranks in rounds for one in ranks]
    print(
        f"memory of a rank: {at_most(f'{max(shares):.3f}', max(shares), MOST_MEMORY)} of its layers' states"
    )
    slowest_s = [max(one.seconds for one in ranks) for _, ranks in rounds]
    print(f"the slowest rank has its layers after {median(slowest_s):.2f} s")
    for number, what in enumerate(("from_pretrained, which maps them", "with weights and moments in memory")):
        whole_s = [times[number] for times, _ in rounds]
        ratio = median(own / whole for own, whole in zip(slowest_s, whole_s, strict=True))
        print(f"  {what}: {median(whole_s):.2f} s; {at_most(f'{ratio:.2f}', ratio, MOST_TIME)} of that")


if __name__ == "__main__":
    main()
