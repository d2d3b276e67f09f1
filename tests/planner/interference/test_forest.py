"""The forest as arrays predicts what the library that fitted it predicts, and what is altered is refused."""

from __future__ import annotations

import pickle
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planner.features import NAMES, row
from planner.interference import fitting, model_file
from planner.interference.dataset import ALONE, DatasetError, Windows, measured_ratios
from planner.interference.fitting import TREES, Fit, fit
from planner.interference.forest import Forest
from planner.interference.judgement import CANDIDATES, Judgement, Score
from planner.interference.model_file import (
    ModelFileError,
    StoredForest,
    StoredWindows,
    forest_from,
    load_forest,
    load_windows,
    save_forest,
    save_windows,
)

KINDS = ("compute", "memory", "disk")


def made(count: int = 240, seed: int = 0) -> Windows:
    """Windows whose ratio follows the CPU that others take, in a bent line, with noise, and some values missing."""
    rng = np.random.default_rng(seed)
    rows, ratios, kinds, levels = [], [], [], []
    for number in range(count):
        kind = (ALONE, *KINDS)[number % 4]
        others = 0.0 if kind == ALONE else float(rng.uniform(0.2, 2.0))
        values = {
            "cpu_others": others,
            "cpu_busy": min(1.0, 0.5 + others / 4),
            "work": float(rng.uniform(0.01, 0.1)),
            "memory_free": float(rng.uniform(0.2, 0.9)),
        }
        if rng.random() < 0.2:
            del values["cpu_busy"]
        rows.append(row(values))
        ratios.append((1 + max(0.0, others - 0.5) * 1.5) * float(rng.normal(1, 0.02)))
        kinds.append(kind)
        levels.append("" if kind == ALONE else "light" if others < 1 else "heavy")
    return Windows(rows=np.array(rows), ratios=np.array(ratios), kinds=tuple(kinds), levels=tuple(levels))


@pytest.fixture(scope="module")
def fitted() -> Fit:
    return fit(made(), warnings=["it rained"])


def test_the_arrays_predict_what_the_library_predicts() -> None:
    windows = made()
    library = fitting._regressor(windows, seed=0)
    forest = fitting._arrays(library)
    assert forest.trees == TREES
    rows = made(count=400, seed=1).rows
    np.testing.assert_allclose(forest.predict(rows), library.predict(rows), rtol=1e-12)


def test_a_fit_is_judged_by_neighbours_that_it_has_not_seen(fitted: Fit) -> None:
    found = fitted.judgement
    forest, linear, network, measured = found.scores
    assert [score.model for score in found.scores] == ["forest", "linear", "network", "measured"]
    assert found.forest == forest
    assert forest.r2 > 0.9
    assert forest.median_error < 0.1
    assert forest.median_error < linear.median_error
    assert [kind for kind, _ in forest.by_kind] == sorted(KINDS)
    assert found.importances[0][0] == "cpu_others"
    assert sum(count for *_, count in found.calibration) == 180
    assert found.latency_s > 0
    assert (found.windows, found.warnings) == (240, ("it rained",))
    assert len(network.by_kind) == len(measured.by_kind) == 3
    assert CANDIDATES == 100


def test_a_slowdown_that_no_window_had_follows_the_measured_one() -> None:
    """Stages of one kind of neighbour are ten times as slow as those of any other: no tree has such a leaf."""
    windows = made()
    kinds = np.array(windows.kinds)
    rows = windows.rows.copy()
    ratios = np.where(kinds == "disk", 10 * windows.ratios, windows.ratios)
    rows[:, NAMES.index("measured_ratio")] = ratios * np.random.default_rng(2).normal(1, 0.02, len(windows))
    found = fit(replace(windows, rows=rows, ratios=ratios)).judgement
    errors = {score.model: dict(score.by_kind)["disk"] for score in found.scores}
    assert errors["forest"] < 0.05
    assert errors["measured"] < 0.05


def test_what_was_not_measured_counts_as_one() -> None:
    rows = np.full((4, len(NAMES)), np.nan)
    rows[:, NAMES.index("measured_ratio")] = [2.5, np.nan, np.inf, -1.0]
    assert measured_ratios(rows).tolist() == [2.5, 1.0, 1.0, 1.0]


