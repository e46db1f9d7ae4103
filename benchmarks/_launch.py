"""Benchmark workers as real jobs under the unmodified horovodrun, on loopback or shaped links."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.netlab import Netlab, NetlabError, Network

REPOSITORY = Path(__file__).resolve().parents[1]
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""glibc gives each block above 32 MiB back to the system when it is freed. A single gradient of 59
MB then costs 14,000 page faults in every step: 9 ms, or 50 on a virtual machine, which hides what
is measured. Gradients of real models are smaller, and so stay with the process. For all ways."""


def keep_memory() -> None:
    """`KEPT_MEMORY` for this process, which glibc read its environment for when it started."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        trim_threshold, mmap_threshold, largest = -1, -3, (1 << 31) - 1
        mallopt(trim_threshold, largest)
        mallopt(mmap_threshold, largest)


@dataclass
class Launcher:
    """Where jobs run.

    Attributes:
        rate: What each host of a network lab sends and receives, as `tc` spells it: 1gbit; None:
            loopback.
        workers: Ranks of each host.
    """

    rate: str | None
    workers: int = 1
    _lab: Network | None = None

    @property
    def place(self) -> str:
        """A word for a report's cases."""
        place = self.rate or "loopback"
        return place if self.workers == 1 else f"{place}, {self.workers} on each host"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
        """The option that `of`, or `each_of` for several rates, reads."""
        parser.add_argument(
            "--netlab",
            metavar="RATE",
            nargs="+" if several else 1,
            help="run between hosts of a network lab (tools/netlab; needs root and iproute2) with "
            "links of this rate, as `tc` spells it: 1gbit; default: loopback",
        )

    @staticmethod
    def of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Launcher:
        """For the rate asked for; ends with an error where there can be no such lab."""
        return Launcher.each_of(parser, options)[0]

    @staticmethod
    def each_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Launcher]:
        """The same for each of several rates."""
        if not options.netlab:
            return [Launcher(None)]
        for rate in options.netlab:
            try:
                with Netlab(hosts=1, rate=rate):
                    pass
            except NetlabError as error:
                parser.error(f"--netlab: {error}")
        return [Launcher(rate) for rate in options.netlab]

    @contextmanager
    def network(self, ranks: int) -> Iterator[None]:
        """Within this, `run` has hosts for so many ranks, where links are to be shaped."""
        if self.rate is None:
            yield
            return
        with Netlab(ranks // self.workers, self.rate) as self._lab:
            try:
                yield
            finally:
                self._lab = None

    @property
    def interface(self) -> list[str]:
        """The option by which a worker learns which interface counts its bytes."""
        return ["--interface", "eth0"] if self.rate else []

    def run(
        self,
        script: str,
        ranks: int,
        arguments: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        out_option: str = "--out",
        timeout_s: float = 900.0,
    ) -> dict[str, Any]:
        """Run a script of the repository on every rank; returns the JSON that its rank 0 wrote."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            command = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "-np", str(ranks)]
            if self.rate is None:
                command += ["-H", f"localhost:{ranks}"]
            else:
                assert self._lab is not None
                command = self._lab.on("nl1", [*command, "-H", self._lab.slots(self.workers)])
            command += [sys.executable, str(REPOSITORY / script), out_option, str(out), *arguments]
            every = {**os.environ, "PYTHONPATH": str(REPOSITORY), **KEPT_MEMORY}
            every.update(environment or {})
            subprocess.run(command, check=True, env=every, stdout=sys.stderr, timeout=timeout_s)
            result: dict[str, Any] = json.loads(out.read_text())
            return result
