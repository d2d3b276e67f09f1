"""What passes between a training rank and the controller: mailbox, reports, what the rank is doing.

Not here: the messages themselves (`workers/protocol.py`).
"""