def test_the_rivals_do_not_go_beyond_what_they_were_fitted_to() -> None:
    windows = made()
    rows = np.array([row({"cpu_others": others}) for others in (2.0, 2.5, 1e9)])
    for fitter in (fitting._linear, fitting._network):
        predicted = fitter(windows, 0).predict(rows)
        assert predicted[1] == predicted[2] == pytest.approx(predicted[0], rel=0.05)


def test_the_same_windows_give_the_same_forest(fitted: Fit, forest: Forest) -> None:
    one, other = fitted.forest, forest
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in model_file._ARRAYS)


def test_windows_to_which_nothing_can_be_fitted_are_refused() -> None:
    windows = made()
    kinds = np.array(windows.kinds)
    with pytest.raises(DatasetError, match=r"two kinds of neighbours are needed.*there: compute"):
        fit(windows.only((kinds == ALONE) | (kinds == "compute")))
    with pytest.raises(DatasetError, match="there are no windows"):
        fit(windows.only(np.zeros(len(windows), dtype=bool)))
    with pytest.raises(DatasetError, match="not a number above 0"):
        fit(replace(windows, ratios=np.where(kinds == ALONE, np.nan, windows.ratios)))
    with pytest.raises(DatasetError, match="features of version 0"):
        fit(replace(windows, version=0))


def stored(forest: Forest) -> StoredForest:
    judgement = Judgement(
        scores=(
            Score(model="forest", r2=0.9, median_error=0.05, by_kind=(("disk", 0.04), ("memory", 0.06))),
        ),
        importances=(("cpu_others", 0.75),),
        calibration=((1.5, 1.6, 3),),
        latency_s=0.004,
        windows=240,
        warnings=("it rained",),
    )
    return StoredForest(forest=forest, machine="a test", made="2026-01-01", judgement=judgement)


@pytest.fixture(scope="module")
def forest() -> Forest:
    return fitting._arrays(fitting._regressor(made(), 0))


def test_a_forest_comes_back_from_its_file(tmp_path: Path, forest: Forest) -> None:
    path = tmp_path / "models" / "forest.safetensors"
    save_forest(path, stored(forest))
    loaded = load_forest(path)
    assert loaded == replace(stored(forest), forest=loaded.forest)
    rows = made(count=50, seed=2).rows
    assert np.array_equal(loaded.forest.predict(rows), forest.predict(rows))
    assert [file.name for file in path.parent.iterdir()] == ["forest.safetensors"]


def test_windows_come_back_from_their_file(tmp_path: Path) -> None:
    windows = made(count=12)
    save_windows(tmp_path / "w", StoredWindows(windows=windows, machine="a test", warnings=("it rained",)))
    found = load_windows(tmp_path / "w")
    loaded = found.windows
    assert np.array_equal(loaded.rows, windows.rows, equal_nan=True)
    assert (loaded.kinds, loaded.levels) == (windows.kinds, windows.levels)
    assert (found.machine, found.warnings) == ("a test", ("it rained",))
    with pytest.raises(ModelFileError, match="is not what `freshet interference fit` writes"):
        load_forest(tmp_path / "w")


def test_an_altered_forest_is_refused(tmp_path: Path, forest: Forest) -> None:
    path = tmp_path / "forest"
    save_forest(path, stored(forest))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelFileError, match="was altered or damaged"):
        load_forest(path)


