"""Benchmark workers as real jobs under the unmodified horovodrun, on loopback or shaped links."""

from __future__ import annotations

import argparse
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

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Launcher:
    """Where jobs run.

    Attributes:
        rate: What a network of namespaces is shaped to, as `tc` spells it: 1gbit; None: loopback.
        script: The script that makes that network.
    """

    rate: str | None
    script: str | None

    @property
    def place(self) -> str:
        """A word for a report's cases."""
        return self.rate or "loopback"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """The options that `of` reads."""
        parser.add_argument(
            "--netlab", metavar="RATE", help="shape links, as `tc` spells it: 1gbit"
        )
        parser.add_argument("--netlab-script", default=os.environ.get("HVD_SPARSE_NETLAB"))

    @staticmethod
    def of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Launcher:
        """What the options say; ends with an error where they are not complete."""
        if options.netlab and not options.netlab_script:
            parser.error("--netlab needs --netlab-script, or HVD_SPARSE_NETLAB")
        return Launcher(options.netlab, options.netlab_script)

    @contextmanager
    def network(self, hosts: int) -> Iterator[None]:
        """A network of so many hosts, where links are to be shaped."""
        if self.rate is None:
            yield
            return
        script = str(self.script)
        subprocess.run([script, "up", str(hosts), self.rate], check=True)
        try:
            yield
        finally:
            subprocess.run([script, "down"], check=True)

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
            if self.rate:
                hosts = ",".join(f"nl{rank + 1}:1" for rank in range(ranks))
                command = [str(self.script), "exec", "1", *command, "-H", hosts]
            else:
                command += ["-H", f"localhost:{ranks}"]
            command += [sys.executable, str(REPOSITORY / script), out_option, str(out), *arguments]
            every = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
            subprocess.run(command, check=True, env=every, stdout=sys.stderr, timeout=timeout_s)
            result: dict[str, Any] = json.loads(out.read_text())
            return result
