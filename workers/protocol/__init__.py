"""Messages between ranks and controller, and values in them: orders, reports, errors, what commits carry. No torch.

Not here: how they travel (`workers/control/`).
"""
