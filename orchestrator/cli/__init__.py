"""The `freshet` command: what each command does with its arguments, and what it prints.

Not here: the commands' signatures (`orchestrator/cli/commands/`), and their effects on a job (`orchestrator/client/`).
"""
