"""Collectives on up to a thousand virtual ranks, with a clock for the network."""

from hvd_sparse.simulator.network import Network
from hvd_sparse.simulator.simulation import (
    ALGORITHMS,
    DISTINCT,
    Outcome,
    Workload,
    simulate,
    simulate_all,
    with_efficiency,
)
from hvd_sparse.simulator.streams import RecordedStreams, SyntheticStreams, record
from hvd_sparse.simulator.transport import SimulatedTransport, run_simulated

__all__ = [
    "ALGORITHMS",
    "DISTINCT",
    "Network",
    "Outcome",
    "RecordedStreams",
    "SimulatedTransport",
    "SyntheticStreams",
    "Workload",
    "record",
    "run_simulated",
    "simulate",
    "simulate_all",
    "with_efficiency",
]
