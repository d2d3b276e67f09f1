"""What bytes that leave a rank, or arrive, take of the cores of one that computes on the host. Pure."""

from __future__ import annotations

from planner.profile import DeviceProfile

STREAM_S_PER_BYTE = 1.3e-9
"""Of layer states, where the profile does not tell: over the loopback interface (`docs/measurements.md`, "Redundancy on
a slow link")."""
DIGEST_S_PER_BYTE = 1e-9
"""Of that, what a state's digest and copy take; the network takes the rest, of any byte."""


def stream_s_per_byte(device: DeviceProfile) -> float:
    """Of layer states; 0 on a device beside the host."""
    if device.kind != "cpu":
        return 0.0
    return STREAM_S_PER_BYTE if device.stream_s_per_byte is None else device.stream_s_per_byte


def socket_s_per_byte(device: DeviceProfile) -> float:
    """Of messages, beside what they hold the thread that computes; 0 on a device beside the host."""
    return max(0.0, stream_s_per_byte(device) - DIGEST_S_PER_BYTE)
