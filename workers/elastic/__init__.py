"""Layers that change ranks or have copies: standbys, snapshots, redundancy, plan switches, and where a rank's layers
come from.

Not here: the streams that carry them (`workers/state_stream/`) and the decisions
(`orchestrator/lifecycle/`).
"""
