"""Who is taken for dead: not a rank that answers while the controller itself stands still."""

from __future__ import annotations

import asyncio
import socket
import time

from orchestrator.hosts import CONNECT_S, stands
from workers.actor import Home


def test_who_listens_stands_also_if_the_controller_stood_still() -> None:
    async def look() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            home = Home(node="n", host="127.0.0.1", pid=1, port=port)
            looking = asyncio.ensure_future(stands(home))
            await asyncio.sleep(0)
            time.sleep(CONNECT_S + 0.2)
            assert await looking
        assert not await stands(home)

    asyncio.run(look())
