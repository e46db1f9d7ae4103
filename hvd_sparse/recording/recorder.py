"""Writes down what happened in a run, in at most one percent of the time.

A recording is a file of JSON lines. Each line has the `id` of its run and a `kind`:

| kind | when | holds |
|---|---|---|
| `run` | first | format version, rank, world, transport, host, process, start in Unix seconds |
| `plan` | at every new plan | the buckets: names, numel, k, type, compressor, wire, and so on |
| `steps` | as often as the budget allows | sums over `steps` steps, by bucket; page faults |
| `residual` | one bucket in turn, as the budget allows | its residual's Euclidean norm |
| `ranks` | every 64 steps | seconds per phase on every rank, sums over `steps` steps |
| `trial` | when a planner has decided | the plans that it tried, what they took, the chosen one |

All times are seconds since the start of the run. A file may hold several runs, one after the other
or interleaved. A process that is restarted adds a run to the file, and so does one whose ranks have
connected anew. A plan without buckets has dense tensors only: Horovod reduces them, and what it
sends is not known.
"""

from __future__ import annotations

import json
import math
import os
import resource
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hvd_sparse._version import __version__
from hvd_sparse.checks import check_share
from hvd_sparse.engine.account import COMPARED_PHASES, Observer
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.stats import FIGURES
from hvd_sparse.errors import ConfigError, warn
from hvd_sparse.leaving import PROCESS_END, Leaving
from hvd_sparse.transports import Transport

VERSION = 3
"""The version of the file's format. It rises when a key of a line changes its name or meaning."""
READ_BYTES_PER_S = 4e9
"""A guess at the memory bandwidth, for the cost of the first norm."""
SAVED_S = 0.1
"""Most time that a budget saves up, so that a pause is not followed by a burst of lines."""
ENTRIES_BEFORE_THINNING = 20_000
"""This many entries are written one step after the other, then as many in every second step, as
many in every fourth, and so on: the file grows with the logarithm of the run. An entry is what a
line says about one bucket or rank, in up to 300 bytes."""


class ScalarWriter(Protocol):
    """The part of torch.utils.tensorboard's `SummaryWriter` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Add one value."""


