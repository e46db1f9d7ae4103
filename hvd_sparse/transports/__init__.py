"""Messages of variable size among P ranks; nothing here knows about gradients.

`Transport` (transport.py) is the interface: `exchange` starts to send to one rank and to receive
from one, and the collectives are made of it. All ranks make the same calls in the same order.

| transport | file | carries messages over |
|---|---|---|
| `gloo` | gloo.py | a gloo group of its own: the default |
| `mpi` | mpi.py | an MPI communicator of its own: the default where MPI starts the processes |
| `nccl` | nccl.py | NCCL for large messages, gloo for small ones; each rank has its own device |
| `local` | local.py | memory: ranks are threads of one process (`run_ranks`) |

* Connecting (connect.py, meeting.py) goes over Horovod or a store, and ends by `timeout_s`.
* A payload is one message, or two where it outgrows what the receiver has made room for
  (point_to_point.py, framing.py). `traffic` counts headers, but no message to oneself, and not
  what NCCL pads.
* A rank that fails, is silent or makes other calls ends its peers' waits (supervised.py, watch.py,
  lines.py). docs/reliability.md lists the bounds, and the ports.
* `auto` never takes NCCL: its communicator has run on one device only, and beside no other.
* A `GroupTransport` (group.py) is a view of some ranks, for two levels (`hvd_sparse.hosts`).
"""

from hvd_sparse.transports.framing import Context, Payload
from hvd_sparse.transports.local import LocalTransport, LocalWorld, run_ranks
from hvd_sparse.transports.transport import Traffic, Transport

__all__ = [
    "Context",
    "LocalTransport",
    "LocalWorld",
    "Payload",
    "Traffic",
    "Transport",
    "run_ranks",
]
