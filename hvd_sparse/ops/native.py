"""The operations on CPU tensors through the C++ library, `hvd_sparse/_native.so`.

The arguments are as `hvd_sparse.ops` has checked them. Calls release the GIL, and may come from
several threads at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p, cast
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.magnitude import pivot_key, threshold_key
from hvd_sparse.ops._arguments import DTYPE_CODES, MAX_NUMEL, bad_index
from hvd_sparse.ops.accumulation import Accumulation

# MERGED ops.native._library
# The C++ library, `hvd_sparse/_native.so`, and what all families of its functions need.

LIBRARY_PATH = Path(__file__).resolve().parents[1] / "_native.so"
ISA_NAMES = ("portable", "avx2", "avx512")

Signatures = Mapping[str, tuple[type, ...]]
"""Arguments of a family's C functions, without their prefix `hvds_`; each returns a status."""

_ABI_VERSION = 7
_OK, _BAD_INDEX, _BAD_ARGUMENT = 0, 2, 3


class NativeLibrary:
    """The library, loaded; a family of operations is a subclass that names its functions.

    Args:
        path: The library.
        threads: Most threads that a call uses; None: what torch uses (`torch.get_num_threads()`) at
            the time of the call.

    Raises:
        OSError: There is no such library, or it was built from another version of the sources.
    """

    signatures: ClassVar[Signatures] = {"abi_version": (), "isa": (), "set_isa": (c_int32,)}

    def __init__(self, path: Path = LIBRARY_PATH, threads: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        for family in type(self).__mro__:
            for name, arguments in vars(family).get("signatures", {}).items():
                function = getattr(library, f"hvds_{name}", None)
                if function is None:
                    raise OSError(f"{path} has no function hvds_{name}: build it again")
                function.argtypes = arguments
                function.restype = c_int32
        self._library = library
        self._threads = threads
        version = library.hvds_abi_version()
        if version != _ABI_VERSION:
            raise OSError(f"{path} has interface {version}, not {_ABI_VERSION}: build it again")

    @property
    def isa(self) -> str:
        """The instruction set in use: one of `ISA_NAMES`."""
        return ISA_NAMES[self._library.hvds_isa()]

    def set_isa(self, name: str) -> None:
        """Switches to another instruction set, for tests.

        Raises:
            ValueError: The processor does not have it, or there is none of that name.
        """
        code = ISA_NAMES.index(name) if name in ISA_NAMES else -1
        if self._library.hvds_set_isa(code) != _OK:
            raise ValueError(f"name must be an instruction set of this processor, got {name!r}")

    def _thread_count(self) -> int:
        return torch.get_num_threads() if self._threads is None else self._threads


def empty_stream(nnz: int) -> tuple[Tensor, Tensor]:
    """Room for a stream of `nnz` entries."""
    return torch.empty(nnz, dtype=torch.int32), torch.empty(nnz, dtype=torch.float32)


def first(nnz: int, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The first `nnz` entries of a stream; all of them are the stream itself."""
    return (indices, values) if nnz == indices.numel() else (indices[:nnz], values[:nnz])


def check(status: int, what: str = "", numel: int = 0) -> None:
    """Turns a status into its exception; `what` are the indices that belong in `[0, numel)`."""
    if status == _OK:
        return
    if status == _BAD_INDEX:
        raise bad_index(what, numel)
    if status == _BAD_ARGUMENT:
        raise ValueError("the native library refused its arguments")
    raise MemoryError("the native library ran out of memory")


# MERGED ops.native._accumulation
# What is accumulated, as the C interface takes it.


class AccumulationStruct(Structure):
    """`HvdsAccumulation` of csrc/cpu/api.h. The tensors must outlive it."""

    _fields_: ClassVar = [
        ("residual", c_void_p),
        ("n", c_int64),
        ("segments", c_void_p),
        ("segment_count", c_int64),
        ("buffer", c_void_p),
        ("factor", c_float),
        ("nesterov", c_int32),
        ("before_residual", c_void_p),
        ("before_buffer", c_void_p),
    ]

    def __init__(self, accumulation: Accumulation) -> None:
        table: list[int] = []
        for gradient in accumulation.gradients:
            table += (gradient.data_ptr(), gradient.numel(), DTYPE_CODES[gradient.dtype])
        self._segments = (c_int64 * len(table))(*table)  # kept alive
        super().__init__(
            residual=accumulation.residual.data_ptr(),
            n=accumulation.numel,
            segments=cast(self._segments, c_void_p),
            segment_count=len(accumulation.gradients),
        )
        momentum = accumulation.momentum
        if momentum is not None:
            self.buffer = momentum.buffer.data_ptr()
            self.factor = momentum.factor
            self.nesterov = momentum.nesterov
        before = accumulation.before
        if before is not None:
            self.before_residual = before.residual.data_ptr()
            if before.buffer is not None:
                self.before_buffer = before.buffer.data_ptr()


# MERGED ops.native.estimation
# What a threshold is estimated from.


class NativeEstimation(NativeLibrary):
    """As `hvd_sparse.ops.estimation`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "kth_magnitude": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "sample_accumulator": (c_void_p, c_int64, c_int64, c_int64, c_int32, c_void_p, c_int64),
    }

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """The k-th largest magnitude."""
        magnitude = c_float()
        check(
            self._library.hvds_kth_magnitude(
                x.data_ptr(), x.numel(), k, self._thread_count(), byref(magnitude)
            )
        )
        return magnitude.value

    def sample_accumulator(
        self, accumulation: Accumulation, start: int, stride: int, run: int = 1
    ) -> Tensor:
        """Magnitudes of some of the sums."""
        struct = AccumulationStruct(accumulation)
        whole_strides, rest = divmod(max(0, accumulation.numel - start), stride)
        sample = torch.empty(whole_strides * run + min(rest, run), dtype=torch.float32)
        check(
            self._library.hvds_sample_accumulator(
                byref(struct),
                start,
                stride,
                run,
                self._thread_count(),
                sample.data_ptr(),
                sample.numel(),
            )
        )
        return sample


# MERGED ops.native.selection
# Accumulation and selection: gradients are added, and what is selected moves out.


class NativeSelection(NativeLibrary):
    """As `hvd_sparse.ops.selection`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "accumulate_select": (c_void_p, c_uint32, c_int64, c_int64, c_int32, c_void_p),
        "hash_select": (c_void_p, c_uint32, c_int64, c_int32, *(c_uint64,) * 2, c_int32, c_void_p),
        "accumulate_group_topk": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "take": (c_void_p, c_void_p, c_int64, c_int32),
        "accumulate_topk": (c_void_p, c_int64, c_uint32, c_int32) + (c_void_p,) * 4,
    }

    def accumulate_select(
        self, accumulation: Accumulation, threshold: float
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold."""
        return self.partition_select(accumulation, threshold, 0, accumulation.numel)

    def partition_select(
        self, accumulation: Accumulation, threshold: float, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold in `[start, stop)`."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_accumulate_select,
            accumulation,
            threshold_key(threshold),
            start,
            stop,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        a: int,
        b: int,
    ) -> tuple[Tensor, Tensor]:
        """Moves out what reaches the threshold and finds a free slot."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_hash_select,
            accumulation,
            threshold_key(threshold),
            slots // slots_per_bucket,
            slots_per_bucket,
            a,
            b,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> tuple[Tensor, Tensor]:
        """Moves out the k largest magnitudes of each group."""
        threads = self._thread_count()
        nnz = c_int64()
        self._accumulate(
            self._library.hvds_accumulate_group_topk,
            accumulation,
            k,
            group_numel,
            threads,
            byref(nnz),
        )
        return self._take(nnz.value, threads)

    def accumulate_topk(
        self, accumulation: Accumulation, k: int, pivot: float = 0.0
    ) -> tuple[Tensor, Tensor, float]:
        """Moves out the k largest magnitudes."""
        indices, values = empty_stream(min(k, accumulation.numel))
        nnz, threshold = c_int64(), c_float()
        self._accumulate(
            self._library.hvds_accumulate_topk,
            accumulation,
            k,
            pivot_key(pivot),
            self._thread_count(),
            indices.data_ptr(),
            values.data_ptr(),
            byref(nnz),
            byref(threshold),
        )
        return *first(nnz.value, indices, values), threshold.value

    def _accumulate(
        self, function: Callable[..., int], accumulation: Accumulation, *arguments: object
    ) -> None:
        check(function(byref(AccumulationStruct(accumulation)), *arguments))

    def _take(self, nnz: int, threads: int) -> tuple[Tensor, Tensor]:
        """What this thread's last call has selected."""
        indices, values = empty_stream(nnz)
        check(self._library.hvds_take(indices.data_ptr(), values.data_ptr(), nnz, threads))
        return indices, values


# MERGED ops.native.streams
# Streams, and their way back to a dense vector.


class NativeStreams(NativeLibrary):
    """As `hvd_sparse.ops.streams`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "merge_sum": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
        "difference": (c_void_p, c_void_p, c_int64, c_void_p, c_int64) + (c_void_p,) * 3,
        "unapplied": (c_void_p, c_void_p, c_int64) * 2 + (c_void_p, c_int64) + (c_void_p,) * 3,
        "threshold_stream": (c_void_p, c_void_p, c_int64, c_uint32) + (c_void_p,) * 3,
        "scatter_add": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32),
        "take_at": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_void_p),
        "decode": (c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int32),
    }

    def merge_sum(
        self, streams: Sequence[tuple[Tensor, Tensor]], numel: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of streams, in the order of the list."""
        table: list[int] = []
        room = 0
        for indices, values in streams:
            count = indices.numel()
            table += (indices.data_ptr(), values.data_ptr(), count)
            room += count
        out_indices, out_values = empty_stream(room)
        nnz = c_int64()
        check(
            self._library.hvds_merge_sum(
                (c_int64 * len(table))(*table),
                len(streams),
                numel,
                self._thread_count(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            ),
            "the indices of every stream",
            numel,
        )
        return first(nnz.value, out_indices, out_values)

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """The entries whose index is not in `other`."""
        out_indices, out_values = empty_stream(indices.numel())
        nnz = c_int64()
        check(
            self._library.hvds_difference(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                other.data_ptr(),
                other.numel(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def unapplied(
        self, sent: tuple[Tensor, Tensor], lost: tuple[Tensor, Tensor], applied: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What an exchange leaves with its sender."""
        out_indices, out_values = empty_stream(sent[0].numel() + lost[0].numel())
        nnz = c_int64()
        check(
            self._library.hvds_unapplied(
                sent[0].data_ptr(),
                sent[1].data_ptr(),
                sent[0].numel(),
                lost[0].data_ptr(),
                lost[1].data_ptr(),
                lost[0].numel(),
                applied.data_ptr(),
                applied.numel(),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def threshold_stream(
        self, indices: Tensor, values: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor]:
        """The entries that reach the threshold."""
        out_indices, out_values = empty_stream(indices.numel())
        nnz = c_int64()
        check(
            self._library.hvds_threshold_stream(
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                threshold_key(threshold),
                out_indices.data_ptr(),
                out_values.data_ptr(),
                byref(nnz),
            )
        )
        return first(nnz.value, out_indices, out_values)

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None:
        """Adds a stream to a vector."""
        check(
            self._library.hvds_scatter_add(
                x.data_ptr(),
                x.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            x.numel(),
        )

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        """Writes a stream as a dense vector."""
        check(
            self._library.hvds_decode(
                out.data_ptr(),
                DTYPE_CODES[out.dtype],
                out.numel(),
                indices.data_ptr(),
                values.data_ptr(),
                indices.numel(),
                self._thread_count(),
            ),
            "indices",
            out.numel(),
        )

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor:
        """Moves entries out of a vector."""
        values = torch.empty(indices.numel(), dtype=torch.float32)
        self._take_at(x, indices, values.data_ptr())
        return values

    def zero_at(self, x: Tensor, indices: Tensor) -> None:
        """Zeroes entries of a vector."""
        self._take_at(x, indices, None)

    def _take_at(self, x: Tensor, indices: Tensor, values: int | None) -> None:
        """Zeroes, after copying to the address `values` if there is one."""
        check(
            self._library.hvds_take_at(
                x.data_ptr(),
                x.numel(),
                indices.data_ptr(),
                indices.numel(),
                self._thread_count(),
                values,
            ),
            "indices",
            x.numel(),
        )


# MERGED ops.native.wire
# What goes over the wire.


class NativeWire(NativeLibrary):
    """As `hvd_sparse.ops.wire`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "gap_block": (),
        "gap_encode": (c_void_p, c_int64, c_int32, c_void_p, c_void_p),
        "gap_decode": (c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p),
        "qsgd_quantize": (c_void_p, c_int64, c_int32, c_int64, c_uint64, c_int32) + (c_void_p,) * 2,
        "qsgd_dequantize": (c_void_p, c_void_p, c_int64, c_int32, c_int64, c_int32, c_void_p),
    }

    def gap_encode(self, indices: Tensor, start: int) -> Tensor:
        """Packs ascending indices."""
        nnz = indices.numel()
        widths = -(-nnz // self._library.hvds_gap_block())
        code = torch.empty(widths + 4 * nnz, dtype=torch.uint8)
        used = c_int64()
        check(
            self._library.hvds_gap_encode(
                indices.data_ptr(), nnz, start, code.data_ptr(), byref(used)
            ),
            f"indices from {start} on",
            MAX_NUMEL,
        )
        return code[: used.value]

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
        """Reads packed indices."""
        indices = torch.empty(nnz, dtype=torch.int32)
        check(
            self._library.hvds_gap_decode(
                code.data_ptr(), code.numel(), nnz, start, stop, indices.data_ptr()
            ),
            f"the {nnz} indices of a code",
            stop,
        )
        return indices

    def qsgd_quantize(
        self, x: Tensor, bits: int, bucket_numel: int, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Rounds to levels."""
        codes = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
        scales = torch.empty(-(-x.numel() // bucket_numel))
        check(
            self._library.hvds_qsgd_quantize(
                x.data_ptr(),
                x.numel(),
                bits,
                bucket_numel,
                seed,
                self._thread_count(),
                codes.data_ptr(),
                scales.data_ptr(),
            )
        )
        return codes, scales

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor:
        """The values of levels."""
        x = torch.empty(numel)
        check(
            self._library.hvds_qsgd_dequantize(
                codes.data_ptr(),
                scales.data_ptr(),
                numel,
                bits,
                bucket_numel,
                self._thread_count(),
                x.data_ptr(),
            )
        )
        return x


# MERGED ops.native.hosts
# What the ranks of one host do in memory that they share.


class NativeHosts(NativeLibrary):
    """As `hvd_sparse.ops.shared_memory`, on checked arguments."""

    signatures: ClassVar[Signatures] = {
        "sum_vectors": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32),
        "post": (c_void_p, c_int64),
        "posted": (c_void_p, c_int64, c_int64, c_void_p),
    }

    def sum_vectors(self, out: Tensor, vectors: Sequence[Tensor]) -> None:
        """Sums vectors in the order of the list, in float32."""
        check(
            self._library.hvds_sum_vectors(
                out.data_ptr(),
                out.numel(),
                _addresses(vectors),
                len(vectors),
                DTYPE_CODES[vectors[0].dtype],
                self._thread_count(),
            )
        )

    def post(self, place: Tensor, number: int) -> None:
        """Writes a number, after all that was written before."""
        check(self._library.hvds_post(place.data_ptr(), number))

    def posted(self, places: Sequence[Tensor], number: int) -> bool:
        """Whether all places have a number of at least `number`."""
        found = c_int32()
        check(self._library.hvds_posted(_addresses(places), len(places), number, byref(found)))
        return bool(found.value)


def _addresses(tensors: Sequence[Tensor]) -> object:
    return (c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


class NativeOps(NativeSelection, NativeEstimation, NativeStreams, NativeWire, NativeHosts):
    """The library's functions, one base class for each family of them."""
