"""What stands around the kernels: checks, choice of the implementation, threads and forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hvd_sparse import ops
from hvd_sparse.ops import Accumulation, Before, Momentum, _dispatch, reference
from hvd_sparse.ops.native import NativeOps
from tests.ops.cases import assert_same, generator

F32, I32 = torch.zeros(4), torch.arange(4, dtype=torch.int32)
STRIDED = torch.zeros(8)[::2]
META = torch.zeros(4, device="meta")
STATE = Accumulation(F32)

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Accumulation(F32.double()), TypeError, "residual must be float32"),
    (lambda: Accumulation(F32.view(2, 2)), ValueError, "residual must have shape"),
    (lambda: Accumulation(STRIDED), ValueError, "residual must be contiguous"),
    (lambda: Accumulation([1.0]), TypeError, "residual must be a tensor"),
    (lambda: Accumulation(F32, [F32, F32]), ValueError, "numel 4, got 8"),
    (lambda: Accumulation(F32, [I32]), TypeError, "got int32"),
    (lambda: Accumulation(F32, [STRIDED]), ValueError, "must be contiguous"),
    (lambda: Accumulation(F32, [META]), ValueError, "must be on cpu, got meta"),
    (lambda: Accumulation(F32, [None]), TypeError, r"gradients\[0\] must be a tensor"),
    (lambda: ops.accumulate_select(STATE, -1.0), ValueError, "threshold must be >= 0, got -1.0"),
    (lambda: ops.accumulate_topk(STATE, -1), ValueError, "k must be >= 0, got -1"),
    (lambda: ops.accumulate_topk(STATE, 1.5), TypeError, "k must be an int, got float"),
    (
        lambda: Accumulation(F32, [F32], Momentum(F32[:3], 0.9)),
        ValueError,
        "momentum.buffer must have residual's numel 4, got 3",
    ),
    (
        lambda: Accumulation(F32, [F32], Momentum(F32, 1.0)),
        ValueError,
        r"momentum.factor must be in \[0, 1\), got 1.0",
    ),
    (
        lambda: Accumulation(F32, [], Momentum(F32, 0.9)),
        ValueError,
        "gradients must not be empty where there is momentum",
    ),
    (
        lambda: Accumulation(F32, [F32], 0.9),
        TypeError,
        "momentum must be a Momentum or None, got float",
    ),
    (
        lambda: Accumulation(F32, [F32], before=F32),
        TypeError,
        "before must be a Before or None, got Tensor",
    ),
    (
        lambda: Accumulation(F32, [F32], before=Before(F32[:3])),
        ValueError,
        "before.residual must have residual's numel 4, got 3",
    ),
    (
        lambda: Accumulation(F32, [F32], before=Before(I32)),
        TypeError,
        "before.residual must be float32",
    ),
    (
        lambda: Accumulation(F32, [F32], before=Before(META)),
        ValueError,
        "before.residual must be on cpu",
    ),
    (
        lambda: Accumulation(F32, [F32], before=Before(F32)),
        ValueError,
        "before.residual must not be the tensor that is written, got the same",
    ),
    (
        lambda: Accumulation(F32, [F32], before=Before(F32.clone(), F32)),
        ValueError,
        "before.buffer must be None where there is no momentum",
    ),
    (
        lambda: Accumulation(F32, [F32], Momentum(F32, 0.9), Before(F32.clone())),
        TypeError,
        "before.buffer must be a tensor",
    ),
    (
        lambda: Accumulation(F32, before=Before(F32.clone())),
        ValueError,
        "gradients must not be empty where there is a before",
    ),
    (lambda: ops.accumulate_group_topk(STATE, 5, 4), ValueError, r"k must be in \[1, 4\]"),
    (lambda: ops.accumulate_group_topk(STATE, 1, 0), ValueError, "group_numel must be in"),
    (lambda: ops.accumulate_select(STATE, 1.0, 3, 2), ValueError, r"stop must be in \[3, 4\]"),
    (lambda: ops.accumulate_select(STATE, 1.0, 5, 5), ValueError, r"start must be in \[0, 4\]"),
    (lambda: ops.hash_select(STATE, 1.0, 12, 8, 0), ValueError, "multiple of .* 8, got 12"),
    (lambda: ops.hash_select(STATE, 1.0, 8, 1, 2**64), ValueError, "seed must be in"),
    (lambda: ops.sample_accumulator(STATE, 3, 2, 0), ValueError, r"runs must be in \[0, 2\]"),
    (lambda: ops.sample_accumulator(STATE, 1, 0, 0), ValueError, "run_numel must be in"),
    (lambda: ops.sample_accumulator(STATE, 1, 1, -1), ValueError, "seed must be in"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_arguments(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_gradients_of_any_shape() -> None:
    residual = torch.zeros(7)
    accumulation = Accumulation(residual, [torch.ones(2, 3), torch.tensor(2.0)])
    indices, values = ops.accumulate_select(accumulation, 1.5)
    assert indices.tolist() == [6]
    assert values.tolist() == [2.0]
    assert residual.tolist() == [1.0] * 6 + [0.0]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )


@pytest.mark.slow
def test_backend() -> None:
    print_backend = "from hvd_sparse import ops; print(ops.backend())"
    assert run_python(print_backend, HVD_SPARSE_NATIVE="0").stdout == "reference\n"
    best = run_python(print_backend).stdout
    assert best in {f"native-{isa}\n" for isa in ("portable", "avx2", "avx512")}
    order = [f"native-{isa}\n" for isa in ("portable", "avx2", "avx512")]
    for isa in ("portable", "avx2", "avx512"):
        capped = run_python(print_backend, HVD_SPARSE_ISA=isa).stdout
        assert capped == min(f"native-{isa}\n", best, key=order.index)


def test_missing_library_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NativeOps:
        return NativeOps(Path("/nowhere/_native.so"))

    monkeypatch.setattr(_dispatch, "NativeOps", missing)
    with pytest.warns(UserWarning, match="slow torch reference") as caught:
        assert _dispatch.load() is None
    assert len(caught) == 1


def test_the_reference_serves_what_the_library_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "_native", None)
    assert ops.backend() == "reference"
    assert ops.on_host() is reference
    residual, gradient = torch.randn(2, 1000, generator=generator())
    theirs = residual.clone()
    assert_same(
        ops.accumulate_topk(Accumulation(residual, [gradient]), 9),
        reference.accumulate_topk(Accumulation(theirs, [gradient]), 9),
    )


def work(native: NativeOps, seed: int) -> tuple[torch.Tensor, ...]:
    """Some of everything, large enough for the pool."""
    residual, gradient = torch.randn(2, 300_000, generator=generator(seed))
    one = native.accumulate_select(Accumulation(residual, [gradient]), 3.0)
    two = native.accumulate_topk(Accumulation(residual, [gradient]), 3000)
    merged = native.merge_sum([one, two[:2], one], 300_000)
    out = torch.empty(300_000)
    native.decode(out, *merged)
    return (*one, *two[:2], *merged, out, residual)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_concurrent_calls(threads: int) -> None:
    native = NativeOps(threads=threads)
    expected = [work(native, seed) for seed in range(4)]
    results: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def call(seed: int) -> None:
        for repetition in range(5):
            results[seed, repetition] = work(native, seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 20
    for (seed, repetition), result in results.items():
        assert_same(result, expected[seed], f"seed {seed}, repetition {repetition}")


def test_after_fork() -> None:
    """The parent's pool is gone in the child, whose first call must start another."""
    code = """
import os, signal, torch
from hvd_sparse.ops import Accumulation
from hvd_sparse.ops.native import NativeOps

torch.set_num_threads(1)
native = NativeOps(threads=2)
residual = Accumulation(torch.ones(300_000))
native.accumulate_select(residual, 2.0)
child = os.fork()
if child == 0:
    signal.alarm(60)
    count = native.accumulate_select(residual, 0.5)[0].numel()
    os._exit(0 if count == 300_000 else 1)
assert native.accumulate_select(residual, 0.5)[0].numel() == 300_000
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code).stdout == "0\n"


def test_threads_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def three() -> int:
        asked.append(3)
        return 3

    expected = work(NativeOps(threads=1), 0)
    monkeypatch.setattr(torch, "get_num_threads", three)
    assert_same(work(NativeOps(), 0), expected)
    assert asked
