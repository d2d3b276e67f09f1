"""What ranks report about a step, and when: the first rank once all have passed its commit, all others after a loss."""

from __future__ import annotations

from typing import Any

from planner.codec import from_json, to_json
from workers.commit.unfinished import Greeting, Unfinished, agree
from workers.control.announcements import Announcements
from workers.control.report_mail import UNANSWERED, ReportMail
from workers.protocol.orders import Request
from workers.protocol.reports import Report, TimelineReport, ValidationReport


def shared(step: int) -> ValidationReport:
    return ValidationReport(step=step, loss=0.5)


def own(step: int) -> TimelineReport:
    return TimelineReport(step=step, rank=1, step_s=1.0, spans=(), memory_bytes=0)


def announcing(*, first: bool) -> tuple[Announcements, list[Report]]:
    told: list[Report] = []
    announcements = Announcements(told.append, first=first)
    for step in (1, 2, 3):
        announcements.add_shared(step, shared(step))
        announcements.add(step, own(step))
    announcements.release(2)
    return announcements, told


def test_a_step_is_told_of_once_all_have_passed_its_commit() -> None:
    announcements, told = announcing(first=True)
    assert told == [shared(1), own(1), shared(2), own(2)]
    announcements.release(3)
    assert told[4:] == [shared(3), own(3)]
    _, of_another = announcing(first=False)
    assert of_another == [own(1), own(2)]


def test_after_a_loss_all_tell_what_the_first_may_have_taken_along_and_nobody_what_was_undone() -> None:
    first, told = announcing(first=True)
    first.end(3, reported=0)
    assert told == [shared(1), own(1), shared(2), own(2), shared(3), own(3)]
    other, told = announcing(first=False)
    other.end(3, reported=0)
    assert told == [own(1), own(2), shared(1), shared(2), shared(3), own(3)]
    undone, told = announcing(first=False)
    undone.end(2, reported=0)
    assert told == [own(1), own(2), shared(1), shared(2)]
    undone.end(3, reported=0)
    assert len(told) == 4


def test_what_the_controller_has_not_heard_of_is_told_again() -> None:
    told: list[Report] = []
    announcements = Announcements(told.append, first=False)
    for step in range(1, 100):
        announcements.add_shared(step, shared(step))
        announcements.release(step)
    announcements.end(98, reported=40)
    assert told == [shared(step) for step in range(40, 99)]


def test_ranks_agree_on_what_is_left_to_do_at_their_step() -> None:
    stop = Unfinished(step=7, requests=frozenset({Request.STOP}), begun=5)
    done = Unfinished(step=7, validated=True, begun=5, whole=5)
    other = Unfinished(step=6, requests=frozenset({Request.CHECKPOINT}))
    said = [Greeting(host="h", port=1, left=left) for left in (stop, None, done, other)]
    heard = [from_json(Greeting, to_json(greeting)) for greeting in said]
    assert heard == said
    expected = Unfinished(step=7, requests=frozenset({Request.STOP}), validated=True, begun=5, whole=5)
    assert agree(heard, 7) == expected
    assert agree(heard, 8) is None


class Post:
    """A controller that accepts reports on command."""

    def __init__(self) -> None:
        self.sent: list[Report] = []
        self.arrived: set[int] = set()

    def send(self, report: Report) -> Any:
        self.sent.append(report)
        return self, len(self.sent) - 1


def looked_at(handles: Any) -> list[Any]:
    return [f"line {number}" if number in post.arrived else UNANSWERED for post, number in handles]


def test_a_new_controller_gets_what_no_other_took_in() -> None:
    old, new = Post(), Post()
    mail = ReportMail(old.send, looked_at)
    assert mail.log_sha256() is None
    for step in (1, 2, 3):
        mail.put(shared(step))
    old.arrived = {0}
    assert mail.log_sha256() == "line 0"
    mail.send_again(new.send)
    mail.put(shared(4))
    assert new.sent == [shared(2), shared(3), shared(4)]
    new.arrived = {0, 1, 2}
    assert mail.under_way() == []
    assert mail.log_sha256() == "line 2"
