"""Time to accuracy, computed by hand."""

import pytest

from planner.freeze.time_to_accuracy import (
    RunningUpdate,
    approximate_kappa,
    approximate_step_s,
    average_effective_update,
    kappa,
    time_to_accuracy_ratio,
    warning,
)


def test_kappa_and_its_approximation():
    """NOTES.md: P=4, M=8, F=I=W, r_max 0.8: eq. 50 gives 0.733, the program 23.6 of 33."""
    assert kappa(23.6, 33.0) == pytest.approx(0.71515, abs=1e-5)
    assert approximate_step_s(0.8, 33.0, 22.0) == pytest.approx(24.2)
    assert approximate_kappa(0.8, 33.0, 22.0) == pytest.approx(0.2 + 0.8 * 22 / 33)
    assert approximate_kappa(0.0, 33.0, 22.0) == 1
    with pytest.raises(ValueError, match="takes 0 s"):
        kappa(1.0, 0)


def test_the_average_over_the_horizon_weighs_steps_by_their_gradient_energy():
    """Not the mean over steps: an unfrozen start with large gradients counts more (definition D.8)."""
    assert average_effective_update([1.0, 0.5], [3.0, 1.0]) == 0.875
    assert average_effective_update([], []) == 1.0
    so_far = RunningUpdate()
    assert so_far.share == 1.0
    for share, energy in ((1.0, 3.0), (0.5, 1.0)):
        so_far.add(share, energy)
    assert so_far.share == 0.875
    with pytest.raises(ValueError, match="1 effective updates for the gradients of 0 steps"):
        average_effective_update([1.0], [])


def test_the_ratio_and_its_warning():
    assert time_to_accuracy_ratio(0.6, 0.8) == pytest.approx(0.75)
    assert time_to_accuracy_ratio(0.6, 0.0) == float("inf")
    assert warning(0.6, 0.8, "timelyfreeze") is None
    text = warning(0.8, 0.5, "timelyfreeze")
    assert text is not None
    assert "a step takes 0.80 of its time (kappa), but 0.50 of the gradient's energy" in text
    assert "1.60 times as long. Lower freeze.r_max" in text
    nothing = warning(0.8, 0.0, "timelyfreeze")
    assert nothing is not None
    assert (
        "0.00 of the gradient's energy reaches the weights, so the loss is expected to stay where it is"
        in nothing
    )
    assert warning(0.8, 0.8, "timelyfreeze") is None


def test_nothing_is_warned_of_where_nothing_is_frozen():
    for kappa_of_noise in (1.0, 1.003, 1.4):
        assert warning(kappa_of_noise, 1.0, "apf") is None
        assert warning(kappa_of_noise, 1.0 - 1e-15, "apf") is None, "a sum that rounds is all of it"


def test_rounding_does_not_make_freezing_cost_more():
    assert 0.1 + 0.2 > 0.3
    assert warning(0.1 + 0.2, 0.3, "timelyfreeze") is None
    assert warning(0.300001, 0.3, "timelyfreeze") is not None


@pytest.mark.parametrize(
    ("method", "control"),
    [
        ("timelyfreeze", "freeze.r_max"),
        ("timelyfreeze+apf", "freeze.r_max"),
        ("timelyfreeze+autofreeze", "freeze.r_max"),
        ("apf", "freeze.apf_threshold"),
        ("pipetransformer", "freeze.alpha"),
        ("autofreeze", "freeze.autofreeze_percentile"),
    ],
)
def test_the_advice_names_the_setting_of_the_method(method: str, control: str):
    text = warning(0.8, 0.5, method)
    assert text is not None
    assert text.endswith(f". Lower {control}, or set freeze.method to none")
