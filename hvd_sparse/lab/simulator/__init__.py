"""Collectives on up to a thousand virtual ranks, with a clock for the network."""

from hvd_sparse.lab.simulator.network import Network
from hvd_sparse.lab.simulator.simulated_transport import SimulatedTransport, run_simulated
from hvd_sparse.lab.simulator.simulation import (
    ALGORITHMS,
    DISTINCT,
    Outcome,
    Workload,
    simulate,
    simulate_all,
    with_efficiency,
)
from hvd_sparse.lab.simulator.workloads import RecordedStreams, SyntheticStreams, record

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
