"""A page about an interference model: how good it is, beside its rivals, and what it goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.pictures.charts import Chart, Series
from orchestrator.quantities import percent, seconds, significant
from orchestrator.report.assets import render_page
from orchestrator.report.parts import Column, ReportNote, Table, Tile, tile
from planner.features import FEATURES, VERSION
from planner.interference.judgement import CANDIDATES, Judgement
from planner.interference.model_file import StoredForest

HOW = (
    "Each kind of neighbour is left out once: models are fitted to the windows alone and beside all other kinds, and"
    " predict the windows beside this one. A slowdown is the time of a stage over its time alone; an error is"
    " |predicted / measured - 1|. Each window is predicted from what was sampled and measured in an earlier window"
    " beside the same neighbour, most often of another stage."
)
NAMES = {
    "forest": "random forest",
    "linear": "linear regression",
    "network": "neural network",
    "measured": "last measured ratio",
}


@dataclass(frozen=True, kw_only=True)
class ModelPage:
    """The content of the page."""

    title: str
    summary: str
    notes: tuple[ReportNote, ...]
    tiles: tuple[Tile, ...]
    models: Table
    kinds: Table
    how: str
    calibration: Chart
    importances: Table


def model_page(stored: StoredForest) -> ModelPage:
    """The content of the page about `stored`."""
    judgement = stored.judgement
    forest = judgement.forest
    return ModelPage(
        title=stored.machine,
        summary=f"{stored.forest.trees} trees · {judgement.windows:,} windows · {len(FEATURES)} features,"
        f" version {VERSION} · device {stored.device} · made on {stored.made}",
        notes=tuple(
            ReportNote("warn", "Warning", f"While the windows were measured: {text}.")
            for text in judgement.warnings
        ),
        tiles=(
            tile("Median error", percent(forest.median_error), "neighbours never seen"),
            tile("R²", f"{forest.r2:.2f}", "neighbours never seen"),
            tile(f"{CANDIDATES} predictions", seconds(judgement.latency_s), "median"),
        ),
        models=_models(judgement),
        kinds=_kinds(judgement),
        how=HOW,
        calibration=_calibration(judgement),
        importances=_importances(judgement),
    )


def write_model_page(stored: StoredForest, destination: Path) -> Path:
    """Write the page about `stored` to `destination`, and return that.

    Raises:
        OSError: it cannot be written.
    """
    destination.write_text(render(model_page(stored)), encoding="utf-8")
    return destination


def render(page: ModelPage) -> str:
    """The page as HTML."""
    return render_page("model.html.j2", {"page": page}, charts=True)


def _models(judgement: Judgement) -> Table:
    return Table(
        label="The forest and its rivals",
        columns=(Column("Model"), Column("Median error", "number"), Column("R²", "number")),
        rows=tuple(
            (NAMES.get(score.model, score.model), percent(score.median_error), f"{score.r2:.2f}")
            for score in judgement.scores
        ),
    )


def _kinds(judgement: Judgement) -> Table:
    """A row per neighbour, a column per model."""
    by_model = [dict(score.by_kind) for score in judgement.scores]
    return Table(
        label="Median error by the kind of neighbour that was left out",
        columns=(
            Column("Neighbour left out"),
            *(Column(NAMES.get(score.model, score.model), "number") for score in judgement.scores),
        ),
        rows=tuple(
            (kind, *(percent(errors[kind]) for errors in by_model)) for kind, _ in judgement.forest.by_kind
        ),
    )


def _calibration(judgement: Judgement) -> Chart:
    points = sorted((predicted, measured) for predicted, measured, _ in judgement.calibration)
    ends = (points[0][0], points[-1][0])
    return Chart(
        title="Calibration",
        unit="measured slowdown",
        series=(
            Series(name="fifths of the predictions", points=tuple(points), dots=True),
            Series(name="exact", points=tuple((end, end) for end in dict.fromkeys(ends))),
        ),
        format=significant,
        from_zero=True,
        axis="predicted slowdown",
        description="Calibration: "
        + "; ".join(f"predicted {significant(x)}, measured {significant(y)}" for x, y in points)
        + ".",
    )


def _importances(judgement: Judgement) -> Table:
    # The names of other features are marked as code, which a page's cell does not show.
    meanings = {feature.name: feature.meaning.replace("`", "") for feature in FEATURES}
    return Table(
        label="What the forest goes by",
        columns=(Column("Feature"), Column("Importance", "number"), Column("Meaning", "text")),
        rows=tuple((name, percent(share), meanings.get(name, "")) for name, share in judgement.importances),
    )
