"""Notices that a node is leaving: each cloud's service as documented, the file, the signal; each once."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from metadata_service import Reply, metadata_service
from pace import patient

from workers.config import ElasticConfig
from workers.notices import node_turn
from workers.notices.aws import INTERRUPTION, REBALANCE, Aws
from workers.notices.azure import Azure
from workers.notices.file import NoticeFile
from workers.notices.gcp import Gcp
from workers.notices.node_turn import NodeTurn
from workers.notices.notice import Notice, NoticeError, NoticeSource
from workers.notices.reporting import sources, watch_node
from workers.notices.sigterm import Sigterm
from workers.notices.watch import PATIENCE, NoticeWatch
from workers.protocol.reports import NoticeReport, Report

NOON_S = 1_790_510_400.0  # 2026-09-27T12:00:00Z


class Imds:
    """An instance's metadata with session tokens: 401 without a valid token, 404 where there is no notice."""

    def __init__(self) -> None:
        self.items: dict[str, str] = {}
        self.tokens = 0

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if path == "/latest/api/token":
            if method != "PUT":
                return Reply(status=405)
            life = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if not life.isdigit() or not 1 <= int(life) <= 21_600:
                return Reply(status=400)
            self.tokens += 1
            return Reply(body=f"token-{self.tokens}")
        if headers.get("x-aws-ec2-metadata-token") != f"token-{self.tokens}":
            return Reply(status=401)
        return Reply(body=self.items[path]) if path in self.items else Reply(status=404)


def test_aws_tells_an_interruption_with_its_time_and_a_rebalance_without() -> None:
    imds = Imds()
    with metadata_service(imds) as service:
        aws = Aws(service.base, now=lambda: NOON_S)
        assert aws.look() == ()
        imds.items[REBALANCE] = json.dumps({"noticeTime": "2026-09-27T11:59:00Z"})
        advice = Notice(source="aws", left_s=None, text="rebalance recommended at 2026-09-27T11:59:00Z")
        assert aws.look() == (advice,)
        imds.items[INTERRUPTION] = json.dumps({"action": "terminate", "time": "2026-09-27T12:02:00Z"})
        text = "spot interruption: terminate at 2026-09-27T12:02:00Z"
        assert aws.look() == (Notice(source="aws", left_s=120.0, text=text), advice)
        imds.items.clear()
        assert aws.look() == ()
        assert imds.tokens == 1


def test_aws_takes_a_fresh_token_when_the_old_one_has_run_out() -> None:
    imds = Imds()
    with metadata_service(imds) as service:
        aws = Aws(service.base, now=lambda: NOON_S)
        aws.look()
        imds.tokens += 1
        imds.items[INTERRUPTION] = json.dumps({"action": "stop", "time": "2026-09-27T11:59:59Z"})
        (notice,) = aws.look()
        assert notice.left_s == 0.0
        assert imds.tokens == 3


@pytest.mark.parametrize(
    "body",
    [
        "<html>no</html>",
        "[]",
        "{}",
        '{"action": 7, "time": "2026-09-27T12:02:00Z"}',
        '{"action": "stop", "time": "soon"}',
        "[" * 60_000,
        "x" * 100_000,
    ],
)
def test_aws_is_not_shaken_by_garbage(body: str) -> None:
    imds = Imds()
    imds.items[INTERRUPTION] = body
    with metadata_service(imds) as service, pytest.raises(NoticeError):
        Aws(service.base).look()


@pytest.mark.parametrize("token", [Reply(status=403), Reply(body="a\nb: c")])
def test_a_token_that_is_refused_or_none_is_an_error(token: Reply) -> None:
    with metadata_service(lambda *request: token) as service, pytest.raises(NoticeError):
        Aws(service.base).look()


