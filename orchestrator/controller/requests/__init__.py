"""What clients ask of a running job, held against the job as it is: the move, size, plan or freezing that it means.

Not here: carrying it out (`orchestrator/controller/reshaping.py`, `orchestrator/controller/freeze/freeze_control.py`).
"""
