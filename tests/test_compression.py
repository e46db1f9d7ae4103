"""The constructors: what they accept, and how they say what they do not."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hvd_sparse
from hvd_sparse import Compression, ConfigError

CONSTRUCTORS = [Compression.topk, Compression.oktopk]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("density", 0, r"density must be in \(0, 1\], got 0"),
        ("density", 1.5, r"density must be in \(0, 1\], got 1.5"),
        ("density", float("nan"), r"density must be in \(0, 1\], got nan"),
        ("density", "many", r"density must be in \(0, 1\], got 'many'"),
        ("density", True, r"density must be in \(0, 1\], got True"),
        ("transport", "pigeon", "transport must be one of .*gloo.*; got 'pigeon'"),
        ("wire", "float8", "wire must be one of float32, float16.*qsgd4.gap.*; got 'float8'"),
        ("bucket_numel", 0, "bucket_numel must be a whole number of at least 1, got 0"),
        ("bucket_numel", 1.5, "bucket_numel must be a whole number of at least 1, got 1.5"),
        ("dense_below", -1, "dense_below must be a whole number of at least 0, got -1"),
        ("timeout_s", 0, "timeout_s must be a number of at least 0.001, got 0"),
        ("timeout_s", float("nan"), "timeout_s must be a number of at least 0.001, got nan"),
    ],
)
def test_arguments_out_of_range_are_named(
    constructor: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        constructor(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repartition_interval", 0),
        ("threshold_interval", 0),
        ("balance_factor", 0.5),
        ("tolerance", -0.1),
    ],
)
def test_oktopks_arguments(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        Compression.oktopk(**{name: value})  # type: ignore[arg-type]


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="collective must be one of auto, oktopk, topk_allgather"):
        Compression.topk(collective="ring")
    with pytest.raises(TypeError, match="sparsity"):
        Compression.topk(sparsity=0.99)  # type: ignore[call-arg]


def test_embeddings_are_asked_for_once() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    compression = Compression.topk(model.named_parameters())
    with pytest.raises(ConfigError, match="algorithm must be one of auto, ssar_recursive_double"):
        compression.exchange_embeddings(model.named_parameters(), algorithm="ring")
    compression.exchange_embeddings(model.named_parameters())
    with pytest.raises(ConfigError, match="must be called once"):
        compression.exchange_embeddings(model.named_parameters())


def test_names_given_twice() -> None:
    p = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="unique, got w twice"):
        Compression.topk([("w", p), ("w", p)])


def test_a_tensor_that_no_optimizer_handed_over_is_left_alone() -> None:
    compression = Compression.topk(nn.Linear(3, 3).named_parameters())
    tensor = torch.ones(5)
    handed, context = compression.compress(tensor)
    assert handed is tensor
    assert compression.decompress(handed, context) is tensor


def test_a_pickled_copy_has_the_same_method() -> None:
    compression = Compression.oktopk(nn.Linear(3, 3).named_parameters(), density=0.25)
    copy = pickle.loads(pickle.dumps(compression))
    assert copy.method.density == 0.25
    assert copy.method.description == compression.method.description
    assert type(copy.method.selector()) is type(compression.method.selector())


def test_horovods_own_compressors_stand_beside() -> None:
    hvd = pytest.importorskip("horovod.torch", reason="Horovod is not installed")
    assert Compression.none is hvd.Compression.none
    assert Compression.fp16 is hvd.Compression.fp16


def test_the_core_runs_where_horovod_and_mpi4py_are_not_installed() -> None:
    program = (
        "import sys; sys.modules['horovod'] = sys.modules['mpi4py'] = None\n"
        "import hvd_sparse, torch\n"
        "from hvd_sparse.transports.local import run_ranks\n"
        "from hvd_sparse.collectives import OkTopk\n"
        "from hvd_sparse.stream import SparseStream\n"
        "s = SparseStream(torch.tensor([1, 5], dtype=torch.int32), torch.ones(2), 9)\n"
        "r = run_ranks(2, lambda t: OkTopk(t, 9, 2).reduce(s), timeout_s=20)\n"
        "assert r[0].reduced.values.tolist() == [2.0, 2.0], r\n"
        "hvd_sparse.Compression.topk()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_version() -> None:
    assert hvd_sparse.__version__ == "0.1.0"
