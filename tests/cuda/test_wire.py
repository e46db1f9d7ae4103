"""The wire's kernels, run on the CPU (shim/shim.h), against the reference."""

from __future__ import annotations

import pytest
import torch

from hvd_sparse.ops import reference
from hvd_sparse.ops.cuda import CudaOps
from tests.ops.cases import assert_same, generator, vectors
from tests.ops.test_wire import INDICES, TOP, ascending

pytestmark = pytest.mark.slow  # the stand-in compiles every kernel

SEED = 2**63 + 12345


@pytest.mark.parametrize("name", INDICES)
def test_gaps(cuda: CudaOps, name: str) -> None:
    indices, start = INDICES[name]
    code = cuda.gap_encode(indices, start)
    assert_same(code, reference.gap_encode(indices, start))
    assert_same(cuda.gap_decode(code, indices.numel(), start, TOP), indices)


def test_gaps_refuse_what_does_not_ascend(cuda: CudaOps) -> None:
    backwards = torch.cat([torch.arange(128), torch.arange(127, 200)]).int()
    for indices, start in ((ascending(3, 3), 0), (ascending(4), 5), (backwards, 0)):
        with pytest.raises(ValueError, match="strictly ascending"):
            cuda.gap_encode(indices, start)


def test_gaps_refuse_a_code_of_something_else(cuda: CudaOps) -> None:
    indices, start = INDICES["random"]
    code, nnz = cuda.gap_encode(indices, start), indices.numel()
    wide = code.clone()
    wide[0] = 40
    for bad, count, stop in (
        (code[:-1].clone(), nnz, TOP),
        (torch.cat([code, code[:1]]), nnz, TOP),
        (code, nnz - 1, TOP),
        (code, nnz, int(indices[-1])),
        (code[:10].clone(), nnz, TOP),
        (wide, nnz, TOP),
    ):
        with pytest.raises(ValueError, match="of a code"):
            cuda.gap_decode(bad, count, start, stop)


@pytest.mark.parametrize("bucket_numel", [512, 1024])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd(cuda: CudaOps, bits: int, bucket_numel: int) -> None:
    for numel in (0, 1, 5, 513, 9001):
        small = ("next to denormal", torch.randn(numel, generator=generator()) * 1e-37, None)
        huge = ("next to infinite", torch.randn(numel, generator=generator()) * 1e38, None)
        for name, x, _ in [*vectors(numel), small, huge]:
            codes, scales = cuda.qsgd_quantize(x, bits, bucket_numel, SEED)
            expected = reference.qsgd_quantize(x, bits, bucket_numel, SEED)
            assert_same((codes, scales), expected, name)
            assert_same(
                cuda.qsgd_dequantize(codes, scales, numel, bits, bucket_numel),
                reference.qsgd_dequantize(*expected, numel, bits, bucket_numel),
                name,
            )


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_keeps_the_largest_values_finite(cuda: CudaOps, bits: int) -> None:
    x = torch.tensor([3.4028235e38, -3.4028235e38, 3.402e38, 1.0])
    quantised = cuda.qsgd_quantize(x, bits, 512, SEED)
    assert_same(quantised, reference.qsgd_quantize(x, bits, 512, SEED))
    assert bool(cuda.qsgd_dequantize(*quantised, 4, bits, 512).isfinite().all())
