"""Core time that traffic takes from a rank that computes on the host, per byte that leaves or arrives. Pure.

Where ranks wait for the bytes anyway, as in the exchange after the window, their cores are free and none of this
counts; what a send holds its caller is the link's.
"""

from __future__ import annotations

from planner.profile import DeviceProfile

STREAM_S_PER_BYTE = 8.5e-10
"""Cost of layer states, where the profile does not say: measured over the loopback interface (`docs/measurements.md`,
"Redundancy on a slow link")."""
SOCKET_S_PER_BYTE = 3.5e-10
"""Cost of messages, likewise (`docs/measurements.md`, "Shared optimizer states")."""


def stream_s_per_byte(device: DeviceProfile) -> float:
    """Cost of layer states; 0 on a device beside the host."""
    return _on_host(device, device.stream_s_per_byte, STREAM_S_PER_BYTE)


def socket_s_per_byte(device: DeviceProfile) -> float:
    """Cost of messages; 0 on a device beside the host."""
    return _on_host(device, device.socket_s_per_byte, SOCKET_S_PER_BYTE)


def _on_host(device: DeviceProfile, measured: float | None, otherwise: float) -> float:
    if device.kind != "cpu":
        return 0.0
    return otherwise if measured is None else measured
