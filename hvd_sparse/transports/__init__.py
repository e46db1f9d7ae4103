"""Messages of variable size among P ranks; nothing here knows about gradients.

`Transport` (transport.py) is the interface: `exchange` starts to send to one rank and to receive
from one, and the collectives are made of it. A payload is a sequence of contiguous CPU tensors,
sent as their bytes; one uint8 tensor arrives. All ranks make the same calls in the same order.

| transport | file | carries messages over |
|---|---|---|
| `gloo` | gloo.py | a gloo group of its own: the default |
| `mpi` | mpi.py | an MPI communicator of its own: the default where MPI starts the processes |
| `nccl` | nccl.py | NCCL for large messages, gloo for small ones; each rank has its own device |
| `horovod` | horovod.py | Horovod's own operations |
| `local` | local.py | memory: ranks are threads of one process (`run_ranks`) |

**Connecting** (connect.py, meeting.py) goes over Horovod. It first compares the ranks' releases,
and ends by `timeout_s`.

**Messages** (point_to_point.py, framing.py). A payload is one message whose size is in its header.
The receiver's capacity follows from the last message on the same channel, between the same ranks
and for the same bucket. Only a payload that outgrows it takes a second message. The header also has
the call, the bucket and the step: where they differ, the receiver raises `PlanError`. `traffic`
counts what a rank puts on the wire, headers included, but no message to itself.

**Failures** (supervised.py, watch.py, lines.py). A rank that is silent for `timeout_s` raises
`TransportTimeout` on its peers, a dead one `PeerLostError`, and one that makes other calls
`PlanError`. A busy rank is waited for: a warning names it every `timeout_s`, and `busy_timeout_s`
bounds the wait. All ranks are told what failed first, and all report it. docs/reliability.md lists
the bounds, and the ports.

**NCCL.** `auto` never takes it: its second communicator beside Horovod's has run on no device yet.
Messages are padded to the capacity, at most a quarter more bytes, which `traffic` does not count.
Otherwise collectives work on the host: streams come to it and go back through pinned memory.

A `GroupTransport` (group.py) is a view of some ranks, for two levels (`hvd_sparse.hosts`).
"""

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
