"""Measures a job without Ray: all ranks are processes of this machine.

    python -m workers.launch.profile REQUEST ANSWER

is a process of its own around them, for drivers whose main module must not be imported again. Both are JSON files.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from workers.config import WorkerConfig
from workers.control.rank_error import RankError, travelling_errors
from workers.launch.processes import Died, LaunchedProcesses
from workers.launch.waiting import waits_for_a_rank
from workers.process.host_memory import exclude_from_collections
from workers.process.output import cause_of_death, innermost_calls, keep_output, last_lines, rank_log_path
from workers.profiling.measured import Measured, combine
from workers.profiling.profiler import BUDGET_S
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import Report
from workers.rank import Rank

TIMEOUT_S = 120.0
FAILURE = 1
"""Exit code of a process that could not measure."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Job that a process measures, and its limits."""

    config: WorkerConfig
    ranks: int
    budget_s: float = BUDGET_S
    timeout_s: float = TIMEOUT_S
    """A rank that has not finished by then is ended."""

    def to_json(self) -> str:
        return json.dumps({**vars(self), "config": self.config.model_dump(mode="json")})

    @staticmethod
    def from_json(text: str) -> ProfileRequest:
        fields = json.loads(text)
        return ProfileRequest(**{**fields, "config": WorkerConfig.model_validate(fields["config"])})


def profile_processes(request: ProfileRequest) -> list[Measured]:
    """Return each rank's measurements, in rank order; over Gloo on the loopback interface, or NCCL.

    Raises:
        JobError: the model, the data or the device is not what it should be; a rank died, or did not finish in time.
        RuntimeError: a rank failed otherwise.
    """
    measured: dict[int, Measured] = {}
    failures: list[tuple[int, RankError]] = []
    with (
        tempfile.TemporaryDirectory(prefix="freshet-output-") as output,
        LaunchedProcesses(
            request.ranks, _process, (request, output), request.config.model.slow_imports
        ) as ranks,
    ):
        for number, message in ranks.receive():
            match message:
                case int():
                    ranks.tell(message)
                case Measured():
                    measured[number] = message
                    ranks.done(number)
                case Died(exit_code):
                    path = rank_log_path(output, number)
                    failures.append((number, _death(number, path, exit_code, request.timeout_s)))
                    ranks.done(number, failed=True)
                case failure:
                    failures.append((number, failure))
                    ranks.done(number, failed=True)
        if failures:
            _raise_first(failures)
    return [measured[number] for number in sorted(measured)]


def _raise_first(failures: list[tuple[int, RankError]]) -> None:
    number, first = min(failures, key=lambda failure: (failure[1].cut_off, not failure[1].user_error))
    if first.user_error:
        raise JobError(first.message)
    raise RuntimeError(f"rank {number} could not measure: {first.message}\n{first.details}")


def _death(rank: int, path: Path, exit_code: int | None, timeout_s: float) -> RankError:
    """Say how the process of `rank` ended, whose output is in `path`, and which calls it was in.

    If it was late because it waited for another rank, the cause lies there.
    """
    calls = innermost_calls(path)
    waited = calls.late and waits_for_a_rank("\n".join(calls.lines))
    if calls.late:
        how = f"had not measured the job after {timeout_s:g} s (cluster.timeout_s), and was ended"
    else:
        how = f"died as it measured the job: {cause_of_death(path) or _exit(exit_code)}"
    if calls.lines:
        shown = ("its last calls, innermost first:", *calls.lines)
    else:
        shown = ("its last output:", *last_lines(path)) if last_lines(path) else ()
    return RankError("\n".join((f"rank {rank} {how}", *shown)), user_error=True, cut_off=waited)


def _exit(code: int | None) -> str:
    if code is None:
        return "an unknown exit code"
    if code >= 0:
        return f"exit code {code}"
    killed = ", for want of memory or by another program" if -code == signal.SIGKILL else ""
    try:
        return f"signal {signal.Signals(-code).name}{killed}"
    except ValueError:  # of the real-time signals only the first and the last have names
        return f"signal {-code}"


def _process(given: tuple[ProfileRequest, str], number: int, pipe: Connection) -> None:
    request, output = given
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if request.config.device == "cuda":
        _take_gpu(number)
    keep_output(output, number)
    # In C: it ends a process that no longer runs Python, too.
    faulthandler.dump_traceback_later(request.timeout_s, exit=True, file=2)
    try:
        with travelling_errors():
            _measure(request, number, pipe)
    except RankError as error:
        pipe.send(error)


def _measure(request: ProfileRequest, number: int, pipe: Connection) -> None:
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
            # Longer than any rank may take: the calls of a rank that waits for a hung one show that it waits.
            timeout_s=2 * request.timeout_s,
        )
    )
    exclude_from_collections()
    pipe.send(rank.profile(request.budget_s))
    faulthandler.cancel_dump_traceback_later()
    # A collective that is over here may still be under way at a neighbour: all close together.
    pipe.recv()
    rank.close()


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
    request = ProfileRequest.from_json(request_path.read_text())
    try:
        profile = combine(profile_processes(request), request.config)
    except JobError as error:
        answer_path.write_text(json.dumps({"error": str(error)}))
        return FAILURE
    answer_path.write_text(profile.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
