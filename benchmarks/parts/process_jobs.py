"""Jobs whose ranks are plain processes, as the tests have them: the one place that knows where the tests keep them."""

from __future__ import annotations

import sys
from pathlib import Path

# The modules that the tests share import each other by their bare names, as pytest has them do.
sys.path.append(str(Path(__file__).parents[2] / "tests"))
sys.path.append(str(Path(__file__).parents[2] / "tests" / "orchestrator"))

from adapting_job import AdaptingJob
from made_profile import made_profile
from process_hosts import ElasticJob, Ran
from resting import Resting

__all__ = ["AdaptingJob", "ElasticJob", "Ran", "Resting", "made_profile"]
