"""What tests of the engine share."""

import pytest

from workers.layer_check.check import LayerCheck


@pytest.fixture
def uncompared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer is compared with plain autograd: the test counts or watches what layers do in steps."""
    monkeypatch.setattr(LayerCheck, "falls_due", lambda *_: False)
    monkeypatch.setattr(LayerCheck, "compare", lambda *_: None)
    monkeypatch.setattr(LayerCheck, "compare_loss", lambda *_: None)
