"""Reports notices to the controller."""

from __future__ import annotations

from collections.abc import Callable

from workers.config import ElasticConfig
from workers.notices.node_turn import NodeTurn
from workers.notices.notice import Notice
from workers.notices.registry import sources
from workers.notices.watch import Watch
from workers.protocol import NoticeReport, Report, WarningReport


def watch_node(
    config: ElasticConfig, run: bytes, node: str, rank: int, report: Callable[[Report], None]
) -> Watch:
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

    return Watch(sources(config, node), report_notice, warn, NodeTurn(run + node.encode()))
