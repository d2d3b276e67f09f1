"""Pages for people: the report of a run and the page of a plan.

The sections of a run's report also make those of the dashboard's page of a job.

Not here: The numbers (`orchestrator/analysis/`) and the drawings (`orchestrator/pictures/`).
"""
