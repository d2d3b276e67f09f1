"""Ranks without Ray: processes of a forkserver.

`ranks.py` is the reference runner, which trains a whole job: for tests, GPU checks and benchmarks, and for `freshet
verify --rerun`, which computes steps of a run again.

Not here: Ranks as Ray actors (`workers/actor.py`).
"""
