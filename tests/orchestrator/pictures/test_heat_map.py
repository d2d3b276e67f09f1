from orchestrator.pictures.heat_map import heat_map, heat_map_of

RATIOS = [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.333), (1, 1, 0.8)]


def test_text_has_a_percent_per_cell_and_the_mean_of_each_stage():
    assert heat_map(RATIOS) == (
        "          0   1    mean\n"
        "stage 0 100   0  50.0 %\n"
        "stage 1  33  80  56.6 %"
    )  # fmt: skip


def test_text_turns_to_shades_where_percents_do_not_fit():
    ratios = [(stage, m, m / 40) for stage in range(2) for m in range(41)]
    lines = heat_map(ratios, width=80).splitlines()
    assert lines[0].split() == ["0", "to", "40", "mean"]
    assert lines[1].startswith("stage 0 ·" + "░" * 13 + "▒" * 13 + "▓" * 13 + "█")
    assert lines[1].endswith("50.0 %")
    assert lines[-1] == "· nothing frozen, █ everything"


def test_a_stage_that_lacks_a_microbatch_has_a_blank_there():
    assert heat_map([(0, 0, 0.5), (0, 2, 0.7)]).splitlines()[1] == "stage 0  50      70  60.0 %"


def test_nothing_to_show():
    assert heat_map([]) == ""
    assert heat_map_of([], "none").rows == ()


def test_a_page_has_a_cell_per_action_darker_where_more_is_frozen():
    heat = heat_map_of([*RATIOS, (1, 2, 0.5)], "a < b")
    assert heat.microbatches == 3
    assert [(stage, round(mean, 3)) for stage, _, mean in heat.rows] == [(0, 0.5), (1, 0.544)]
    first, second = ([cell and (cell.percent, cell.level) for cell in cells] for _, cells, _ in heat.rows)
    assert first == [("100", 10), ("0", 0), None]
    assert second == [("33", 3), ("80", 8), ("50", 5)]
    assert heat.written


def test_a_wide_map_leaves_the_values_to_the_tooltips():
    assert not heat_map_of([(0, m, 0.123) for m in range(128)], "wide").written
