"""Numbers with their nouns and units."""

import pytest

from planner.wording import seconds


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
