"""One of two ranks, in a process of its own at one end of a shaped link; it talks with its starter in lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.parts.shaped_link import ADDRESSES
from workers.protocol.orders import Generation
from workers.rank import Rank
from workers.transport.channel import Channel
from workers.transport.open_channel import open_channel


def post(**message: Any) -> None:
    """Say something to the starter."""
    print(json.dumps(message), flush=True)


def join(rank: Rank, place: int) -> Channel:
    """Have both ranks form a generation; the starter passes on the port of the store, which the first one hosts."""
    if place == 0:
        post(store=rank.host_store(ADDRESSES[0]))
    generation = Generation(
        number=1,
        epoch=1,
        members=(0, 1),
        store_host=ADDRESSES[0],
        store_port=json.loads(input())["store"],
        timeout_s=120.0,
    )
    channel = open_channel(generation, place, torch.device("cpu"))
    rank.join(generation, channel)
    return channel