class GoogleServer:
    """Compute Engine's metadata server: 403 without the header, which every answer also carries."""

    def __init__(self) -> None:
        self.items = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.flavor = {"Metadata-Flavor": "Google"}

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if headers.get("metadata-flavor") != "Google":
            return Reply(status=403)
        prefix = "/computeMetadata/v1/instance/"
        if method != "GET" or path.removeprefix(prefix) not in self.items:
            return Reply(status=404)
        return Reply(body=self.items[path.removeprefix(prefix)], headers=self.flavor)


def test_gcp_tells_a_preemption_and_maintenance_that_stops_the_instance() -> None:
    google = GoogleServer()
    with metadata_service(google) as service:
        gcp = Gcp(service.base)
        assert gcp.look() == ()
        google.items["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        assert gcp.look() == ()
        google.items = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
        assert [(notice.source, notice.left_s) for notice in gcp.look()] == [("gcp", 30.0), ("gcp", 60.0)]


def test_gcp_believes_nobody_else() -> None:
    google = GoogleServer()
    with metadata_service(google) as service:
        google.items["preempted"] = "perhaps"
        with pytest.raises(NoticeError, match="answered 'perhaps'"):
            Gcp(service.base).look()
        google.items["preempted"] = "TRUE"
        google.flavor = {}
        with pytest.raises(NoticeError, match="not Google's metadata server"):
            Gcp(service.base).look()


class AzureService:
    """Azure's metadata service: 400 without header or version; every machine gets the events of the set."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def __call__(self, method: str, path: str, headers: Mapping[str, str]) -> Reply:
        if method != "GET" or headers.get("metadata") != "true" or "api-version=" not in path:
            return Reply(status=400)
        if path.startswith("/metadata/instance/compute/name?"):
            return Reply(body="worker_3")
        if path.startswith("/metadata/scheduledevents?"):
            return Reply(body=json.dumps({"DocumentIncarnation": 1, "Events": self.events}))
        return Reply(status=404)


def scheduled(kind: str, names: list[str], **changed: object) -> dict[str, object]:
    return {
        "EventId": f"e-{kind}",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": names,
        "EventStatus": "Scheduled",
        "NotBefore": "Sun, 27 Sep 2026 12:00:30 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    } | changed


def test_azure_tells_the_events_that_take_this_machine() -> None:
    azure_service = AzureService()
    with metadata_service(azure_service) as service:
        azure = Azure(service.base, now=lambda: NOON_S)
        assert azure.look() == ()
        azure_service.events = [
            scheduled("Preempt", ["worker_1", "Worker_3"]),
            scheduled("Redeploy", ["worker_1"]),
            scheduled("Freeze", ["worker_3"]),
            scheduled("Terminate", ["worker_3"], EventStatus="Started", NotBefore=""),
            scheduled("Reboot", ["worker_3"], NotBefore=""),
        ]
        assert azure.look() == (
            Notice(source="azure", left_s=30.0, text="Preempt (event e-Preempt)"),
            Notice(source="azure", left_s=0.0, text="Terminate (event e-Terminate)"),
            Notice(source="azure", left_s=None, text="Reboot (event e-Reboot)"),
        )
        names = [path for _, path in service.asked if "compute/name" in path]
        assert len(names) == 1


@pytest.mark.parametrize(
    "event", ["no event", {"EventId": "e"}, scheduled("Preempt", ["worker_3"], NotBefore="tomorrow")]
)
def test_azure_is_not_shaken_by_garbage(event: object) -> None:
    azure_service = AzureService()
    azure_service.events = [event]
    with metadata_service(azure_service) as service, pytest.raises(NoticeError):
        Azure(service.base).look()


@pytest.mark.parametrize("make", [Aws, Gcp, Azure])
def test_a_machine_without_the_service_is_an_error_that_names_the_address(make: type) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(NoticeError, match=f"{base} does not answer: .*refused"):
        make(base).look()
    broken = metadata_service(lambda *request: Reply(status=500))
    with broken as service, pytest.raises(NoticeError, match="status 500"):
        make(service.base).look()


@pytest.mark.parametrize(
    ("content", "left_s"),
    [
        ("", None),
        ("12.5\n", 12.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("9" * 500, None),
    ],
)
def test_a_file_may_hold_the_seconds_left(tmp_path: Path, content: str, left_s: float | None) -> None:
    path = tmp_path / "go"
    file = NoticeFile(path)
    assert file.look() == ()
    path.write_text(content)
    (notice,) = file.look()
    assert notice.source == "file"
    assert notice.left_s == (float("9" * 64) if content.startswith("99") else left_s)
    path.unlink()
    assert file.look() == ()


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoticeError, match="cannot be read: Is a directory"):
        NoticeFile(tmp_path).look()


def test_the_first_sigterm_is_a_notice_and_the_next_is_what_it_was() -> None:
    taken: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: taken.append(number))
    try:
        source = Sigterm()
        assert source.look() == ()
        os.kill(os.getpid(), signal.SIGTERM)
        notice = Notice(source="sigterm", left_s=None, text="the process got SIGTERM")
        assert (source.look(), taken) == ((notice,), [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


class Script:
    """A source that returns the given answers in order and then repeats the last one."""

    name = "script"
    every_s = 0.001
    of_node = True

    def __init__(self, *said: tuple[Notice, ...] | NoticeError) -> None:
        self._said = list(said)
        self.done = threading.Event()

    def look(self) -> tuple[Notice, ...]:
        if len(self._said) == 1:
            self.done.set()
        said = self._said.pop(0) if len(self._said) > 1 else self._said[0]
        if isinstance(said, NoticeError):
            raise said
        return said


def notice(text: str, left_s: float | None = None) -> Notice:
    return Notice(source="script", left_s=left_s, text=text)


def watched(*said: tuple[Notice, ...] | NoticeError) -> tuple[list[Notice], list[str]]:
    """The notices and the troubles that a watch reports about a script."""
    told: list[Notice] = []
    troubles: list[str] = []
    script = Script(*said)
    watch = NoticeWatch([script], told.append, troubles.append)
    assert script.done.wait(10)
    watch.close()
    return told, troubles


def test_each_notice_is_reported_once_and_a_withdrawn_one_again_if_it_comes_again() -> None:
    first, later = notice("a", 9.0), notice("a", 8.0)
    other = notice("b")
    assert watched((), (first,), (later,), (later, other), (other,), (), (other,))[0] == [first, other, other]


def test_trouble_is_said_once_and_takes_nothing_back() -> None:
    broken = NoticeError("it answered 'garbage'")
    told, troubles = watched(
        (notice("a"),), *(broken,) * (PATIENCE - 1), (notice("a"),), *(broken,) * PATIENCE * 2, (notice("a"),),
        *(broken,) * PATIENCE * 2, (),
    )  # fmt: skip
    assert told == [notice("a")]
    assert troubles == ["script does not say whether the node is to go: it answered 'garbage'"]


def test_one_rank_of_a_node_looks_for_all_and_another_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_turn, "LOOK_AGAIN_S", 0.01)
    first, second, elsewhere = Script((notice("a"),)), Script((notice("a"),)), Script((notice("a"),))
    told: list[str] = []

    def watch(name: str, script: Script, node: bytes) -> NoticeWatch:
        turn = NodeTurn(bytes(tmp_path) + node)
        return NoticeWatch([script], lambda notice: told.append(name), lambda text: None, turn)

    with ExitStack() as closing:
        one = watch("first", first, b"n1")
        assert first.done.wait(10)
        closing.callback(watch("second", second, b"n1").close)
        closing.callback(watch("elsewhere", elsewhere, b"n2").close)
        assert elsewhere.done.wait(10)
        assert not second.done.wait(0.1)
        one.close()
        assert second.done.wait(10), "it takes over when the first is gone"
    assert told == ["first", "elsewhere", "second"]


def test_of_the_ranks_of_a_job_one_on_each_node_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_turn, "LOOK_AGAIN_S", 0.01)
    (tmp_path / "go").touch()
    config = ElasticConfig(notices=(), notice_file=str(tmp_path / "go"))
    told: queue.SimpleQueue[Report] = queue.SimpleQueue()
    with ExitStack() as closing:

        def rank(number: int, node: str, run: bytes = bytes(tmp_path)) -> NoticeWatch:
            watch = watch_node(config, run, node, number, told.put)
            closing.callback(watch.close)
            return watch

        def heard() -> tuple[int, str]:
            report = told.get(timeout=patient(10))
            assert isinstance(report, NoticeReport)
            return report.rank, report.node

        first = rank(0, "n1")
        assert heard() == (0, "n1")
        rank(1, "n1")
        rank(2, "n2")
        assert heard() == (2, "n2")
        rank(0, "n1", bytes(tmp_path) + b"another job")
        assert heard() == (0, "n1")
        first.close()
        assert heard() == (1, "n1")
        assert told.empty()


def test_the_signal_of_a_process_is_looked_for_in_each(tmp_path: Path) -> None:
    turn = NodeTurn(bytes(tmp_path))
    scripts = [Script((notice("a"),)) for _ in range(2)]
    with ExitStack() as closing:
        for script in scripts:
            script.of_node = False
            closing.callback(NoticeWatch([script], lambda notice: None, lambda text: None, turn).close)
        assert all(script.done.wait(10) for script in scripts)


def test_a_rank_that_waits_for_its_turn_can_be_closed(tmp_path: Path) -> None:
    turn, closed = NodeTurn(bytes(tmp_path)), threading.Event()
    with turn.held("aws", threading.Event()) as is_mine:
        assert is_mine
        closed.set()
        with turn.held("aws", closed) as is_mine:
            assert not is_mine


def test_a_killed_rank_leaves_its_turn_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_turn, "LOOK_AGAIN_S", 0.01)
    holder = (
        "import sys, threading\n"
        "from workers.notices.node_turn import NodeTurn\n"
        "with NodeTurn(sys.argv[1].encode()).held('file', threading.Event()): print(flush=True), sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        closed = threading.Event()
        waiting = threading.Timer(0.1, closed.set)
        waiting.start()
        with NodeTurn(bytes(tmp_path)).held("file", closed) as is_mine:
            assert not is_mine
        process.kill()
        process.wait()
        with NodeTurn(bytes(tmp_path)).held("file", threading.Event()) as is_mine:
            assert is_mine
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_such_names_has_every_rank_look(tmp_path: Path) -> None:
    turn, too_long = NodeTurn(bytes(tmp_path)), "x" * 200
    with turn.held(too_long, threading.Event()) as one, turn.held(too_long, threading.Event()) as other:
        assert one
        assert other


def test_a_watch_leaves_no_thread_behind() -> None:
    watched((notice("a"),))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("notices")] == []


@pytest.fixture
def handler_kept() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler_kept")
def test_the_sources_are_those_that_the_spec_names(tmp_path: Path) -> None:
    def kinds(config: ElasticConfig) -> list[type[NoticeSource]]:
        return [type(source) for source in sources(config, "n7")]

    before = signal.getsignal(signal.SIGTERM)
    assert kinds(ElasticConfig(notices=("ray",))) == []
    assert signal.getsignal(signal.SIGTERM) == before
    everything = ElasticConfig(
        notices=("ray", "sigterm", "aws", "gcp", "azure"), notice_file="/tmp/{node}/go"
    )
    assert kinds(everything) == [Sigterm, Aws, Gcp, Azure, NoticeFile]
    (tmp_path / "n7").mkdir()
    (tmp_path / "n7" / "go").touch()
    (file,) = sources(ElasticConfig(notices=(), notice_file=f"{tmp_path}/{{node}}/go"), "n7")
    assert len(file.look()) == 1


def test_no_library_beyond_the_standard_one() -> None:
    names = ("aws", "azure", "gcp", "file", "sigterm", "watch")
    code = "import sys; " + "; ".join(f"import workers.notices.{name}" for name in names)
    code += "; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'pydantic', 'httpx')))"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
