"""Writes down what happened, for at most one percent of the time.

A recording is a file of JSON lines, each with its `kind`:

| kind | when | holds |
|---|---|---|
| `run` | first | format version, rank, world, transport, host, start in Unix seconds |
| `plan` | at every new plan | the buckets: names, numel, k, type, selector, collective |
| `steps` | as often as the budget allows | sums over `steps` steps, one list entry per bucket |
| `residual` | one bucket in turn, as the budget allows | its residual's Euclidean norm |
| `ranks` | every 64 steps | seconds per phase on every rank |

All times are seconds since the start.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_at_least
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.observer import COMPARED_PHASES
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError
from hvd_sparse.recording.budget import Budget
from hvd_sparse.transports import Transport

VERSION = 2
"""Of the file's format: it rises when a key of a line changes its name or its meaning."""
LINES_BEFORE_THINNING = 2000
"""So many `steps` lines are written for every step, as many for every second one, and so on: the
file grows with the logarithm of the run."""
READ_BYTES_PER_S = 4e9
"""A guess at memory bandwidth, for the cost of the first norm."""


class ScalarWriter(Protocol):
    """What is used of torch.utils.tensorboard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Note one value."""


class Recorder:
    """Records a compression's run: `Compression.topk(…, record=Recorder("run.jsonl"))`.

    What it costs is bounded by construction: it measures itself, and leaves steps out while it is
    over its budget; their figures are in the next line's sums.

    Args:
        path: Where the lines are written. With `{rank}` in its name every rank writes its own file,
            without only rank 0 does. None writes no file.
        tensorboard: A `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`;
            rank 0 gives it density, bytes, seconds, thresholds and residual norms.
        share: Most that recording may take of the time, in (0, 1]; half a percent is for lines, as
            much for residual norms.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tensorboard: ScalarWriter | None = None,
        share: float = 0.009,
    ) -> None:
        if check_at_least("share", share, 0.0) > 1 or share == 0:
            raise ConfigError(f"share must be in (0, 1], got {share!r}")
        self.path = None if path is None else os.fspath(path)
        self.share = share
        self._tensorboard = tensorboard
        self._file: IO[str] | None = None
        self._writes = False
        self._step = self._lines = 0
        self._start = self._last_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """Pickled as its arguments; the copy begins a recording of its own."""
        return {"path": self.path, "share": self.share}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], share=state["share"])  # type: ignore[misc]

    @property
    def spent_s(self) -> float:
        """What recording has cost so far, in seconds of the training thread."""
        return self._for_lines.spent_s + self._for_norms.spent_s if self._writes else 0.0

    # -- what the engine calls ---------------------------------------------------------------------

    def planned(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        """See `Observer.planned`."""
        if self._start == 0.0:
            self._begin(transport)
        self._totals = {name: [0.0] * len(buckets) for name in FIGURES}
        self._counted = self._step
        self._norms = 0
        described = [
            {
                "names": list(bucket.stats.names),
                "numel": bucket.numel,
                "k": bucket.k,
                "dtype": bucket.specs[0].dtype.removeprefix("torch."),
                "selector": type(bucket.selector).__name__,
                "collective": type(bucket.collective).__name__,
            }
            for bucket in buckets
        ]
        self._write({"kind": "plan", "step": self._step, "buckets": described})

    def stepped(self, buckets: Sequence[Bucket]) -> None:
        """See `Observer.stepped`."""
        self._step += 1
        if not self._writes:
            return
        thinning = 1 << (self._lines // LINES_BEFORE_THINNING)
        if self._step - self._counted >= thinning and self._for_lines.covers(0.0):
            with self._for_lines.paying():
                self._write_steps(buckets)
        place = self._norms % len(buckets)
        if self._for_norms.covers(4 * buckets[place].numel / self._read_bytes_per_s):
            with self._for_norms.paying():
                self._write_norm(place, buckets[place])

    def compared(self, seconds: Tensor) -> None:
        """See `Observer.compared`."""
        columns = zip(COMPARED_PHASES, seconds.T.tolist(), strict=True)
        self._write(
            {"kind": "ranks", "step": self._step, **{name: rounded(c) for name, c in columns}}
        )

    def close(self) -> None:
        """Close the file; a later step opens it again and appends."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- lines -------------------------------------------------------------------------------------

    def _begin(self, transport: Transport) -> None:

        self._start = perf_counter()
        self._for_lines = Budget(self.share / 2)
        self._for_norms = Budget(self.share / 2)
        self._read_bytes_per_s = READ_BYTES_PER_S
        self._rank = transport.rank
        to_file = self.path is not None and (self._rank == 0 or "{rank}" in self.path)
        if self._rank != 0:
            self._tensorboard = None
        self._writes = to_file or self._tensorboard is not None
        if not to_file:
            self.path = None
            return
        assert self.path is not None
        self.path = self.path.replace("{rank}", str(self._rank))
        Path(self.path).write_text("")
        self._write(
            {
                "kind": "run",
                "version": VERSION,
                "hvd_sparse": __version__,
                "torch": str(torch.__version__),
                "host": socket.gethostname(),
                "rank": self._rank,
                "world_size": transport.world_size,
                "transport": transport.name,
                "start_unix_s": time.time(),
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self._file is None:
            self._file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _write_steps(self, buckets: Sequence[Bucket]) -> None:
        now_s = perf_counter() - self._start
        totals = {name: [getattr(b.stats, name) for b in buckets] for name in FIGURES}
        sums = {
            name: rounded(new - old for new, old in zip(column, self._totals[name], strict=True))
            for name, column in totals.items()
        }
        steps = self._step - self._counted
        line = {
            "kind": "steps",
            "step": self._step,
            "steps": steps,
            "at_s": round(now_s, 6),
            "seconds": round(now_s - self._last_s, 6),
            **sums,
            "threshold": [finite_or_none(b.threshold) for b in buckets],
            "spans": [self._spans_of_last_step(b) for b in buckets],
        }
        self._write(line)
        self._to_tensorboard(line, buckets)
        self._totals, self._counted, self._last_s = totals, self._step, now_s
        self._lines += 1

    def _spans_of_last_step(self, bucket: Bucket) -> dict[str, tuple[float, float]]:
        """Start and seconds of each phase."""
        last = bucket.stats.history[-1]
        return {
            name: (round(start_s - self._start, 6), round(getattr(last, name), 6))
            for name, start_s in bucket.stats.starts.items()
        }

    def _write_norm(self, place: int, bucket: Bucket) -> None:
        start = perf_counter()
        norm = float(torch.linalg.vector_norm(bucket.memory.residual))
        self._read_bytes_per_s = 4 * max(1, bucket.numel) / (perf_counter() - start)
        self._write(
            {"kind": "residual", "step": self._step, "bucket": place, "norm": finite_or_none(norm)}
        )
        if self._tensorboard is not None:
            tag = f"hvd_sparse/bucket_{place}/residual_norm"
            self._tensorboard.add_scalar(tag, norm, self._step)
        self._norms += 1

    def _to_tensorboard(self, line: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        if self._tensorboard is None:
            return
        steps = line["steps"]
        for name in ("bytes_sent", *COMPARED_PHASES):
            self._tensorboard.add_scalar(f"hvd_sparse/{name}", sum(line[name]) / steps, self._step)
        for place, bucket in enumerate(buckets):
            density = line["nnz_applied"][place] / (steps * max(1, bucket.numel))
            tag = f"hvd_sparse/bucket_{place}"
            self._tensorboard.add_scalar(f"{tag}/density", density, self._step)
            if line["threshold"][place] is not None:
                self._tensorboard.add_scalar(
                    f"{tag}/threshold", line["threshold"][place], self._step
                )


def rounded(column: Any) -> list[float]:
    """Counts as they are, seconds to the microsecond."""
    return [round(value, 6) if isinstance(value, float) else value for value in column]


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
