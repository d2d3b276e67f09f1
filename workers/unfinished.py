"""What the ranks of a new generation tell each other first: what the end of the one before left unfinished.

Values and their agreement; no effects.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from workers.protocol import Request


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """What one rank knows of the commit of `step`, or all ranks together."""

    step: int
    requests: frozenset[Request] = frozenset()
    """That the commit carried."""
    validated: bool = False
    """Whether the validation after it is done."""
    begun: int = 0
    """Step of the newest checkpoint begun; 0 for none."""
    whole: int = 0
    """Step of the newest checkpoint known to be whole; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What a rank tells the others as a generation begins."""

    host: str
    port: int
    """Where it offers layers."""
    left: Unfinished | None
    """What it knows of the commit where the generation begins, if it has been at one."""
    lacks: tuple[int, ...] = ()
    """Layers that it stands by for and fetches from their owners."""

    def encode(self) -> bytes:
        left = None if self.left is None else {**asdict(self.left), "requests": sorted(self.left.requests)}
        return json.dumps([self.host, self.port, left, self.lacks]).encode()

    @staticmethod
    def decode(text: bytes) -> Greeting:
        host, port, fields, lacks = json.loads(text)
        left = None
        if fields is not None:
            fields["requests"] = frozenset(Request(name) for name in fields["requests"])
            left = Unfinished(**fields)
        return Greeting(host=host, port=port, left=left, lacks=tuple(lacks))


def agree(greetings: Sequence[Greeting], step: int) -> Unfinished | None:
    """What the ranks together know of the commit of `step`; None if none has been at it."""
    known = [greeting.left for greeting in greetings if greeting.left and greeting.left.step == step]
    if not known:
        return None
    return Unfinished(
        step=step,
        requests=frozenset[Request]().union(*(left.requests for left in known)),
        validated=any(left.validated for left in known),
        begun=max(left.begun for left in known),
        whole=max(left.whole for left in known),
    )
