"""Which connections are kept, and which lines of the log. Pure."""

from __future__ import annotations

import logging

import pytest

from dashboard.service.connections import Admission, Limits, OpenConnections, network_of
from dashboard.service.http_connection import MOST_HEADERS, refused_head
from dashboard.service.limits import FewOfAKind

LIMITS = Limits(most=8, most_each=6, strangers=5, strangers_each=3)


def connected(*addresses: str) -> OpenConnections:
    found = OpenConnections(LIMITS)
    for number, address in enumerate(addresses):
        assert not found.admit(number, address).refused
    return found


def test_the_stranger_that_has_waited_longest_makes_room() -> None:
    found = connected("a", "a", "a")
    assert found.admit(3, "a") == Admission(closes=0)
    found.serve(1)  # it has sent its request
    assert found.admit(4, "a") == Admission()
    assert found.admit(5, "a") == Admission(closes=2)
    found.wait(1, known=False)  # and was no one that is known
    assert found.admit(6, "a") == Admission(closes=3)
    assert len(found) == 3 + 1


def test_one_address_costs_another_nothing() -> None:
    found = connected("a", "a", "a")
    assert found.admit(3, "b") == Admission()


def test_whoever_has_shown_a_token_makes_no_room() -> None:
    found = connected("a", "a", "a")
    for number in range(3):
        found.serve(number)
        found.wait(number, known=True)
    for number in (3, 4, 5):
        assert found.admit(number, "a") == Admission()
    assert found.admit(6, "a") == Admission(closes=3)
    for number in (4, 5, 6):
        found.serve(number)
    assert found.admit(7, "a").refused == "6 connections of a are open"
    found.leave(0)
    assert found.admit(8, "a") == Admission()


def test_many_addresses_have_a_limit_together() -> None:
    found = connected("a", "b", "c", "d", "e")
    assert found.admit(5, "f") == Admission(closes=0)
    for number in range(1, 6):
        found.serve(number)
    for number, address in ((6, "g"), (7, "h"), (8, "i")):
        assert found.admit(number, address) == Admission()
        found.serve(number)
    assert found.admit(9, "j").refused == "8 connections are open"


def test_nothing_is_kept_of_what_has_left() -> None:
    found = connected("a", "b", "a")
    for number in (2, 0, 1, 1, 7):
        found.serve(number)
        found.wait(number, known=False)
        found.leave(number)
        found.wait(number, known=False)
    assert not any((found._addresses, found._each, found._strangers, found._strangers_each))


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("::1", "::1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:3", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_sender_has_one_network(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_head_is_refused_as_soon_as_it_is_too_much() -> None:
    begun = b"GET / HTTP/1.1\r\n"
    assert refused_head(begun + b"A: 1\r\n" * (MOST_HEADERS - 1)) is None
    problem = refused_head(begun + b"A: 1\r\n" * MOST_HEADERS)
    assert problem is not None
    assert problem.status == 431
    # What follows a head is no header.
    assert refused_head(begun + b"A: 1\r\n\r\n" + b"x\n" * 1_000 + b"Content-Length: 1\n") is None
    assert refused_head(begun + b"Transfer-Encoding: chunked\n\nContent-Length: 1\n") is None


def test_lines_of_one_kind_are_few_and_say_how_many_there_were() -> None:
    few, now_s = FewOfAKind(per_s=0.1, burst=3), 100.0

    def told(line: int, number: int) -> str | None:
        record = logging.LogRecord("x", logging.WARNING, "file.py", line, "number %d", (number,), None)
        record.created = now_s
        return record.getMessage() if few.filter(record) else None

    assert [told(1, n) for n in range(5)] == ["number 0", "number 1", "number 2", None, None]
    assert told(2, 7) == "number 7"
    now_s = 111.0
    assert told(1, 9) == "number 9 (2 more lines of this kind were left out)"
    now_s = 122.0
    assert told(1, 10) == "number 10"
