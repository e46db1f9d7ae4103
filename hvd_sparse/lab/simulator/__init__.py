"""Collectives on up to 1,024 virtual ranks, on a simulated network.

`simulate(algorithm, world_size, workload, network, streams)` runs a collective of
`hvd_sparse.collectives`, unchanged, on a transport whose messages take virtual time. The command is
`hvd-sparse simulate`.

* Ranks are threads that take turns (`scheduler`). Each rank has a clock (`network`). The clocks
  follow a LogGP model with one card per host and direction; each rank of a host has a fixed share
  of the card. A clock depends only on its own rank's order of calls, never on how the threads are
  scheduled.
* Collectives tell the transport what they compute (`transport.worked`): entries merged, scattered
  and selected, values added and scanned. This work advances the clock. The cost model predicts it,
  and a link's measurement gives the pace of each kind of work. Copying a message is part of β.
* With `hierarchical=True` the collective runs between hosts, over groups with one rank per host.
  The dense sums inside the hosts only take time.
* Vectors that do not fit into memory are simulated shorter, and each of their bytes counts for more
  (`stretch`). Counts, headers and tables do not grow with the vectors and are counted as they are.
"""

from hvd_sparse.lab.simulator.network import Network
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport, SimulatedWorld
from hvd_sparse.lab.simulator.simulation import (
    ALGORITHMS,
    SimulatedOutcome,
    Workload,
    simulate,
    simulate_all,
    with_efficiency,
)
from hvd_sparse.lab.simulator.synthetic_streams import SyntheticStreams
