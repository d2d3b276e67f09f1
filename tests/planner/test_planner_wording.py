"""Numbers with their nouns and units."""

import pytest

from planner.wording import link_rate, named_or_counted, seconds


@pytest.mark.parametrize(
    ("value_s", "said"),
    [
        (0.0, "0 ms"),
        (0.000183, "0.183 ms"),
        (0.0294, "29.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.834, "1.83 s"),
        (999.4, "999 s"),
        (999.6, "1,000 s"),
        (12345.6, "12,346 s"),
    ],
)
def test_seconds_have_three_digits(value_s: float, said: str) -> None:
    assert seconds(value_s) == said


@pytest.mark.parametrize(
    ("bytes_per_s", "said"),
    [
        (0.0, "0 MB/s"),
        (20_730_000.0, "20.7 MB/s"),
        (999.4e6, "999 MB/s"),
        (999.6e6, "1,000 MB/s"),
        (12.5e9, "12,500 MB/s"),
    ],
)
def test_rates_of_links_have_three_digits_and_no_exponent(bytes_per_s: float, said: str) -> None:
    assert link_rate(bytes_per_s) == said


def test_a_long_list_of_ranks_is_counted() -> None:
    assert named_or_counted("rank", (3,)) == "rank 3"
    assert named_or_counted("rank", range(1, 9)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8"
    assert named_or_counted("rank", range(9)) == "9 ranks"
