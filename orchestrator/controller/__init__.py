"""The actor that owns a running job: its event loop, its log, and the commands of its clients.

Not here: what to do next (`orchestrator/lifecycle/`).
"""
