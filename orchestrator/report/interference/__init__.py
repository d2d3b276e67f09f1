"""Pages about neighbours that disturb ranks: jobs that ran beside one, and the model fitted to such runs.

Not here: rehearsals beside a neighbour (`orchestrator/rehearsal/`), and the fit (`planner/interference/`).
"""
