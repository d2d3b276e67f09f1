"""What a client got wrong, in words without patterns: over REST and in the forms of pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError
from serving import live_job, settings_in, show, token

from dashboard.api.controls import BODIES
from dashboard.api.faults import DrillOrder
from dashboard.app import create_app
from dashboard.pages.controls import CONTROLS
from dashboard.pages.what_if_page import WhatIfForm
from dashboard.service.mistakes import ALLOWED, LONGEST, mistakes
from dashboard.service.problems import ProblemAnswer
from orchestrator.commands.apply import Apply
from orchestrator.commands.drain import Drain
from orchestrator.commands.freeze import Freeze
from orchestrator.commands.move import Move
from orchestrator.commands.scale import Scale


def said(model: type, body: object) -> str:
    with pytest.raises(ValidationError) as refused:
        BODIES.get(model, model).model_validate(body)  # type: ignore[attr-defined, call-overload]
    return mistakes(refused.value.errors())


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        (Move, {"layers": "x", "rank": 1}, 'layers is "x", and must be a layer such as 3, or a run of layers'),
        (Move, {"layers": "3"}, "rank is missing"),
        (Move, {"layers": "3", "rank": -1}, "rank is -1, and must be at least 0"),
        (Move, {"layers": "3", "rank": "one"}, 'rank is "one", and must be a whole number'),
        (Move, {"layers": "3", "rank": 1, "to": 2}, "there is no field to"),
        (Move, {"layers": "3", "rank": 1, "version": "new"}, 'version is "new", and must be a plan\'s version'),
        (Move, [], "the body is [], and must be an object"),
        (Freeze, {"r_max": 1.5}, "r_max is 1.5, and must be at most 1 or 'auto'"),
        (Freeze, {"r_max": "much"}, 'r_max is "much", and must be a number or \'auto\''),
        (Freeze, {}, "send one or more of method, r_max, least_update, alpha, prefix"),
        (Drain, {"node": ""}, 'node is "", and must be at least 1 character long'),
        (Drain, {"node": "n", "deadline_s": 0}, "deadline_s is 0, and must be more than 0"),
        (Apply, {"partition": []}, "partition is [], and must be at least 1 entry long"),
        (Apply, {"partition": [3, "x"]}, 'partition.1 is "x", and must be a whole number'),
        (Apply, {"partition": 3}, "partition is 3, and must be a list"),
        (DrillOrder, {"fault": {"kind": "no"}}, "fault.kind is \"no\", and must be one of 'kill', 'stop', 'slow',"),
        (DrillOrder, {"fault": {"kind": "oom", "after_s": float("inf")}}, "a number that is not infinite"),
        (WhatIfForm, {"cut": "half"}, 'cut is "half", and must be best, keep, or layers per stage such as 3+2+1+2'),
        (Scale, {"ranks": "9" * 10_000}, 'and must be a whole number'),
    ],
)  # fmt: skip
def test_each_mistake_names_the_field_its_value_and_what_is_right(
    model: type, body: object, words: str
) -> None:
    told = said(model, body)
    assert words in told
    assert "pattern" not in told
    assert len(told) < 100 + LONGEST + len(words)


def test_many_mistakes_are_counted_and_those_of_a_form_have_its_labels() -> None:
    told = said(Apply, {"partition": ["x"] * 9})
    assert told.count("must be") == 5
    assert told.endswith("; and 4 more")
    with pytest.raises(ProblemAnswer, match=r'^To rank is "far", and must be a whole number$'):
        CONTROLS["move"].parse({"layers": "3", "rank": "far"})


def test_no_answer_has_a_regular_expression(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    app = create_app(settings)
    show(app, live_job())
    headers = {"Authorization": f"Bearer {token(settings)}"}
    with TestClient(app, base_url="http://127.0.0.1:8270", headers=headers) as client:
        move = {"layers": "3", "rank": 1}
        answers = [
            client.get("/api/v1/jobs/no job"),
            client.get("/jobs/-x"),
            client.get("/jobs/gpt/controls/MOVE"),
            client.get("/api/v1/jobs/gpt/commands/two words"),
            client.get("/runs/gpt/what-if", params={"cut": "3++"}),
            client.get("/jobs/gpt/controls/move", params={"layers": "x", "rank": "1"}),
            client.post("/api/v1/jobs/gpt/move", json=move, headers={"If-Match": "newest"}),
            client.post("/api/v1/jobs/gpt/move", json=move, headers={"Idempotency-Key": "k" * 300}),
            client.post("/api/v1/jobs/gpt/move", content="{", headers={"Content-Type": "application/json"}),
        ]
        document = client.get("/openapi.json").text
    assert {each.status_code for each in answers} == {422}
    for answer in answers:
        assert "must be" in answer.text or "no JSON" in answer.text
        assert not re.search(r"pattern|\\d|\{1,|\[A-Z", answer.text)
    # Every pattern has its words.
    patterns = {
        json.loads(f'"{found}"') for found in re.findall(r'"pattern": ?"((?:[^"\\]|\\.)*)"', document)
    }
    assert len(patterns) > 3
    assert patterns <= ALLOWED.keys()
