"""The `freshet` command: `main.py`, and a file per command with what it does.

Not here: the commands' signatures (`orchestrator/cli/commands/`), what the terminal shows (`orchestrator/cli/text/`),
and effects on a job (`orchestrator/client/`).
"""
