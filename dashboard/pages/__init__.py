"""The pages: server-rendered templates and the little script that keeps them live.

Not here: Figures of a job, which `orchestrator/analysis` and `orchestrator/report` compute.
"""