def test_a_forest_of_other_features_is_refused(
    tmp_path: Path, forest: Forest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "forest"
    monkeypatch.setattr(model_file, "VERSION", 0)
    save_forest(path, stored(forest))
    monkeypatch.undo()
    with pytest.raises(ModelFileError, match="features of version 0, this program those of 2"):
        load_forest(path)


def test_what_is_no_model_is_refused_and_never_unpickled(tmp_path: Path, forest: Forest) -> None:
    path = tmp_path / "forest"
    with pytest.raises(ModelFileError, match="there is no "):
        load_forest(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelFileError, match="is no safetensors file"):
        load_forest(path)
    save_file({"value": np.zeros(1)}, path)
    with pytest.raises(ModelFileError, match="is not what"):
        load_forest(path)
    assert load_file(path)


TREE = {
    "roots": np.array([0], dtype=np.int32),
    "left": np.array([1, -1, -1], dtype=np.int32),
    "right": np.array([2, -1, -1], dtype=np.int32),
    "feature": np.array([0, 0, 0], dtype=np.int32),
    "threshold": np.array([0.5, 0.0, 0.0]),
    "missing_left": np.array([True, False, False]),
    "value": np.array([0.0, 1.0, 2.0]),
}


@pytest.mark.parametrize(
    ("name", "array", "said"),
    [
        (
            "left",
            TREE["left"].astype(np.float64),
            r"left is float64 of shape \(3,\); expected int32 of 1 dim",
        ),
        ("roots", TREE["roots"].astype(np.int64), "roots is int64 of shape"),
        ("value", TREE["value"][:, None], r"value is float64 of shape \(3, 1\); expected float64 of 1 dim"),
        ("threshold", TREE["threshold"].astype(np.int32), "threshold is int32"),
        ("missing_left", TREE["missing_left"].astype(np.int8), "missing_left is int8"),
        ("feature", TREE["feature"][None], r"feature is int32 of shape \(1, 3\)"),
        ("value", None, "it lacks the array value"),
    ],
)
def test_a_forest_with_arrays_of_another_type_or_shape_is_refused(
    name: str, array: np.ndarray | None, said: str
) -> None:
    arrays = {**TREE, name: array}
    kept = {each: values for each, values in arrays.items() if values is not None}
    judgement = asdict(stored(Forest(**TREE, columns=len(NAMES))).judgement)
    told = {"machine": "a test", "device": "cpu", "made": "2026-01-01", "judgement": judgement}
    content = model_file._content(model_file.FORESTS, kept, told)
    with pytest.raises(ModelFileError, match=rf"^a file holds no forest: .*{said}.*; make another one with"):
        forest_from(content, "a file")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": 3}, "its header's machine: Input should be a valid string"),
        ({"device": "tpu"}, "its header's device"),
        ({"made": None}, "its header's made"),
        ({"judgement": {}}, "its header's judgement.scores: Field required"),
        ({"judgement": 1}, "its header's judgement"),
    ],
)
def test_a_forest_with_another_header_is_refused(change: dict[str, object], said: str) -> None:
    judgement = asdict(stored(Forest(**TREE, columns=len(NAMES))).judgement)
    told = {"machine": "a test", "device": "cpu", "made": "2026-01-01", "judgement": judgement}
    assert forest_from(model_file._content(model_file.FORESTS, TREE, told), "a file").made == "2026-01-01"
    content = model_file._content(model_file.FORESTS, TREE, {**told, **change})
    with pytest.raises(ModelFileError, match=said):
        forest_from(content, "a file")


def test_windows_with_other_arrays_or_names_are_refused(tmp_path: Path) -> None:
    windows = made(count=4)
    told = {"machine": "a test", "warnings": [], "kinds": windows.kinds, "levels": windows.levels}
    whole = {"rows": windows.rows, "ratios": windows.ratios}

    def said(arrays: dict[str, np.ndarray], told: dict[str, object]) -> str:
        (tmp_path / "w").write_bytes(model_file._content(model_file.WINDOWS, arrays, told))
        with pytest.raises(ModelFileError, match="holds no windows") as refused:
            load_windows(tmp_path / "w")
        return str(refused.value)

    assert "rows is float32" in said({**whole, "rows": windows.rows.astype(np.float32)}, told)
    assert "ratios is float64 of shape (4, 1)" in said({**whole, "ratios": windows.ratios[:, None]}, told)
    assert "its header's kinds" in said(whole, {**told, "kinds": "memo"})
    assert "its header's levels.0" in said(whole, {**told, "levels": [1, 2, 3, 4]})
    assert "expected one ratio, kind and level per window" in said(whole, {**told, "kinds": ["alone"]})


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        raise_ = exec
        return raise_, ("raise SystemError('unpickled')",)


@pytest.mark.parametrize(
    "change",
    [
        {"left": np.array([0, -1, -1], dtype=np.int32)},
        {"feature": np.array([len(NAMES), 0, 0], dtype=np.int32)},
        {"roots": np.array([3], dtype=np.int32)},
        {"value": np.array([0.0, np.nan, 1.0])},
        {"right": np.array([2, -1], dtype=np.int32)},
    ],
    ids=["a circle", "no such feature", "no such root", "no value", "another length"],
)
def test_arrays_that_are_no_forest_are_refused(change: dict[str, np.ndarray]) -> None:
    forest = Forest(**TREE, columns=len(NAMES))
    rows = np.full((3, len(NAMES)), np.nan)
    rows[:, 0] = [0.5, 0.6, np.nan]
    assert forest.predict(rows).tolist() == [1.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="no forest"):
        Forest(**{**TREE, **change}, columns=len(NAMES))
