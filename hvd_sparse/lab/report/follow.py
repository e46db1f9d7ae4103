"""Follows a recording while it is written: the present state of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.report.log import Reader, Recording
from hvd_sparse.lab.report.summary import (
    dense_bytes,
    faults_of,
    kinds,
    rank_ms,
    slowest_rank,
    steps_of,
)

RECENT_STEPS = 100
"""The present is a mean over the last lines, of this many steps at most, or over the last line."""
SHOWN = ("wait_s", "bytes_sent", "nnz_applied", "nnz_wanted")


class Follower:
    """Reads the lines that are added to a file of recordings, which need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._begin()

    def _begin(self) -> None:
        self._reader = Reader(self.path)
        self._identity: tuple[int, int] | None = None
        self._offset = self._number = 0
        self._rest = b""

    def poll(self) -> list[Recording]:
        """All runs of the file so far, in the order in which they began.

        A last line without its end is still being written; it is read when it is complete. A file
        that was replaced or truncated is read from its beginning.

        Raises:
            ConfigError: A line is invalid, or the file is no recording.
            OSError: The file cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if self._identity not in (None, identity) or status.st_size < self._offset:
                    self._begin()
                self._identity = identity
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            self._number += 1
            content = line.decode("utf-8", "replace")
            if content.strip():
                self._reader.read(content, self._number)
        if self._reader.refusal and not self._reader.runs:
            raise ConfigError(self._reader.refusal)
        return list(self._reader.runs.values())


@dataclass(frozen=True)
class Present:
    """The state of a run, as of its last lines.

    Attributes:
        steps: Steps of the run.
        step_ms: Milliseconds per step.
        wait_ms: Milliseconds per step for which the training thread waited for buckets.
        sent_bytes: Bytes sent per step. 0.0 where all tensors are dense, because nothing is known
            about Horovod's bytes.
        dense_bytes: What a ring allreduce of the same tensors would send.
        density: Density applied.
        wanted: Density wanted in these steps, which a warm-up may raise.
        target: Density wanted after the warm-up.
        exchange_ms: Milliseconds per step in exchanges, by rank, in the last comparison.
        slowest_rank: The rank that the others wait for; None: no rank is clearly slow.
        faults: Page faults per step of the recorded process; None where they are not recorded.
        plan: How the tensors are compressed, in words; empty where all are dense.
        at_s: When the last line was written, in seconds since the start of the run.
    """

    steps: int
    step_ms: float
    wait_ms: float
    sent_bytes: float
    dense_bytes: float
    density: float
    wanted: float
    target: float
    exchange_ms: tuple[float, ...]
    slowest_rank: int | None
    faults: float | None
    plan: tuple[str, ...]
    at_s: float


def present(recording: Recording) -> Present | None:
    """The state of the run; None before its first step."""
    plan = next((plan for plan in reversed(recording.plans) if plan.steps), None)
    if plan is None:
        return None
    lines: list[dict[str, Any]] = []
    steps = 0
    for line in reversed(plan.steps):
        if lines and steps + line["steps"] > RECENT_STEPS:
            break
        lines.append(line)
        steps += line["steps"]
    numel = max(1, sum(bucket["numel"] for bucket in plan.buckets))
    sums = {name: sum(sum(line[name]) for line in lines) / steps for name in SHOWN}
    exchange_ms = rank_ms(recording)[-1] if recording.ranks else np.zeros(0)
    return Present(
        steps=steps_of(recording),
        step_ms=1e3 * sum(line["seconds"] for line in lines) / steps,
        wait_ms=1e3 * sums["wait_s"],
        sent_bytes=sums["bytes_sent"],
        dense_bytes=dense_bytes(plan, recording.run["world_size"]),
        density=sums["nnz_applied"] / numel,
        wanted=sums["nnz_wanted"] / numel,
        target=sum(bucket["k"] for bucket in plan.buckets) / numel,
        exchange_ms=tuple(map(float, exchange_ms)),
        slowest_rank=slowest_rank(recording),
        faults=faults_of(lines),
        plan=tuple(kinds(plan)),
        at_s=lines[0]["at_s"],
    )
