"""One rank of `benchmarks.hierarchical`: the dense reduce inside a host, beside gloo's allreduce.

The bound set by memory is measured in the same launch. All ranks copy a vector at the same time,
which reads n values and writes n. The reduce copies all of the gradient but the rank's own shard,
reads n values (a shard of each rank) and writes n/L: 3 - 1/L where the copy has 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import horovod.torch as hvd
import torch

from benchmarks._rank import dist, end_rank, make_gradients, relative_error, start_rank, timed
from hvd_sparse.hosts import Grid, Hosts
from hvd_sparse.transports.connect import HorovodBootstrap, create_transport
from hvd_sparse.transports.point_to_point import PointToPointTransport

LARGEST_ERROR = 1e-6


def main() -> None:
    """Verify, time, and write rank 0's findings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    options = start_rank(parser)
    L = hvd.size()
    transport = create_transport("auto", HorovodBootstrap(hvd.global_process_set), 60.0)
    assert isinstance(transport, PointToPointTransport)
    inside = Hosts(transport, Grid((tuple(range(L)),), 0, hvd.rank())).exchange_of(
        options.numel, "torch.float32", torch.device("cpu")
    )
    (gradient,) = make_gradients(options.numel, 1)
    summed, copied = gradient.clone(), torch.empty_like(gradient)

    dist.all_reduce(summed)
    shard = inside.reduce_scatter([gradient])
    error = relative_error([shard], [summed[inside.shard]])
    if not error <= LARGEST_ERROR:  # also of NaN
        raise SystemExit(f"the sum of rank {hvd.rank()}'s shard is wrong by {error:g} of its norm")

    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: inside.reduce_scatter([gradient]),
        "gloo": lambda: dist.all_reduce(summed),
        "copy": lambda: copied.copy_(gradient),
    }
    medians = timed(ways, options.repeats, lambda: summed.copy_(gradient))
    bound_s = medians["copy"] * (3 - 1 / L) / 2
    end_rank(options.out, {"seconds": medians, "bound_s": bound_s}, transport)


if __name__ == "__main__":
    main()
