"""Watches the sources of notices that a job names, and reports to the controller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workers.config import ElasticConfig
from workers.notices.aws import Aws
from workers.notices.azure import Azure
from workers.notices.file import NoticeFile
from workers.notices.gcp import Gcp
from workers.notices.node_turn import NodeTurn
from workers.notices.notice import Notice, NoticeSource
from workers.notices.sigterm import Sigterm
from workers.notices.watch import NoticeWatch
from workers.protocol.reports import NoticeReport, Report, WarningReport


def watch_node(
    config: ElasticConfig, run: bytes, node: str, rank: int, report: Callable[[Report], None]
) -> NoticeWatch:
    """Watch the sources that `config` names. Call it in the main thread, which alone can take over SIGTERM.

    Args:
        run: identifies the run of the job: one of its ranks on each node watches for all.
        node: this node's id in the cluster.
        rank: this rank's number.
        report: receives a report of each notice and of each source that does not work; called on any thread.
    """

    def report_notice(notice: Notice) -> None:
        report(
            NoticeReport(rank=rank, source=notice.source, left_s=notice.left_s, text=notice.text, node=node)
        )

    def warn(text: str) -> None:
        report(WarningReport(rank=rank, text=text))

    return NoticeWatch(sources(config, node), report_notice, warn, NodeTurn(run + node.encode()))


def sources(config: ElasticConfig, node: str) -> tuple[NoticeSource, ...]:
    """All sources in a job's `[elastic]` section that a rank can watch itself. Call it in the main thread: it may take
    over SIGTERM.

    Args:
        node: this node's id in the cluster.
    """
    # The controller watches Ray's drains: they are in Ray's own tables.
    makers: dict[str, Callable[[], NoticeSource]] = {
        "sigterm": Sigterm,
        "aws": Aws,
        "gcp": Gcp,
        "azure": Azure,
    }
    made = [makers[name]() for name in config.notices if name in makers]
    if config.notice_file is not None:
        made.append(NoticeFile(Path(config.notice_file.replace("{node}", node))))
    return tuple(made)
