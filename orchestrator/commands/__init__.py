"""The table of commands to a running job (`table.py`): a file per command, with its fields, words, what-if change and
answers.

Not here: the effect of a command on the job, a case in `orchestrator/controller/client_commands.py`.
"""
