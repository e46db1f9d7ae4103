"""Recordings: of engines whose ranks are threads, and made up line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from hvd_sparse import Recorder
from hvd_sparse.cli.main import main
from hvd_sparse.collectives import TopkAllgather
from hvd_sparse.engine import Engine, Method, TensorSpec
from hvd_sparse.engine.account import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.lab.report.log import Recording, read_runs
from hvd_sparse.recording.recorder import VERSION
from hvd_sparse.selectors import ReusedThreshold
from hvd_sparse.transports import Transport
from hvd_sparse.transports.local import run_ranks

NUMEL = 3000


def last_run(path: Path) -> Recording:
    return read_runs(path)[-1]


def train(
    transport: Transport,
    recorder_of: Callable[[int], Recorder | None],
    steps: int = 30,
    buckets: int = 3,
    between: Callable[[int], object] = lambda rank: None,
) -> Engine:
    """Some steps of an engine; returns it, disconnected."""
    method = Method(0.05, NUMEL, partial(ReusedThreshold, 8), TopkAllgather, "test")
    engine = Engine(method, recorder_of(transport.rank))
    engine.connect(transport)
    generator = torch.Generator().manual_seed(transport.rank)
    specs = [TensorSpec(f"layer{i}.weight", (NUMEL,), "torch.float32") for i in range(buckets)]
    for _ in range(steps):
        for spec in specs:
            engine.submit(spec, torch.randn(NUMEL, generator=generator))
            between(transport.rank)
        engine.scale = 0.5
        for spec in specs:
            engine.result(spec.name)
    engine.disconnect()
    return engine


def record(path: Path, world_size: int = 2, **arguments: Any) -> None:
    run_ranks(world_size, lambda t: train(t, lambda rank: Recorder(path), **arguments))


def page_of(path: Path) -> str:
    """The report of a recording, which loads nothing from elsewhere."""
    assert main(["report", str(path)]) == 0
    page = path.with_suffix(".html").read_text()
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == []  # nothing from elsewhere
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    return page


# -- lines ---------------------------------------------------------------------------------------

SPANS = {phase: [0.1, 0.2] for phase in COMPARED_PHASES}
BUCKET = {"names": ["a", "b"], "numel": 1000, "k": 10, "density": 0.01, "dtype": "float32"}
LINES: list[dict[str, Any]] = [
    {
        "kind": "run",
        "id": "x",
        "version": VERSION,
        "hvd_sparse": "0.1",
        "torch": "2",
        "host": "h",
        "pid": 7,
        "rank": 0,
        "world_size": 2,
        "transport": "gloo",
        "start_unix_s": 1.7e9,
    },
    {
        "kind": "plan",
        "id": "x",
        "step": 0,
        "buckets": [{**BUCKET, "compressor": "S", "wire": "W"}],
    },
    *(
        {
            "kind": "steps",
            "id": "x",
            "step": step,
            "steps": 1,
            "at_s": step / 10,
            "seconds": 0.1,
            "faults": 7,
            "collective": ["C"],
            "threshold": [0.5],
            "imbalance": [0.0],
            "spans": [SPANS],
            **{name: [1] for name in FIGURES},
        }
        for step in (1, 2, 3)
    ),
    {"kind": "residual", "id": "x", "step": 1, "bucket": 0, "norm": 2.5},
    {
        "kind": "ranks",
        "id": "x",
        "step": 1,
        "steps": 64,
        **{name: [0.1, 0.2] for name in COMPARED_PHASES},
    },
]
RUN = LINES[0]
PLAN = {**LINES[1], "buckets": [{**BUCKET, "compressor": "topk", "wire": "float32"}]}


def steps(
    last: int, count: int, step_s: float = 0.2, nbytes: int = 100, faults: int = 0
) -> dict[str, Any]:
    figures = {name: [0] for name in FIGURES} | {"bytes_sent": [count * nbytes]}
    figures |= {"wait_s": [count * step_s / 4], "nnz_applied": [20 * count]}
    figures |= {"nnz_wanted": [10 * count]}
    more = {"collective": ["oktopk"], "threshold": [0.5], "imbalance": [0.0], "spans": [{}]}
    at = {"step": last, "steps": count, "at_s": last * step_s, "seconds": count * step_s}
    return {"kind": "steps", "id": "x", "faults": count * faults, **at, **figures, **more}


def ranks(*exchange_s: float) -> dict[str, Any]:
    phases = {name: list(exchange_s) for name in COMPARED_PHASES}
    return {"kind": "ranks", "id": "x", "step": 64, "steps": 64, **phases}


def text_of(*lines: Any) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def of_run(run: str, *lines: dict[str, Any]) -> str:
    """The lines as those of the run with that id."""
    return text_of(*({**line, "id": run} for line in lines))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)
