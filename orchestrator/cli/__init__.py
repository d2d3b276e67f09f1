"""The `freshet` command: one file per command, progress lines and texts for the terminal.

Not here: What a command does beyond reading arguments and printing.
"""
