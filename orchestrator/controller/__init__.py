"""The actor that owns a running job: its event loop, and the effects that the lifecycle's commands have.

Not here: What to do next (`orchestrator/lifecycle/`).
"""
