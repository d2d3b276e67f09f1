"""Client requests, checked against the running job: the move, size, plan or freezing that each one means.

Not here: carrying it out (`orchestrator/controller/reshaping.py`, `orchestrator/controller/freeze/freeze_control.py`).
"""
