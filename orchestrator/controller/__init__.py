"""The actor that owns a running job: its event loop, and how `runtime.py` carries out the lifecycle's commands.

Not here: what to do next (`orchestrator/lifecycle/`).
"""
