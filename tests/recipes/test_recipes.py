"""The recipes of CONTRIBUTING.md, followed in a copy of the package: nothing else is needed.

Each test adds something by writing the files that its recipe names, and then uses it everywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "hvd_sparse"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that can be changed."""
    without = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PACKAGE, tmp_path / "hvd_sparse", ignore=without))


def insert(path: Path, before: str, text: str) -> None:
    """Put a text in front of the only place where another one stands."""
    old = path.read_text()
    assert old.count(before) == 1, f"{path.name}: {before!r} stands {old.count(before)} times"
    path.write_text(old.replace(before, text + before))


def run(copy: Path, program: str) -> None:
    """Run a program with the copy in the place of the package."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    done = subprocess.run(
        [sys.executable, "-c", f"import hvd_sparse\n{program}"],
        env=environment,
        cwd=copy.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_collective_takes_its_file_its_formula_and_an_entry(copy: Path) -> None:
    (copy / "collectives" / "parcel.py").write_text(
        "from hvd_sparse.collectives.topk_allgather import TopkAllgather\n\n\n"
        "class Parcel(TopkAllgather):\n    pass\n"
    )
    insert(
        copy / "cost_model.py",
        "def gtopk(",
        "def parcel(P: int, n: int, k: int, wire: WireBytes) -> CostRange:\n"
        "    cost = Cost(1e-9, entries=k * (P - 1))\n"
        "    return CostRange(cost, cost, cost)\n\n\n",
    )
    registry = copy / "collectives" / "registry.py"
    insert(
        registry,
        "from hvd_sparse.collectives.sparcml",
        "from hvd_sparse.collectives.parcel import Parcel\n",
    )
    insert(
        registry,
        '    Algorithm("gtopk"',
        '    Algorithm("parcel", Parcel, cost_model.parcel, ("bundle",), True, True),\n',
    )
    run(
        copy,
        """
from hvd_sparse.cli.main import main
from hvd_sparse.collectives.automatic import AutomaticCollective
from hvd_sparse.collectives.parcel import Parcel
from hvd_sparse.cost_model import Link
from hvd_sparse.lab.offline_plan import measure_encoding
from hvd_sparse.policy import load_policy
from hvd_sparse.lab.simulator import Network, SyntheticStreams, Workload, simulate
from hvd_sparse.transports import run_ranks

for name in ("parcel", "bundle"):
    method = hvd_sparse.Compression.topk(collective=name).method
    made = run_ranks(2, lambda t: type(method.collective(t, 100, 10)))
    assert made == [Parcel] * 2
    network, streams = Network(Link(1e-5, 1e-9)), SyntheticStreams()
    assert simulate(name, 3, Workload(100, 10), network, streams).result_nnz >= 10

def chosen(transport):
    transport.link = Link(1e-3, 1e-9)
    return type(AutomaticCollective(transport, 10_000, 10).chosen)
assert run_ranks(3, chosen) == [Parcel] * 3

rule = {"compress": "auto", "compressor": "topk"}
methods = load_policy({"version": 1, "rules": [rule]}).rules[0].methods
by_parcel = [m for m in methods if "collective=parcel" in m.description]
assert len(by_parcel) == 1
costs = run_ranks(2, lambda t: measure_encoding(t, {"one": by_parcel[0]}))
assert costs[0]["one"].collective == "parcel"
assert main(["simulate", "--ranks", "2", "--algorithms", "parcel", "--numel", "1000"]) == 0
""",
    )


def test_a_compressor_takes_its_file_and_three_lines(copy: Path) -> None:
    (copy / "methods" / "first.py").write_text(
        '''from dataclasses import dataclass

from hvd_sparse.checks import count
from hvd_sparse.methods.method_options import AnyCollectiveOptions
from hvd_sparse.checks import option
from hvd_sparse.selectors import ExactTopK


@dataclass(frozen=True, kw_only=True)
class FirstOptions(AnyCollectiveOptions):
    """The first of all methods."""

    name = "first"

    patience: int = option(3, "How patient it is, at least 1.", count(1))

    def selector(self):
        return ExactTopK()
'''
    )
    methods = copy / "methods" / "catalogue.py"
    insert(
        methods,
        "from hvd_sparse.methods.method_options",
        "from hvd_sparse.methods.first import FirstOptions\n",
    )
    insert(methods, "            RandomkOptions,\n        )", "            FirstOptions,\n")
    insert(
        copy / "compression.py",
        "    @staticmethod\n    def from_policy(",
        "    first = staticmethod(constructor(_First))\n\n",
    )
    insert(
        copy / "compression.py",
        "class _HorovodCompressor",
        "class _First(catalogue.FirstOptions, Arguments): ...\n",
    )
    run(
        copy,
        """
from hvd_sparse.cli.main import main
from hvd_sparse.policy import load_policy
from hvd_sparse.cli.validate import json_schema

compression = hvd_sparse.Compression.first(patience=5, density=0.5, collective="oktopk")
assert "patience=5" in compression.method.description
assert "patience: How patient it is, at least 1." in hvd_sparse.Compression.first.__doc__
rule = {"compressor": "first", "patience": 7}
assert "patience=7" in load_policy({"version": 1, "rules": [rule]}).rules[0].methods[0].description
assert "patience" in json_schema()["$defs"]["Rule"]["properties"]
try:
    hvd_sparse.Compression.first(patience=0)
except hvd_sparse.ConfigError as error:
    assert "patience must be a whole number of at least 1, got 0" in str(error)
else:
    raise AssertionError("patience=0 was accepted")
""",
    )


def test_a_form_of_values_takes_its_codec_and_an_entry(copy: Path) -> None:
    values = copy / "wire" / "values.py"
    insert(values, "VALUE_CODECS: ", "class SingleValues(Float32Values):\n    pass\n\n\n")
    insert(values, '    "float16": ', '    "single": SingleValues(),\n')
    run(
        copy,
        """
from hvd_sparse.wire import WIRES
assert {"single", "single+gap"} <= WIRES.keys()
assert "wire=single+gap" in hvd_sparse.Compression.topk(wire="single+gap").method.description
""",
    )
