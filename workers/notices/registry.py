"""The sources of notices in a job's `[elastic]` section that a rank can watch itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from workers.config import ElasticConfig
from workers.notices.aws import Aws
from workers.notices.azure import Azure
from workers.notices.file import NoticeFile
from workers.notices.gcp import Gcp
from workers.notices.notice import Source
from workers.notices.sigterm import Sigterm


def sources(config: ElasticConfig, node: str) -> tuple[Source, ...]:
    """All sources that `config` names. Call it in the main thread: it may take over SIGTERM.

    Args:
        node: this node's id in the cluster.
    """
    # The controller watches Ray's drains: they are in Ray's own tables.
    makers: dict[str, Callable[[], Source]] = {"sigterm": Sigterm, "aws": Aws, "gcp": Gcp, "azure": Azure}
    made = [makers[name]() for name in config.notices if name in makers]
    if config.notice_file is not None:
        made.append(NoticeFile(Path(config.notice_file.replace("{node}", node))))
    return tuple(made)
