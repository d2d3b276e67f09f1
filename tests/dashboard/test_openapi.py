"""The whole OpenAPI document against the service: no answer of 500 and above, none that is not documented."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serving import listening, live_job, settings_in, show, token

import dashboard.api.jobs_stream
import dashboard.service.guard
from dashboard.app import create_app
from dashboard.service.limits import RateLimit
from dashboard.service.settings import ServiceSettings

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServiceSettings:
    return settings_in(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def headers(settings: ServiceSettings) -> dict[str, str]:
    return {"Authorization": f"Bearer {token(settings)}"}


@pytest.fixture(scope="module")
def statuses() -> Iterator[Counter[int]]:
    """How often each status was answered."""
    seen: Counter[int] = Counter()
    yield seen
    assert seen[200] > 20


@pytest.fixture(scope="module")
def document(settings: ServiceSettings, headers: dict[str, str]) -> Iterator[Any]:
    """The document of a service of past runs and one live job, which has no controller, on a socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dashboard.service.guard, "RateLimit", lambda per_s, burst: RateLimit(1e6, 10**9))
        patch.setattr(dashboard.api.jobs_stream, "LONGEST_S", 0.1)
        app = create_app(settings)
        show(app, live_job())
        with listening(app) as address:
            yield schemathesis.openapi.from_url(f"{address}/openapi.json", headers=headers)


schema = schemathesis.pytest.from_fixture("document")


@schema.parametrize()
@hypothesis_settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_route_keeps_its_promise(case: Any, headers: dict[str, str], statuses: Counter[int]) -> None:
    answer = case.call(headers=headers)
    statuses[answer.status_code] += 1
    case.validate_response(answer, checks=CHECKS)
