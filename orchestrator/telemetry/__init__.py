"""A job's numbers for other systems: Prometheus metrics, experiment loggers, OpenTelemetry spans.

Not here: The routes that serve them (`dashboard/`), and the job's own record, the event log (`orchestrator/events/`).
"""
