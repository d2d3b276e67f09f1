"""Measures a job without Ray: all ranks are processes of this machine.

    python -m workers.launch.profile REQUEST ANSWER

is a process of its own around them, for drivers whose main module must not be imported again. Both are JSON files.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from workers.config import WorkerConfig
from workers.launch.processes import Died, RankProcesses
from workers.process.host_memory import settle_objects
from workers.profiling.measured import Measured, combine
from workers.profiling.profiler import BUDGET_S
from workers.protocol import Generation, JobError, Report
from workers.rank import Rank
from workers.transport.channel import ChannelError

TIMEOUT_S = 120.0
FAILURE = 1
"""Exit code of a process that could not measure."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a process measures."""

    config: WorkerConfig
    ranks: int
    budget_s: float = BUDGET_S

    def to_json(self) -> str:
        return json.dumps(
            {"config": self.config.model_dump(mode="json"), "ranks": self.ranks, "budget_s": self.budget_s}
        )

    @staticmethod
    def from_json(text: str) -> Request:
        fields = json.loads(text)
        return Request(**{**fields, "config": WorkerConfig.model_validate(fields["config"])})


@dataclass(frozen=True)
class _Failure:
    text: str
    user_error: bool
    cut_off: bool
    """It lost another rank, which failed first."""


def profile_processes(request: Request) -> list[Measured]:
    """What each rank measured, in rank order; over Gloo on the loopback interface, or NCCL.

    Raises:
        JobError: the model, the data or the device is not what it should be.
        RuntimeError: a rank failed otherwise.
    """
    measured: dict[int, Measured] = {}
    failures: list[tuple[int, _Failure]] = []
    with RankProcesses(request.ranks, _process, request) as ranks:
        for number, message in ranks.receive():
            match message:
                case int():
                    ranks.tell(message)
                case Measured():
                    measured[number] = message
                    ranks.done(number)
                case Died():
                    died = _Failure("its process died: killed, or out of memory", False, False)
                    failures.append((number, died))
                    ranks.done(number, failed=True)
                case failure:
                    failures.append((number, failure))
                    ranks.done(number, failed=True)
        if failures:
            _raise_first(failures)
    return [measured[number] for number in sorted(measured)]


def _raise_first(failures: list[tuple[int, _Failure]]) -> None:
    number, first = min(failures, key=lambda failure: (failure[1].cut_off, not failure[1].user_error))
    if first.user_error:
        raise JobError(first.text)
    raise RuntimeError(f"rank {number} could not measure: {first.text}")


def _process(request: Request, number: int, pipe: Connection) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if request.config.device == "cuda":
        _take_gpu(number)
    try:
        rank = Rank(request.config, number, _ignore)
        rank.setup()
        if number == 0:
            pipe.send(rank.host_store())
        rank.join(
            Generation(
                number=1,
                epoch=1,
                members=tuple(range(request.ranks)),
                store_host="127.0.0.1",
                store_port=pipe.recv(),
                timeout_s=TIMEOUT_S,
            )
        )
        settle_objects()
        pipe.send(rank.profile(request.budget_s))
        # A collective that is over here may still be under way at a neighbour: all close together.
        pipe.recv()
        rank.close()
    except Exception as error:
        user_error = isinstance(error, JobError)
        text = str(error) if user_error else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send(_Failure(text, user_error, isinstance(error, ChannelError | EOFError)))


def _take_gpu(number: int) -> None:
    """See one GPU only, as a rank in its own actor does; ranks beyond the last GPU begin again at the first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def _ignore(report: Report) -> None:
    """A rank that does not train has nothing to report."""


def main(request_path: Path, answer_path: Path) -> int:
    """Measure what the one file asks for and write the other: a profile, or what the user can mend."""
    request = Request.from_json(request_path.read_text())
    try:
        profile = combine(profile_processes(request), request.config)
    except JobError as error:
        answer_path.write_text(json.dumps({"error": str(error)}))
        return FAILURE
    answer_path.write_text(profile.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