class Recorder(Leaving, Observer):
    """Records a compression's run: `Compression.topk(…, record=Recorder("run.jsonl"))`.

    Args:
        path: The file. With `{rank}` in its name every rank writes its own file; otherwise only
            rank 0 writes. Lines are appended, and missing folders are created. None writes no file.
        tensorboard: A `torch.utils.tensorboard.SummaryWriter`, or any object with its `add_scalar`.
            Rank 0 gives it density, bytes, seconds, thresholds and residual norms.
        share: Largest share of the time that recording may take, in (0, 1]: one half of it for
            lines, the other for residual norms.

    Raises:
        ConfigError: An argument is invalid. The file is opened in the first step, not here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tensorboard: ScalarWriter | None = None,
        share: float = 0.009,
    ) -> None:
        self.path = None if path is None else check_path(path)
        self.share = check_share("share", share)
        if tensorboard is not None and not callable(getattr(tensorboard, "add_scalar", None)):
            raise ConfigError(f"tensorboard must have an add_scalar, got {tensorboard!r}")
        self._tensorboard = tensorboard
        self._scalars: ScalarWriter | None = None
        self._target: str | None = None
        self._file: LineFile | None = None
        self._transport: Callable[[], Transport | None] = lambda: None
        self._rank = self._step = self._compared = 0
        self._read_bytes_per_s = READ_BYTES_PER_S
        self._budgets: tuple[Budget, Budget] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The arguments only: a copy begins a recording of its own."""
        return {"path": self.path, "share": self.share}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], share=state["share"])  # type: ignore[misc]

    def __str__(self) -> str:
        path = self._target or self.path
        return f"recording to {'TensorBoard' if path is None else path}"

    @property
    def spent_s(self) -> float:
        """Seconds of the training thread that recording has taken so far."""
        return sum(budget.spent_s for budget in self._budgets or ())

    # -- what the engine calls ---------------------------------------------------------------------

    @override
    def planned(self, transport: Transport, buckets: Sequence[Bucket]) -> None:
        if self._transport() is not transport:
            self._begin(transport)
        else:
            self._write_rest()
        self._count_anew(buckets)
        described = [
            {
                "names": list(bucket.stats.names),
                "numel": bucket.numel,
                "k": bucket.stats.k,
                "density": bucket.method.density,
                "dtype": bucket.specs[0].dtype.removeprefix("torch."),
                "compressor": bucket.stats.compressor or type(bucket.selector).__name__,
                "wire": bucket.stats.wire,
            }
            for bucket in buckets
        ]
        self._write({"kind": "plan", "step": self._step, "buckets": described})

    @override
    def stepped(self, buckets: Sequence[Bucket]) -> None:
        if buckets is not self._buckets and (buckets or self._buckets):
            raise ConfigError("a Recorder serves one compression, and a second one uses it")
        self._step += 1
        if self._target is None and self._scalars is None:
            return
        if self._due["steps"].is_due(self._step) and self._for_lines.covers(0.0):
            with self._for_lines.paying():
                self._write_steps()
        if not buckets:
            return
        place = self._norms % len(buckets)
        cost_s = 4 * buckets[place].numel / self._read_bytes_per_s
        if self._due["residual"].is_due(self._step) and self._for_norms.covers(cost_s):
            with self._for_norms.paying():
                self._write_norm(place, buckets[place])

    @override
    def compared(self, seconds: Tensor) -> None:
        steps, self._compared = self._step + 1 - self._compared, self._step + 1
        if self._target is None or not self._due["ranks"].is_due(self._step):
            return
        line = {"kind": "ranks", "step": self._step + 1, "steps": steps}
        with self._for_lines.paying():
            columns = map(rounded, seconds.T.tolist())
            self._write({**line, **dict(zip(COMPARED_PHASES, columns, strict=True))})
        self._due["ranks"].wrote(self._step, len(seconds))

    @override
    def ended(self) -> None:
        self._write_rest()

    @override
    def leave(self, error: BaseException | None) -> bool:
        """Write the last line at the end of the process."""
        del error
        self.ended()
        return False

    @override
    def disown(self) -> None:
        self._target = self._scalars = None  # the run is the parent's

    def tried(self, transport: Transport, trial: Mapping[str, Any]) -> None:
        """Write a planner's decision, between two steps."""
        if self._transport() is not transport:
            self._begin(transport)
        self._write({"kind": "trial", "step": self._step, **trial})

    def close(self) -> None:
        """Close the file. A later step opens it again and appends to it."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            warn(f"rank {self._rank}: {self} could not be closed: {error}")

    # -- lines -------------------------------------------------------------------------------------

    def _begin(self, transport: Transport) -> None:
        """Begin a run: the first one, or the next one after the ranks have connected anew."""
        self.close()
        self._transport = weakref.ref(transport)
        self._rank = transport.rank
        self._start, self._last_s, self._faults = perf_counter(), 0.0, page_faults()
        self._due = {kind: Thinning(self._step) for kind in ("steps", "residual", "ranks")}
        self._count_anew(())
        if self._budgets is None:
            self._budgets = Budget(self.share / 2), Budget(self.share / 2)
        self._for_lines, self._for_norms = self._budgets
        self._scalars = self._tensorboard if self._rank == 0 else None
        self._target = None
        if self.path is None or (self._rank != 0 and "{rank}" not in self.path):
            return
        self._target = os.path.abspath(self.path.replace("{rank}", str(self._rank)))
        self._id = secrets.token_hex(4)
        PROCESS_END.add(self)
        self._write(
            {
                "kind": "run",
                "version": VERSION,
                "hvd_sparse": __version__,
                "torch": str(torch.__version__),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "rank": self._rank,
                "world_size": transport.world_size,
                "transport": transport.name,
                "start_unix_s": time.time(),
            }
        )

    def _count_anew(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._totals = {name: [0.0] * len(buckets) for name in FIGURES}
        self._counted = self._compared = self._step
        self._norms = 0

    def _write(self, line: dict[str, Any]) -> None:
        if self._target is None:
            return
        if self._file is None:
            self._file = LineFile(self._target)
        self._file.write({**line, "id": self._id})

    def _write_rest(self) -> None:
        """Write the last steps of a plan that the budget has left out."""
        if self._target is not None and self._step > self._counted:
            with self._for_lines.paying():
                self._write_steps()

    def _write_steps(self) -> None:
        buckets, now_s, faults = self._buckets, perf_counter() - self._start, page_faults()
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
            "faults": faults - self._faults,
            **sums,
            "collective": [b.stats.collective for b in buckets],
            "threshold": [finite_or_none(b.stats.threshold) for b in buckets],
            "imbalance": [b.stats.imbalance for b in buckets],
            "spans": [self._spans_of_last_step(b) for b in buckets],
        }
        # Set before writing, so that a failure is not repeated at the end of the run.
        self._totals, self._counted, self._last_s, self._faults = totals, self._step, now_s, faults
        self._write(line)
        self._to_tensorboard(line, buckets)
        self._due["steps"].wrote(self._step, 1 + len(buckets))

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
        if self._scalars is not None:
            tag = f"hvd_sparse/bucket_{place}/residual_norm"
            self._scalars.add_scalar(tag, norm, self._step)
        self._norms += 1
        self._due["residual"].wrote(self._step, 1)

    def _to_tensorboard(self, line: dict[str, Any], buckets: Sequence[Bucket]) -> None:
        if self._scalars is None:
            return
        steps = line["steps"]
        for name in ("bytes_sent", *COMPARED_PHASES):
            self._scalars.add_scalar(f"hvd_sparse/{name}", sum(line[name]) / steps, self._step)
        for place, bucket in enumerate(buckets):
            density = line["nnz_applied"][place] / (steps * max(1, bucket.numel))
            tag = f"hvd_sparse/bucket_{place}"
            self._scalars.add_scalar(f"{tag}/density", density, self._step)
            if line["threshold"][place] is not None:
                self._scalars.add_scalar(f"{tag}/threshold", line["threshold"][place], self._step)


class LineFile:
    """Appends lines of JSON to a file; missing folders are created.

    Every line is one unbuffered write. So nothing waits in memory for a flush that may fail, and
    processes that append to one file do not cut each other's lines. A pipe whose reader is missing
    or slow is an error; writing never blocks.

    Raises:
        OSError: It cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o666)
        self._closing = weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._has_content = S_ISREG(status.st_mode) and status.st_size > 0

    def write(self, line: dict[str, Any]) -> None:
        """Append one line.

        Raises:
            OSError: It could not be written whole; a part of it may be in the file.
        """
        text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        if self._has_content:  # a killed process may have left the last line without its end
            text, self._has_content = "\n" + text, False
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: An earlier write has failed, and the system reports it only now.
        """
        if self._closing.detach():
            os.close(self._file)


class Budget:
    """Grants a share, in (0, 1), of the time that passes on a clock."""

    def __init__(self, share: float, clock: Callable[[], float] = perf_counter) -> None:
        self.share = share
        self.spent_s = 0.0
        self._clock = clock
        self._balance_s = 0.0
        self._last = clock()

    def covers(self, cost_s: float) -> bool:
        """Whether the time saved so far covers a cost."""
        now = self._clock()
        self._balance_s = min(SAVED_S, self._balance_s + self.share * (now - self._last))
        self._last = now
        return self._balance_s >= min(cost_s, SAVED_S)

    @contextmanager
    def paying(self) -> Iterator[None]:
        """Charge the time that a block takes; the balance may become negative."""
        start = self._clock()
        try:
            yield
        finally:
            cost_s = self._clock() - start
            self._balance_s -= cost_s
            self.spent_s += cost_s


class Thinning:
    """Decides when the next line of a kind is due; see `ENTRIES_BEFORE_THINNING`."""

    def __init__(self, step: int) -> None:
        self._entries = 0
        self._last_step = step

    def is_due(self, step: int) -> bool:
        """Whether the next line is due after this step."""
        return step - self._last_step >= 1 << (self._entries // ENTRIES_BEFORE_THINNING)

    def wrote(self, step: int, entries: int) -> None:
        """Count the entries of a line that was written after this step."""
        self._last_step = step
        self._entries += entries


def page_faults() -> int:
    """Pages that this process has touched for the first time since the system gave them to it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def check_path(path: Any) -> str:
    """Check that a file can have this path, and return it as text."""
    text: Any = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"path must be a non-empty text or a Path, got {path!r}")
    return text


def rounded(column: Any) -> list[float]:
    """Round seconds to the microsecond; counts stay as they are."""
    return [round(value, 6) if isinstance(value, float) else value for value in column]


def finite_or_none(value: float) -> float | None:
    """A number, or None in the place of an infinity or NaN, which JSON does not have."""
    return value if math.isfinite(value) else None
