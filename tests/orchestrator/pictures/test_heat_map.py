from xml.etree import ElementTree

import pytest

from orchestrator.pictures.heat_map import heat_map, heat_map_svg

SVG = "{http://www.w3.org/2000/svg}"
RATIOS = [(0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.333), (1, 1, 0.8)]


def cells(picture: str) -> dict[str, str]:
    """Tooltip -> colour."""
    root = ElementTree.fromstring(picture)
    return {
        title.text or "": box.get("fill", "")
        for box in root.iter(f"{SVG}rect")
        if (title := box.find(f"{SVG}title")) is not None
    }


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


@pytest.mark.parametrize("draw", [heat_map, heat_map_svg])
def test_nothing_to_show(draw: object):
    assert callable(draw)
    text = draw([])
    assert text == "" or ElementTree.fromstring(text).tag == f"{SVG}svg"


def test_svg_has_a_cell_per_action_darker_where_more_is_frozen():
    found = cells(heat_map_svg(RATIOS, "a < b"))
    assert list(found) == [
        "stage 0, microbatch 0: 100.0 % frozen",
        "stage 0, microbatch 1: 0.0 % frozen",
        "stage 1, microbatch 0: 33.3 % frozen",
        "stage 1, microbatch 1: 80.0 % frozen",
    ]
    reds = [int(colour[1:3], 16) for colour in found.values()]
    assert reds[0] < reds[3] < reds[2] < reds[1]


def test_svg_writes_the_values_and_the_means():
    texts = [text.text for text in ElementTree.fromstring(heat_map_svg(RATIOS, "a < b")).iter(f"{SVG}text")]
    for expected in ("a < b", "stage 1", "100", "33", "50.0 %", "mean", "100 % frozen"):
        assert expected in texts


def test_a_wide_svg_leaves_the_values_to_the_tooltips():
    picture = heat_map_svg([(0, m, 0.123) for m in range(128)])
    root = ElementTree.fromstring(picture)
    assert len(cells(picture)) == 128
    assert "12" not in [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "weak"]
    assert float(root.get("width", "")) < 1400
