"""The benchmarks of encoding and decoding, the largest size first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from benchmarks import decode, encode
from benchmarks._report import Row
from tools.gpu_lease.results import Results

NUMELS = (2**27, 2**20, 2**23, 2**24)
REPETITIONS = 11


def run(results: Results) -> None:
    """A row for each of the benchmarks' rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    for numel in NUMELS:
        with results.guarded(f"encode, n = {numel}"):
            keep(results, "encode", encode.cuda_rows([numel], device, REPETITIONS))
        for density in decode.DENSITIES:
            with results.guarded(f"decode, n = {numel}, density {density:g}"):
                keep(results, "decode", decode.rows_of(numel, density, device, REPETITIONS))


def keep(results: Results, benchmark: str, rows: Sequence[Row]) -> None:
    """A goal that is missed is no failure of the lease."""
    for row in rows:
        values = {key: value for key, value in asdict(row).items() if value is not None}
        results.row(f"{benchmark}: {values.pop('metric')}", **values)
