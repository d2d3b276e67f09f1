"""A rank's errors, fit to travel to any process."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from workers.protocol.errors import ChannelError, JobError, MemoryShortage


class RankError(Exception):
    """Exception of a rank without torch's types: any process can read it."""

    def __init__(
        self,
        message: str,
        user_error: bool = False,
        cut_off: bool = False,
        details: str = "",
        shortage: MemoryShortage | None = None,
    ) -> None:
        super().__init__(message, user_error, cut_off, details, shortage)
        self.message = message
        self.user_error = user_error
        """The user can mend it."""
        self.cut_off = cut_off
        """The rank lost another one, or was told to leave: the cause lies elsewhere."""
        self.details = details
        """The traceback, where the message alone does not say enough."""
        self.shortage = shortage
        """The rank ran out of memory."""

    def __str__(self) -> str:
        return self.message


@contextmanager
def travelling_errors(cut_off: bool = False) -> Iterator[None]:
    """Raise whatever is raised inside as a `RankError`; `cut_off`: blame none of it on this rank."""
    try:
        yield
    except JobError as error:
        details = traceback.format_exc() if error.__cause__ is not None else ""
        raise RankError(str(error), user_error=True, details=details) from None
    except SystemExit as error:
        text = f"the job's code called sys.exit({error.code!r}): raise an exception where something is wrong"
        raise RankError(text, user_error=True, details=traceback.format_exc()) from None
    except Exception as error:
        from workers.memory.shortage import described, drop_frames, shortage_in

        if (shortage := shortage_in(error)) is not None:
            details = traceback.format_exc()
            drop_frames(error)
            raise RankError(described(shortage), details=details, shortage=shortage) from None
        elsewhere = isinstance(error, ChannelError)
        message = f"{type(error).__name__}: {error}"
        raise RankError(message, cut_off=cut_off or elsewhere, details=traceback.format_exc()) from None
