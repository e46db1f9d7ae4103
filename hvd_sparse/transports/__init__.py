"""Messages between ranks: variable sizes, timeouts, byte counters, and nothing about gradients."""

from hvd_sparse.transports.framing import Context, Payload
from hvd_sparse.transports.local import LocalTransport, LocalWorld, run_ranks
from hvd_sparse.transports.transport import Handle, Traffic, Transport

__all__ = [
    "Context",
    "Handle",
    "LocalTransport",
    "LocalWorld",
    "Payload",
    "Traffic",
    "Transport",
    "run_ranks",
]
