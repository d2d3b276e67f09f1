"""The ranks of a running job: the lifecycle's effects carried out on their processes, and who dies, hangs or drains.

Not here: where processes run and how they are called (`orchestrator/cluster/`), and what follows
(`orchestrator/lifecycle/`).
"""
