"""The actor that owns a running job: its event loop, and how the lifecycle's commands are carried out.

Not here: what to do next (`orchestrator/lifecycle/`).
"""
