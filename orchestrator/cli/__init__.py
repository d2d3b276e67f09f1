"""The `freshet` command: what each command does, progress lines and texts for the terminal.

Not here: What a command does beyond reading arguments and printing.
"""
