"""The cells of a sweep: combinations, names, and what is refused."""

import pytest

from orchestrator.sweep.grid import cells_of
from workers.protocol.errors import JobError


def test_every_combination_is_a_cell_and_the_seeds_of_one_come_together() -> None:
    cells = cells_of(["freeze.r_max=0.2,0.5", "freeze.method=apf, timelyfreeze"], seeds=2)
    assert [cell.overrides for cell in cells[:3]] == [
        ("freeze.r_max=0.2", "freeze.method=apf", "job.seed=0"),
        ("freeze.r_max=0.2", "freeze.method=apf", "job.seed=1"),
        ("freeze.r_max=0.2", "freeze.method=timelyfreeze", "job.seed=0"),
    ]
    assert len(cells) == 8
    assert cells[0].name == "r_max=0.2_method=apf_seed=0"
    assert [cell.seed for cell in cells_of(["job.seed=3,5"])] == [None, None]


def test_a_list_is_one_value() -> None:
    cells = cells_of(["freeze.schedule=[[1, 2], [5, 0]],[]", 'model.family="gpt","llama"'])
    assert [cell.settings[0][1] for cell in cells] == ["[[1, 2], [5, 0]]"] * 2 + ["[]"] * 2
    assert len({cell.name for cell in cells}) == 4
    assert all("/" not in cell.name and " " not in cell.name for cell in cells)


@pytest.mark.parametrize(
    ("grid", "seeds", "why"),
    [
        ([], None, "a sweep needs a --grid"),
        (["freeze.r_max"], None, "give a key and its values"),
        (["freeze.r_max="], None, "give a key and its values"),
        (["r_max=1"], None, "r_max"),
        (["freeze.r_max=0.2,0.2"], None, "a value is there twice"),
        (["freeze.r_max=0.2", "freeze.r_max=0.5"], None, "names a key twice"),
        (["job.seed=1,2"], 2, "both say the seeds"),
        (["data.path=a b,a-b"], None, "two cells of the grid would have the folder"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: list[str], seeds: int | None, why: str) -> None:
    with pytest.raises(JobError, match=why):
        cells_of(grid, seeds)
