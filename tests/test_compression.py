"""The constructors: what they accept, and how they say what they do not."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvd_sparse
from hvd_sparse import Compression, ConfigError
from hvd_sparse import compression as constructors
from hvd_sparse.engine import Method, TensorSpec
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.methods import METHODS
from hvd_sparse.transports import Transport, run_ranks

REQUIRED: dict[str, dict[str, Any]] = {"hard_threshold": {"threshold": 0.1}}


@pytest.mark.parametrize("constructor", METHODS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("density", 0, r"density must be in \(0, 1\], got 0"),
        ("density", 1.5, r"density must be in \(0, 1\], got 1.5"),
        ("density", float("nan"), r"density must be in \(0, 1\], got nan"),
        ("density", "many", r"density must be in \(0, 1\], got 'many'"),
        ("density", True, r"density must be in \(0, 1\], got True"),
        ("transport", "pigeon", "transport must be one of .*gloo.*; got 'pigeon'"),
        ("wire", "float8", "wire must be one of auto, float32.*qsgd4.gap.*; got 'float8'"),
        ("bucket_numel", 0, "bucket_numel must be a whole number of at least 1, got 0"),
        ("bucket_numel", 1.5, "bucket_numel must be a whole number of at least 1, got 1.5"),
        ("dense_below", -1, "dense_below must be a whole number of at least 0, got -1"),
        ("timeout_s", 0, "timeout_s must be from 0.001 to 2000000 seconds, got 0"),
        ("timeout_s", float("nan"), "timeout_s must be from 0.001 to 2000000 seconds, got nan"),
        ("timeout_s", float("inf"), "timeout_s must be from 0.001 to 2000000 seconds, got inf"),
        ("busy_timeout_s", 1e30, "busy_timeout_s must be from .* to .* seconds, got 1e.30"),
        ("warmup_epochs", float("inf"), "warmup_epochs must be a finite number of at least 0"),
        ("wire", ["float16"], "wire must be one of auto, float32, .*; got .'float16'."),
        ("momentum", 1.0, r"momentum must be in \[0, 1\), got 1.0"),
        ("momentum", float("nan"), r"momentum must be in \[0, 1\), got nan"),
        ("nesterov", 1, "nesterov must be True or False, got 1"),
        ("clip_norm", 0.0, "clip_norm must be a finite number above 0, got 0.0"),
        ("warmup", "slow", "warmup must be one of exponential, linear, constant; got 'slow'"),
        ("warmup_density", 0.0, r"warmup_density must be in \(0, 1\], got 0.0"),
        ("warmup_steps", -1, "warmup_steps must be a whole number of at least 0, got -1"),
        ("dense_steps", 0.5, "dense_steps must be a whole number of at least 0, got 0.5"),
        ("warmup_epochs", 4, "steps_per_epoch must be given with warmup_epochs"),
        ("warmup_steps", 10**17, "warmup_steps and warmup_epochs must be at most 9.* steps"),
        ("wire", "morse", "wire must be one of .*; got 'morse'"),
    ],
)
def test_arguments_out_of_range_are_named(
    constructor: str, name: str, value: Any, message: str
) -> None:
    arguments = {**REQUIRED.get(constructor, {}), name: value}
    with pytest.raises(ConfigError, match=message):
        getattr(Compression, constructor)(**arguments)


@pytest.mark.parametrize(
    ("constructor", "name", "value", "message"),
    [
        ("dgc", "sample_share", 0, r"sample_share must be in \(0, 1\], got 0"),
        ("dgc", "collective", "ring", "collective must be one of .*; got 'ring'"),
        ("dragonn", "slots_per_bucket", 4, "slots_per_bucket must be 1 or 8, got 4"),
        ("dragonn", "slots_per_bucket", 8.0, "slots_per_bucket must be a whole .* got 8.0"),
        (
            "dragonn",
            "slots_per_bucket",
            True,
            "slots_per_bucket must be a whole .* got True",
        ),
        ("dragonn", "slots_per_entry", 0, "slots_per_entry must be above 0 and at most 100, got 0"),
        (
            "dragonn",
            "slots_per_entry",
            1e12,
            "slots_per_entry must be .* at most 100, got 1000000000000",
        ),
        ("exdyna", "tolerance", -0.1, r"tolerance must be in \[0, 1\), got -0.1"),
        ("mstopk", "tolerance", 1.0, r"tolerance must be in \[0, 1\), got 1.0"),
        ("oktopk", "tolerance", 1, r"tolerance must be in \[0, 1\), got 1"),
        ("exdyna", "dynamic", 1, "dynamic must be True or False, got 1"),
        ("mstopk", "halvings", 0, "halvings must be a whole number of at least 1, got 0"),
        ("sidco", "tolerance", -1, r"tolerance must be in \[0, 1\), got -1"),
        ("topk", "collective", "oktopk,auto", "collective must be one of .*; got 'auto'"),
        ("topk", "collective", "oktopk,index_union", "collective must be .*; got 'index_union'"),
        ("gaussiank", "sample_share", 2.0, r"sample_share must be in \(0, 1\], got 2.0"),
        ("hard_threshold", "threshold", 0.0, "threshold must be a finite number above 0"),
        ("randomk", "seed", -1, "seed must be a whole number of at least 0, got -1"),
        ("topk", "group_numel", 0, "group_numel must be a whole number of at least 1, got 0"),
    ],
)
def test_own_arguments_out_of_range_are_named(
    constructor: str, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(Compression, constructor)(**{name: value})


@pytest.mark.parametrize("constructor", METHODS)
def test_constructors_show_and_describe_all_their_arguments(constructor: str) -> None:
    function = getattr(Compression, constructor)
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        assert parameter.annotation is not parameter.empty, name
        assert f"    {name}: " in (function.__doc__ or ""), name
    assert {"density", "momentum", "warmup_steps", "transport"} <= signature.parameters.keys()
    compression = function(**REQUIRED.get(constructor, {}))
    copy = pickle.loads(pickle.dumps(compression))
    assert copy.method.description == compression.method.description
    assert type(copy.method.selector()) is type(compression.method.selector())


MISTAKES = {
    "topk(densty=0.5)": 'Unexpected keyword argument "densty"; did you mean "density"?',
    "oktopk(wire=7)": 'Argument "wire" has incompatible type "int"; expected "str"',
    "randomk(transport=7)": 'Argument "transport" has incompatible type "int"; expected "str"',
    "sidco(None, 0.5)": "Too many positional arguments",
    "dgc(nn.Linear(2, 2))": 'Argument 1 has incompatible type "Linear"',
    "hard_threshold()": 'Missing named argument "threshold"',
}


@pytest.mark.slow
def test_a_type_checker_sees_the_arguments(tmp_path: Path) -> None:
    lines = ["from torch import nn", "from hvd_sparse import Compression, dgc_sgd", ""]
    lines += [f"Compression.{mistake}" for mistake in MISTAKES]
    lines += ["named = nn.Linear(2, 2).named_parameters()", "dgc_sgd(named, lr=0.1, densty=1)"]
    lines += ['Compression.topk(named, density=1, wire="float16", record="run.jsonl").stats()']
    script = tmp_path / "train.py"
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    root = Path(hvd_sparse.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    told = [*MISTAKES.values(), 'Unexpected keyword argument "densty"']
    for message in told:
        assert any(message in error for error in errors), (message, done.stdout, done.stderr)
    assert {int(error.split(":")[1]) for error in errors} == {4, 5, 6, 7, 8, 9, 11}


@pytest.mark.parametrize("name", METHODS)
def test_the_arguments_that_type_checkers_see_are_those_that_are_taken(name: str) -> None:
    seen = inspect.signature(vars(constructors)[f"_{METHODS[name].__name__[: -len('Options')]}"])
    taken = inspect.signature(getattr(Compression, name))
    assert {p.name: (p.default, p.kind) for p in seen.parameters.values()} == {
        p.name: (p.default, p.kind) for p in taken.parameters.values()
    }


def test_every_method_has_a_constructor() -> None:
    assert {name for name in METHODS if hasattr(Compression, name)} == set(METHODS)
    assert all(getattr(Compression, name).__name__ == name for name in METHODS)


def test_descriptions_differ_where_anything_does() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"density": 0.02},
        {"momentum": 0.5},
        {"nesterov": True},
        {"clip_norm": 1.0},
        {"warmup_steps": 7},
        {"dense_steps": 7},
        {"warmup": "linear"},
        {"wire": "float16"},
        {"sample_share": 0.5},
        {"collective": "oktopk"},
    ]
    told = [Compression.dgc(**change).method.description for change in changes]
    assert len(set(told)) == len(told)


def test_numbers_of_other_libraries_are_pythons_from_then_on() -> None:
    """All ranks describe them alike, and recordings and plans can hold them."""
    plain = Compression.topk(density=0.25, bucket_numel=1 << 20, clip_norm=1.0).method
    others = {"density": Fraction(1, 4), "bucket_numel": np.int64(1 << 20), "clip_norm": 1}
    method = Compression.topk(**others).method
    assert isinstance(method, Method)
    assert method.description == plain.description
    assert json.dumps([method.density, method.bucket_numel])


def test_a_set_of_collectives_has_each_algorithm_once() -> None:
    given, same = "topk_dsa,oktopk,ssar_split_allgather", "ssar_split_allgather,oktopk"
    methods = [Compression.topk(collective=each).method for each in (given, same)]
    assert methods[0].description == methods[1].description


def test_warmups() -> None:
    def densities(steps: range, **arguments: Any) -> list[float]:
        method = Compression.topk(density=0.001, **arguments).method
        assert isinstance(method, Method)
        return [method.k(10**6, step) / 10**6 for step in steps]

    assert densities(range(0, 6), warmup_steps=4) == pytest.approx(
        [0.25, 0.062872, 0.015811, 0.003976, 0.001, 0.001]
    )  # DGC's 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %
    assert densities(range(0, 6, 2), warmup="linear", warmup_steps=4) == pytest.approx(
        [0.25, 0.1255, 0.001]
    )
    assert densities(range(4), warmup="constant", warmup_steps=2, warmup_density=0.1) == (
        pytest.approx([0.1, 0.1, 0.001, 0.001])
    )
    assert densities(range(3), dense_steps=1, warmup_steps=1) == pytest.approx([1.0, 0.25, 0.001])
    epochs = {"dense_epochs": 1, "warmup_epochs": 0.5, "steps_per_epoch": 2}
    assert densities(range(4), **epochs) == pytest.approx([1.0, 1.0, 0.25, 0.001])
    assert densities(range(2), warmup_steps=2, warmup_density=1e-4) == [0.001, 0.001]


def test_a_warmup_of_more_steps_than_can_be_counted() -> None:
    for phase in ("warmup", "dense"):
        with pytest.raises(ConfigError, match=f"{phase}_steps and {phase}_epochs must be at most"):
            Compression.dgc(**{f"{phase}_epochs": 1e308}, steps_per_epoch=1000)


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
        Compression.oktopk(**{name: value})


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match=r"collective must be one of auto, topk_allgather.*ring"):
        Compression.topk(collective="ring")
    with pytest.raises(TypeError, match=r"Compression.topk has no argument 'sparsity'; see help"):
        Compression.topk(sparsity=0.99)
    with pytest.raises(TypeError, match=r"no argument 'densty': did you mean 'density'\?"):
        Compression.oktopk(densty=0.1)
    with pytest.raises(TypeError, match=r"hard_threshold: missing a .*: 'threshold'"):
        Compression.hard_threshold()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (nn.Linear(2, 2), "got a Linear"),
        (nn.Linear(2, 2).weight, "got a Parameter"),
        (list(nn.Linear(2, 2).parameters()), "got a Parameter among them"),
        (nn.Linear(2, 2).state_dict(), "got a str among them"),
        ([("w",)], "got a tuple among them"),
        (7, "got a int"),
    ],
)
def test_what_are_no_named_parameters(given: Any, told: str) -> None:
    wanted = r"must be pairs of name and parameter, as model.named_parameters\(\), "
    policy = {"version": 1, "rules": [{"compress": "never"}]}
    makers = (
        Compression.topk,
        lambda named: Compression.from_policy(policy, named),
        lambda named: hvd_sparse.dgc_sgd(named, lr=0.1),
    )
    for make in makers:
        with pytest.raises(ConfigError, match=wanted + told):
            make(given)


@pytest.mark.parametrize("constructor", METHODS)
def test_nesterov_needs_a_momentum(constructor: str) -> None:
    arguments = {**REQUIRED.get(constructor, {}), "momentum": 0.0, "nesterov": True}
    with pytest.raises(ConfigError, match="nesterov must be False where momentum is 0, got True"):
        getattr(Compression, constructor)(**arguments)


def test_a_constructor_that_was_not_called_leaves_strangers_alone() -> None:
    tensor = torch.ones(5)
    handed, context = Compression.oktopk.compress(tensor)
    assert handed is tensor
    assert Compression.oktopk.decompress(handed, context) is tensor


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
    with pytest.warns(UserWarning, match="reduced densely"):
        handed, context = compression.compress(tensor)
    assert handed is tensor
    assert compression.decompress(handed, context) is tensor


def test_a_methods_identity_is_its_name_and_options() -> None:
    half, same, tenth = (METHODS["topk"](density=density).make() for density in (0.5, 0.5, 0.1))
    assert half.id == same.id
    assert half.id != tenth.id
    assert half.id.short == "topk collective=auto density=0.5"
    assert MethodId.from_json(json.loads(json.dumps(half.id.to_json()))) == half.id


def test_a_buckets_state_fits_its_method_and_tensors_alone() -> None:
    def worker(transport: Transport) -> None:
        method = METHODS["oktopk"](density=0.5).make()
        spec = TensorSpec("w", (10,), "torch.float32")
        bucket = Bucket((spec,), method, transport, torch.device("cpu"))
        state = bucket.state_dict()
        assert bucket.fits(state)
        assert not bucket.fits({**state, "kind": state["kind"].replace("0.5", "0.1")})
        assert not bucket.fits({**state, "names": ["v"]})

    run_ranks(2, worker)


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
        "from hvd_sparse.streams import SparseStream\n"
        "s = SparseStream(torch.tensor([1, 5], dtype=torch.int32), torch.ones(2), 9)\n"
        "r = run_ranks(2, lambda t: OkTopk(t, 9, 2).reduce(s), timeout_s=20)\n"
        "assert r[0].reduced.values.tolist() == [2.0, 2.0], r\n"
        "hvd_sparse.Compression.topk()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
