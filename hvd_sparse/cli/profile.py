"""`hvd-sparse profile`: measure what reductions cost, under horovodrun."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hvd_sparse.checks import check_above_zero
from hvd_sparse.cli.command import Command, Output, add_candidate_arguments, policy_of
from hvd_sparse.errors import ConfigError, say
from hvd_sparse.lab.offline_plan import candidates_of
from hvd_sparse.planner.costs import Profile
from hvd_sparse.planner.measure import LIMIT_S, measure_profile
from hvd_sparse.planner.planner import meet
from hvd_sparse.tables import shown_s, table
from hvd_sparse.transports.connect import TRANSPORT_NAMES, create_transport

SHOWN_NUMELS = (1_000, 100_000, 10_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_candidate_arguments(parser)
    add = parser.add_argument
    add("--transport", choices=TRANSPORT_NAMES, help="(default: the policy's, or auto)")
    add(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="of gradients (default: %(default)s)",
    )
    add("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds (default: %(default)s)")
    add("-o", "--output", type=Path, default=Path("profile.json"), help="(default: %(default)s)")


def run(options: argparse.Namespace) -> Output | None:
    """Measure on all ranks; rank 0 saves the profile and prints it."""
    policy = policy_of(options)
    methods = candidates_of(policy.rules)
    if not methods:
        raise ConfigError(f"{options.policy}: no rule with compress: auto, nothing to measure")
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise ConfigError(f"horovod.torch cannot be imported: {error}") from error
    from hvd_sparse.adapter.session import Horovod
    from hvd_sparse.transports.connect import HorovodBootstrap

    hvd.init()
    check_above_zero("limit", options.limit)
    if hvd.size() == 1:
        raise ConfigError("one rank exchanges nothing: start it by horovodrun -np 2 or more")
    device = device_of_rank(options.device, hvd.local_rank())
    world = HorovodBootstrap(hvd.global_process_set)
    transport = create_transport(options.transport or policy.transport, world, 60.0, device)
    if hvd.rank() == 0:
        say(f"measuring {len(methods)} methods for {options.limit:g} s …")
    allreduce = Horovod().allreduce_of(hvd.global_process_set)
    place = meet(transport, device)
    profile = measure_profile(transport, allreduce, methods, place, options.limit, device)
    transport.close()
    is_first = hvd.rank() == 0
    hvd.shutdown()
    if not is_first:
        return None
    profile.save(options.output)
    return Output(profile.to_json(), f"{shown(profile)}\n\nsaved to {options.output}")


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """The device on which a rank measures; on CUDA, the one with its number on the host."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device")
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def shown(profile: Profile) -> str:
    """The profile as a table."""
    place = profile.place
    rows = [("elements", *(f"{numel:,}" for numel in SHOWN_NUMELS))]
    rows.append(("dense", *(shown_s(profile.dense.at(numel)) for numel in SHOWN_NUMELS)))
    for method, costs in profile.methods.items():
        rows.append((method.short, *(shown_s(costs.seconds(numel)) for numel in SHOWN_NUMELS)))
    title = f"{place.world_size} ranks, {place.host_class}, {place.transport}, torch {place.torch}"
    title += "" if place.device == "cpu" else f", {place.device}"
    return f"{title}\n{table(rows)}"


PROFILE = Command(
    name="profile",
    summary="measure what reductions cost here, for the planner; under horovodrun",
    examples=(
        "horovodrun -np 4 hvd-sparse profile",
        "horovodrun -np 4 hvd-sparse profile --policy policy.yaml -o profile.json",
        "horovodrun -np 4 hvd-sparse profile --compressor oktopk --density 0.001 --json",
    ),
    add_arguments=add_arguments,
    run=run,
)
