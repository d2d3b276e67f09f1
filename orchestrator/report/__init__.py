"""Pages for people: the report of a run, runs beside each other, and what all pages share: their parts and styles.

Not here: The numbers (`orchestrator/analysis/`) and the drawings (`orchestrator/pictures/`).
"""
