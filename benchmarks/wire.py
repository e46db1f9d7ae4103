"""What a compact wire costs and brings: coding on one core, bytes per step, time per reduction.

    python -m benchmarks.wire --json FILE
    python -m benchmarks.wire --json FILE --netlab 100mbit 1gbit 10gbit

Coding is timed on one stream and one thread, in bytes of the stream before it is coded. Reductions
are Ok-Topk's, from a gradient to the reduced gradient, in real jobs under horovodrun: on loopback,
or with `--netlab` between the hosts of a network lab (tools/netlab; needs root).
benchmarks/wire_worker.py is what runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks._launch import Launcher
from benchmarks._report import Row, write_report
from hvd_sparse import ops
from hvd_sparse.ops import reference
from hvd_sparse.streams import ENTRY_BYTES, Part, SparseStream
from hvd_sparse.wire import PLAIN, WIRES
from hvd_sparse.wire.values import flat_message

NUMEL = 14_700_000
DENSITY = 0.01
RANKS = 4
NETWORK_WIRES = ("float32", "float32+gap", "float16", "float16+gap", "qsgd8+gap", "qsgd4+gap")
BYTES_PER_K_GOAL = 8.0
CODING_GOAL_GB_PER_S = 1.0


def best_s(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    fastest = float("inf")
    for _ in range(repeats):
        start = perf_counter()
        function()
        fastest = min(fastest, perf_counter() - start)
    return fastest


def random_stream(numel: int, density: float) -> SparseStream:
    """Random places, and values of a heavy-tailed gradient's top."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(numel, generator=generator) < density
    indices = torch.nonzero(kept).view(-1).to(torch.int32)
    values = torch.randn(indices.numel(), generator=generator).exp_()
    values[::2] *= -1
    return SparseStream(indices, values, numel)


def coding_rows(numel: int, density: float, repeats: int) -> list[Row]:
    """Every wire's size and speed, and gap coding by itself."""
    stream = random_stream(numel, density)
    code = ops.gap_encode(stream.indices, 0)
    assert torch.equal(code, reference.gap_encode(stream.indices, 0))
    assert torch.equal(ops.gap_decode(code, stream.nnz, 0, numel), stream.indices)
    case = f"n={numel} density={density:g} 1 thread"
    rows = [Row(case, "gap coding", 8 * code.numel() / stream.nnz, "bits per index")]
    for name, function in (
        ("encode", lambda: ops.gap_encode(stream.indices, 0)),
        ("decode", lambda: ops.gap_decode(code, stream.nnz, 0, numel)),
    ):
        speed = stream.indices.nbytes / best_s(function, repeats) / 1e9
        rows.append(
            Row(
                *(case, f"gap {name}", speed, "GB/s"),
                goal=f"above {CODING_GOAL_GB_PER_S:g} GB/s",
                met=speed > CODING_GOAL_GB_PER_S,
            )
        )
    plain_bytes = ENTRY_BYTES * stream.nnz
    part = Part.of(stream)
    for name, wire in WIRES.items():
        message = flat_message(wire.encode(part, 1))
        read = wire.decode(message, 0, numel)
        assert read.indices is not None
        assert torch.equal(read.indices, stream.indices)
        assert not wire.is_lossless or torch.equal(read.values, stream.values)
        rows.append(
            Row(
                *(case, f"{name} message", message.numel() / stream.nnz, "bytes per entry"),
                baseline=f"{PLAIN.name}: {ENTRY_BYTES} bytes",
                ratio=plain_bytes / message.numel(),
            )
        )
        for verb, call in (
            ("encode", lambda wire=wire: wire.encode(part, 1)),
            ("decode", lambda wire=wire, message=message: wire.decode(message, 0, numel)),
        ):
            seconds = best_s(call, repeats)
            rows.append(Row(case, f"{name} {verb}", plain_bytes / seconds / 1e9, "GB/s"))
    return rows


def network_rows(found: dict[str, Any], k: int, case: str) -> list[Row]:
    """Bytes and time of every wire in one world, against float32."""
    rows = []
    plain = found[PLAIN.name]
    for name, figures in found.items():
        most = max(figures["bytes"])
        has_goal = name == "float16+gap"
        rows.append(
            Row(
                *(case, f"{name} bytes per rank and step, over k", most / k, "bytes"),
                baseline=f"{PLAIN.name}: {max(plain['bytes']) / k:.2f} bytes",
                ratio=max(plain["bytes"]) / most,
                goal=f"at most {BYTES_PER_K_GOAL:g} k bytes" if has_goal else None,
                met=most <= BYTES_PER_K_GOAL * k if has_goal else None,
            )
        )
        rows.append(
            Row(
                *(case, f"{name} oktopk reduction", figures["seconds"] * 1e3, "ms"),
                baseline=f"{PLAIN.name}: {plain['seconds'] * 1e3:.1f} ms",
                ratio=plain["seconds"] / figures["seconds"],
            )
        )
    return rows


def main() -> None:
    """Time the coding, measure every network, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--density", type=float, default=DENSITY)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--repeats", type=int, default=15)
    Launcher.add_arguments(parser, several=True)
    options = parser.parse_args()
    places = Launcher.each_of(parser, options)
    torch.set_num_threads(1)

    rows = coding_rows(options.numel, options.density, options.repeats)
    arguments = ["--numel", str(options.numel), "--density", str(options.density)]
    arguments += ["--repeats", str(options.repeats), "--wire", *NETWORK_WIRES]
    k = max(1, round(options.density * options.numel))
    for at in places:
        print(f"measuring P = {options.ranks}, {at.place} …", file=sys.stderr, flush=True)
        with at.network(options.ranks):
            found = at.run("benchmarks/wire_worker.py", options.ranks, [*arguments, *at.interface])
        case = f"P={options.ranks} n={options.numel} density={options.density:g} {at.place}"
        rows += network_rows(found, k, case)
    write_report("wire", rows, options.json)


if __name__ == "__main__":
    main()
