"""Pages for people: the report of a run and the page of a plan.

Not here: The numbers (`orchestrator/analysis/`) and the drawings (`orchestrator/pictures/`).
"""
