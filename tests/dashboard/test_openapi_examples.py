"""The OpenAPI document for its readers: every body and answer has an example that is valid and like the real thing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import TypeAdapter
from serving import settings_in
from synthetic_run import records

from dashboard.api import examples
from dashboard.api.faults import DrillOrder, FaultOrder, Kind, Phase
from dashboard.api.models import Summary
from dashboard.app import create_app
from orchestrator.analysis.job_summary import JobSummary
from orchestrator.events.types import Record
from orchestrator.history.job_view import fold
from orchestrator.telemetry.metrics import STATES
from planner.plan import Plan
from planner.profile import DeviceProfile, LayerProfile
from planner.search.alternatives import Alternative
from workers.config import FreezeConfig
from workers.fault_injection import drill, fault, kinds

Json = dict[str, Any]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Json:
    return create_app(settings_in(tmp_path_factory.mktemp("service"))).openapi()


def contents(document: Json) -> Iterator[tuple[str, Json]]:
    """(where, content) of every body and every answer that is no error."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method.upper()} {path}"
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                yield f"{where}, body, {kind}", content
            for status, answer in operation["responses"].items():
                if status.startswith("2"):
                    assert answer["content"], where
                    for kind, content in answer["content"].items():
                        yield f"{where}, {status}, {kind}", content


def examples_of(document: Json, content: Json) -> list[Any]:
    """The examples of a body or an answer, or of the model that its schema names."""
    if "example" in content:
        return [content["example"]]
    schema = content.get("schema", {})
    found = [*schema.get("examples", ())]
    for part in (schema, *schema.get("anyOf", ())):
        if "$ref" in part:
            name = part["$ref"].rpartition("/")[2]
            found += document["components"]["schemas"][name].get("examples", ())
    return found


def test_every_body_and_answer_has_an_example(document: Json) -> None:
    found = {where: examples_of(document, content) for where, content in contents(document)}
    assert len(found) > 40
    assert [where for where, given in found.items() if not given] == []


def test_every_example_is_valid(document: Json) -> None:
    for where, content in contents(document):
        # Its references begin at the document.
        schema = content.get("schema", {}) | {"components": document["components"]}
        for value in examples_of(document, content):
            try:
                jsonschema.validate(value, schema)
            except jsonschema.ValidationError as error:
                pytest.fail(f"{where}: {error.message}")


def test_examples_name_what_there_is() -> None:
    """Those whose schema leaves open what is in them."""
    view = json.loads(fold(records(steps=5)).to_json())[0]
    assert examples.VIEW[0].keys() <= view.keys()
    assert examples.PLAN.keys() == {field.name for field in dataclasses.fields(Plan)}
    assert examples.ALTERNATIVE.keys() == {field.name for field in dataclasses.fields(Alternative)}
    for line in (*examples.EVENTS["events"], json.loads(examples.STREAM.split("data: ")[1])):
        assert json.loads(Record.from_json(json.dumps(line)).to_json()) == line
    (layer,), (device,) = examples.PROFILE["model"]["layers"], examples.PROFILE["cluster"]["devices"]
    assert layer.keys() <= {field.name for field in dataclasses.fields(LayerProfile)}
    assert device.keys() <= {field.name for field in dataclasses.fields(DeviceProfile)}


def test_the_example_of_a_freeze_request_is_a_method(document: Json) -> None:
    (asked,) = document["components"]["schemas"]["Freeze"]["examples"]
    assert FreezeConfig(**asked).timely


def test_a_body_that_is_slow_to_arrive_has_a_documented_answer(document: Json) -> None:
    for path, operations in document["paths"].items():
        assert "post" not in operations or "408" in operations["post"]["responses"], path


def test_the_name_of_a_job_is_described_everywhere(document: Json) -> None:
    names = [
        parameter
        for operations in document["paths"].values()
        for operation in operations.values()
        for parameter in operation.get("parameters", ())
        if parameter["name"] == "job"
    ]
    assert len(names) > 15
    assert {each["description"] for each in names} == {"The job's name."}
    assert {each["schema"]["pattern"] for each in names} == {"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"}


def test_a_fault_has_the_fields_of_the_ranks_own() -> None:
    assert set(get_args(Kind)) == {*kinds.FaultKind}
    assert set(get_args(Phase)) == {*kinds.FaultPhase}
    for ours, theirs in ((DrillOrder, drill.Drill), (FaultOrder, fault.Fault)):
        defaults = {name: field.default for name, field in theirs.model_fields.items()}
        assert {name: field.default for name, field in ours.model_fields.items()} == defaults
    given = {"rank": 1, "fault": {"kind": "slow", "factor": 2.0, "steps": 10, "phase": "forward"}}
    sent = DrillOrder.model_validate(given).model_dump(mode="json", exclude_defaults=True)
    assert sent == given == drill.Drill.from_json(given).to_json()


def test_a_summary_has_the_fields_of_the_client_s() -> None:
    def types(schema: Json) -> Json:
        """Field -> its type, without what is said of it."""
        return {
            name: {key: value for key, value in field.items() if key not in ("description", "title")}
            for name, field in schema["properties"].items()
        }

    theirs = TypeAdapter(JobSummary).json_schema()
    assert types(Summary.model_json_schema()) == types(theirs)


def test_every_state_of_a_job_is_documented(document: Json) -> None:
    text = document["components"]["schemas"]["Summary"]["properties"]["state"]["description"]
    for state in (*STATES, "submitting", "refused", "lost"):
        assert f"`{state}`" in text
