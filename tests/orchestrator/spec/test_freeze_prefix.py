"""What a spec may say of the prefix, and when checks come."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.spec.freeze_prefix import (
    check_prefix,
    check_prefix_fits,
    lasting_prefix,
    settle_checks,
)
from workers.config import FreezeConfig
from workers.protocol.errors import JobError


def freeze(**keys: Any) -> FreezeConfig:
    return FreezeConfig.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"prefix": 2},
            r"freeze\.prefix is for freeze\.method = \"prefix\" or \"timelyfreeze\+prefix\", and the method is 'none'",
        ),
        (
            {"method": "pipetransformer", "schedule": [[1, 2]]},
            r"freeze\.schedule is for .* method is 'pipetransformer'",
        ),
        ({"method": "prefix"}, "takes either freeze.prefix.*none is given"),
        (
            {"method": "timelyfreeze+prefix"},
            r'method = "timelyfreeze\+prefix" takes either freeze.prefix.*none is given',
        ),
        (
            {"method": "prefix", "prefix": 2, "schedule": [[1, 2]]},
            "takes either freeze.prefix.*both are given",
        ),
        (
            {"method": "prefix", "schedule": [[30, 2], [20, 3]]},
            r"freeze\.schedule has steps \[30, 20\]: give them in ascending order",
        ),
        ({"method": "prefix", "schedule": [[30, 2], [30, 3]]}, r"has steps \[30, 30\]"),
    ],
)
def test_keys_of_the_prefix_that_do_not_go_together_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(JobError, match=why):
        check_prefix(freeze(**keys), table=False)


def test_a_users_table_does_not_go_with_layers_without_a_backward_pass() -> None:
    with pytest.raises(JobError, match=r"which a user's own table has: use a schedule by name"):
        check_prefix(freeze(method="prefix", prefix=2), table=True)
    check_prefix(freeze(method="timelyfreeze"), table=True)


@pytest.mark.parametrize(
    ("keys", "layers", "why"),
    [
        (
            {"method": "prefix", "prefix": 6},
            6,
            "freeze.prefix freezes 6 layers, and the model has 6: .* 5 at most",
        ),
        ({"method": "prefix", "schedule": [[1, 2], [5, 9]]}, 6, "freeze.schedule freezes 9 layers"),
        ({"method": "pipetransformer"}, 3, "the model has 3 layers: it takes at least 4"),
        ({"method": "timelyfreeze+pipetransformer"}, 3, r"'timelyfreeze\+pipetransformer' freezes layers"),
        ({"method": "timelyfreeze+prefix", "prefix": 6}, 6, "freeze.prefix freezes 6 layers"),
    ],
)
def test_the_last_layer_is_never_frozen(keys: dict[str, Any], layers: int, why: str) -> None:
    with pytest.raises(JobError, match=why):
        check_prefix_fits(freeze(**keys), layers)
    check_prefix_fits(freeze(**keys), 10)


@pytest.mark.parametrize("alpha", [0, 1, -0.5, 1.5])
def test_alpha_is_a_share_between_0_and_1(alpha: float) -> None:
    with pytest.raises(ValidationError, match="alpha"):
        freeze(method="pipetransformer", alpha=alpha)


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"method": "apf"}, 10),
        ({"method": "none"}, 10),
        ({"method": "apf", "check_every": "epoch"}, 77),
        ({"method": "pipetransformer"}, 77),
        ({"method": "pipetransformer", "check_every": "epoch"}, 77),
        ({"method": "pipetransformer", "check_every": 5}, 5),
        ({"method": "timelyfreeze+pipetransformer"}, 77),
    ],
)
def test_steps_between_checks_are_settled(keys: dict[str, Any], steps: int) -> None:
    assert settle_checks(freeze(**keys), epoch_steps=77).check_steps == steps


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"method": "prefix", "prefix": 3}, 3),
        ({"method": "timelyfreeze+prefix", "prefix": 3}, 3),
        ({"method": "prefix", "prefix": 3, "thaw": "rate"}, 0),
        ({"method": "prefix", "schedule": [[1, 3]]}, 0),
        ({"method": "pipetransformer"}, 0),
        ({}, 0),
    ],
)
def test_a_plan_counts_on_a_prefix_that_lasts(keys: dict[str, Any], layers: int) -> None:
    assert lasting_prefix(freeze(**keys)) == layers
