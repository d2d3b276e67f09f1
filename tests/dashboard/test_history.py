"""What the REST interface tells of a step: the same values as the command line, or the prediction's spans."""

from __future__ import annotations

from pathlib import Path

from fastapi.testclient import TestClient
from page_runs import page_settings, profile
from serving import token
from synthetic_run import freezing_records

from dashboard.app import create_app
from dashboard.service.access import Role
from orchestrator.history.job_view import fold
from orchestrator.report.step.step_timeline import measured_step


def test_a_measured_step_and_its_prediction(tmp_path: Path) -> None:
    settings = page_settings(tmp_path)
    found = measured_step(fold(freezing_records()), profile(), 200)
    assert found is not None
    assert found.predicted is not None
    headers = {"Authorization": f"Bearer {token(settings, Role.READ)}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8270", headers=headers) as client:
        path, values = "/api/v1/runs/frozen/timeline", found.values()
        assert client.get(path, params={"step": 200}).json() == values
        simulated = client.get(path, params={"step": 200, "source": "simulated"}).json()
        assert (simulated["source"], simulated["step_s"]) == ("simulated", found.predicted.step_s)
        assert simulated["spans"] == [
            {"rank": rank, "action": str(span.action), "start_s": span.start_s, "end_s": span.end_s}
            for rank, spans in enumerate(found.predicted.timeline)
            for span in spans
        ]
        same = ("step", "title", "steps")
        assert [simulated[name] for name in same] == [values[name] for name in same]
        missing = client.get(path, params={"step": 3})
        assert (missing.status_code, missing.json()["detail"]) == (404, "no timeline of step 3 is kept")
        unknown = client.get(path, params={"step": 25, "source": "simulated"})
        assert (unknown.status_code, "step 25 has no prediction" in unknown.text) == (404, True)
