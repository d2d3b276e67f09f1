"""Which cases of a product of parameters `make test` runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PRODUCT = """
import pytest

@pytest.mark.each_choice
@pytest.mark.parametrize("a", [0, 1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_it(a, b):
    pass
"""


def test_each_value_of_each_parameter_is_in_one_case_and_the_others_are_soaks(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(test_product=PRODUCT)
    root = Path(__file__).parents[1]
    pytester.makeini(
        f"[pytest]\npythonpath = {root} {root}/tests\ntimeout = 300\nmarkers =\n    soak\n    each_choice"
    )

    def collected(which: str) -> set[str]:
        found = pytester.runpytest_subprocess(
            "--collect-only", "-q", "-p", "no:xdist", "-m", which, "test_product.py"
        )
        return {line.partition("::")[2] for line in found.outlines if "::" in line}

    run, soaks = collected("not soak"), collected("soak")
    assert run | soaks == {f"test_it[{b}-{a}]" for a, b in product((0, 1, 2), "xy")}
    assert not run & soaks
    assert len(run) == 3, "as many as the longest of them has values"
    assert all(any(value in name for name in run) for value in ("x-", "y-", "-0", "-1", "-2"))
