"""A model of one layer, which hangs on one rank and works on the others."""

import os
import threading
from functools import partial
from pathlib import Path

from measured_model import WIDTH, mean_square
from torch import Tensor, nn

from workers.models.definition import LayerBuilder, ModelDefinition


def this_rank() -> str:
    """The rank of this process, from the file that its output goes to."""
    return Path(os.readlink("/proc/self/fd/1")).stem.removeprefix("rank-")


class Hangs(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rank = str(rank)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta" and this_rank() == self.rank:
            threading.Event().wait()
        return self.linear(x)


def model(rank: int) -> ModelDefinition:
    return ModelDefinition((LayerBuilder("hangs", partial(Hangs, rank)),), mean_square)
