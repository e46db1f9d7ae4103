"""The operations on CPU tensors through the C++ library, `hvd_sparse/_native.so`.

The arguments are as `hvd_sparse.ops` has checked them. Calls release the GIL, and may come from
several threads at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import (
    Structure,
    addressof,
    byref,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from hvd_sparse.magnitude import threshold_key
from hvd_sparse.ops._arguments import DTYPE_CODES, GAP_BLOCK, MAX_NUMEL, Entries, bad_index
from hvd_sparse.ops.accumulation import Accumulation

LIBRARY_PATH = Path(__file__).resolve().parents[1] / "_native.so"
ISA_NAMES = ("portable", "avx2", "avx512")

SIGNATURES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "abi_version": (),
        "isa": (),
        "set_isa": (c_int32,),
        # selection
        "accumulate_select": (c_void_p, c_uint32, c_int64, c_int64, c_int32, c_void_p),
        "hash_select": (c_void_p, c_uint32, c_int64, c_int32, c_uint64, c_int32, c_void_p),
        "accumulate_group_topk": (c_void_p, c_int64, c_int64, c_int32, c_void_p),
        "take": (c_void_p, c_void_p, c_int64, c_int32),
        "accumulate_topk": (c_void_p, c_int64, c_int32) + (c_void_p,) * 4,
        "sample_accumulator": (c_void_p, c_int64, c_int64, c_uint64, c_int32, c_void_p),
        # streams
        "merge_sum": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
        "difference": (c_void_p, c_void_p, c_int64, c_void_p, c_int64) + (c_void_p,) * 3,
        "threshold_stream": (c_void_p, c_void_p, c_int64, c_uint32) + (c_void_p,) * 3,
        "scatter_add": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int32),
        "take_at": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_void_p),
        "decode": (c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_int64, c_int32),
        # wire
        "gap_encode": (c_void_p, c_int64, c_int32, c_void_p, c_void_p),
        "gap_decode": (c_void_p, c_int64, c_int64, c_int32, c_int32, c_void_p),
        "qsgd_quantize": (c_void_p, c_int64, c_int32, c_int64, c_uint64, c_int32) + (c_void_p,) * 2,
        "qsgd_dequantize": (c_void_p, c_void_p, c_int64, c_int32, c_int64, c_int32, c_void_p),
        # hosts
        "sum_vectors": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_int32),
        "post": (c_void_p, c_int64),
        "posted": (c_void_p, c_int64, c_int64, c_void_p),
    }
)
"""Arguments of the C functions, without their prefix `hvds_`; each returns an int32."""

_ABI_VERSION = 10
_OK, _BAD_INDEX, _BAD_ARGUMENT = 0, 2, 3


class NativeOps:
    """The library, loaded; a call uses so many threads at most, or as many as torch does by then.

    Raises:
        OSError: There is no such library, or it was built from another version of the sources.
    """

    def __init__(self, path: Path = LIBRARY_PATH, threads: int | None = None) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {}
        for name, arguments in SIGNATURES.items():
            function = getattr(library, f"hvds_{name}", None)
            if function is None:
                raise OSError(f"{path} has no function hvds_{name}: build it again")
            function.argtypes = arguments
            function.restype = c_int32
            self._functions[name] = function
        self._threads = threads
        version = self._functions["abi_version"]()
        if version != _ABI_VERSION:
            raise OSError(f"{path} has interface {version}, not {_ABI_VERSION}: build it again")

    @property
    def isa(self) -> str:
        """The instruction set in use: one of `ISA_NAMES`."""
        return ISA_NAMES[self._functions["isa"]()]

    def set_isa(self, name: str) -> None:
        """Switches to another instruction set, for tests; ValueError if the processor lacks it."""
        code = ISA_NAMES.index(name) if name in ISA_NAMES else -1
        if self._functions["set_isa"](code) != _OK:
            raise ValueError(f"name must be an instruction set of this processor, got {name!r}")

    def _call(self, name: str, *arguments: object, what: str = "", numel: int = 0) -> None:
        """Calls a function, and raises if it refuses `what`: indices that belong in [0, numel)."""
        status = self._functions[name](*arguments)
        if status == _OK:
            return
        if status == _BAD_INDEX:
            raise bad_index(what, numel)
        if status == _BAD_ARGUMENT:
            raise ValueError("the native library refused its arguments")
        raise MemoryError("the native library ran out of memory")

    def _thread_count(self) -> int:
        return torch.get_num_threads() if self._threads is None else self._threads

    # -- selection ---------------------------------------------------------------------------------

    def accumulate_select(
        self, accumulation: Accumulation, threshold: float, start: int = 0, stop: int | None = None
    ) -> Entries:
        stop = accumulation.numel if stop is None else stop
        key = threshold_key(threshold)
        return self._select("accumulate_select", accumulation, key, start, stop)

    def hash_select(
        self,
        accumulation: Accumulation,
        threshold: float,
        slots: int,
        slots_per_bucket: int,
        seed: int,
    ) -> Entries:
        key, buckets = threshold_key(threshold), slots // slots_per_bucket
        return self._select("hash_select", accumulation, key, buckets, slots_per_bucket, seed)

    def accumulate_group_topk(
        self, accumulation: Accumulation, k: int, group_numel: int = 512
    ) -> Entries:
        return self._select("accumulate_group_topk", accumulation, k, group_numel)

    def accumulate_topk(self, accumulation: Accumulation, k: int) -> tuple[Tensor, Tensor, float]:
        room, threshold = _Room(min(k, accumulation.numel)), c_float()
        self._call(
            "accumulate_topk",
            *(byref(_AccumulationStruct(accumulation)), k, self._thread_count()),
            *(*room.arguments, byref(threshold)),
        )
        return *room.entries(), threshold.value

    def _select(self, name: str, accumulation: Accumulation, *arguments: object) -> Entries:
        """Selects, and takes what this thread's workspace then holds."""
        nnz, threads = c_int64(), self._thread_count()
        struct = _AccumulationStruct(accumulation)
        self._call(name, byref(struct), *arguments, threads, byref(nnz))
        room = _Room(nnz.value)
        self._call("take", *room.arguments[:2], nnz, threads)
        return room.indices, room.values

    def sample_accumulator(
        self, accumulation: Accumulation, runs: int, run_numel: int, seed: int
    ) -> Tensor:
        sample = torch.empty(runs * run_numel, dtype=torch.float32, device="cpu")
        struct, form = _AccumulationStruct(accumulation), (runs, run_numel, seed)
        threads = self._thread_count()
        self._call("sample_accumulator", byref(struct), *form, threads, sample.data_ptr())
        return sample

    # -- streams -----------------------------------------------------------------------------------

    def merge_sum(self, streams: Sequence[Entries], numel: int) -> Entries:
        table = [number for stream in streams for number in _entries(*stream)]
        room = _Room(sum(table[2::3]))
        merged = (c_int64 * len(table))(*table), len(streams), numel, self._thread_count()
        what = "the indices of every stream"
        self._call("merge_sum", *merged, *room.arguments, what=what, numel=numel)
        return room.entries()

    def difference(self, indices: Tensor, values: Tensor, other: Tensor) -> Entries:
        room = _Room(indices.numel())
        self._call("difference", *_entries(indices, values), *_span(other), *room.arguments)
        return room.entries()

    def threshold_stream(self, indices: Tensor, values: Tensor, threshold: float) -> Entries:
        room, key = _Room(indices.numel()), threshold_key(threshold)
        self._call("threshold_stream", *_entries(indices, values), key, *room.arguments)
        return room.entries()

    def scatter_add(self, x: Tensor, indices: Tensor, values: Tensor) -> None:
        arguments = *_span(x), *_entries(indices, values), self._thread_count()
        self._call("scatter_add", *arguments, what="indices", numel=x.numel())

    def decode(self, out: Tensor, indices: Tensor, values: Tensor) -> None:
        into = out.data_ptr(), DTYPE_CODES[out.dtype], out.numel()
        arguments = *into, *_entries(indices, values), self._thread_count()
        self._call("decode", *arguments, what="indices", numel=out.numel())

    def take_at(self, x: Tensor, indices: Tensor) -> Tensor:
        values = torch.empty(indices.numel(), dtype=torch.float32, device="cpu")
        arguments = *_span(x), *_span(indices), self._thread_count(), values.data_ptr()
        self._call("take_at", *arguments, what="indices", numel=x.numel())
        return values

    # -- wire --------------------------------------------------------------------------------------

    def gap_encode(self, indices: Tensor, start: int) -> Tensor:
        nnz, used = indices.numel(), c_int64()
        widths = -(-nnz // GAP_BLOCK)
        code = torch.empty(widths + 4 * nnz, dtype=torch.uint8, device="cpu")
        arguments = *_span(indices), start, code.data_ptr(), byref(used)
        self._call("gap_encode", *arguments, what=f"indices from {start} on", numel=MAX_NUMEL)
        return code[: used.value]

    def gap_decode(self, code: Tensor, nnz: int, start: int, stop: int) -> Tensor:
        what = f"the {nnz} indices of a code"
        if code.numel() < -(-nnz // GAP_BLOCK):  # before there is room for so many
            raise bad_index(what, stop)
        indices = torch.empty(nnz, dtype=torch.int32, device="cpu")
        arguments = *_span(code), nnz, start, stop, indices.data_ptr()
        self._call("gap_decode", *arguments, what=what, numel=stop)
        return indices

    def qsgd_quantize(self, x: Tensor, bits: int, bucket_numel: int, seed: int) -> Entries:
        codes = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8, device="cpu")
        scales = torch.empty(-(-x.numel() // bucket_numel), dtype=torch.float32, device="cpu")
        form = bits, bucket_numel, seed, self._thread_count()
        self._call("qsgd_quantize", *_span(x), *form, codes.data_ptr(), scales.data_ptr())
        return codes, scales

    def qsgd_dequantize(
        self, codes: Tensor, scales: Tensor, numel: int, bits: int, bucket_numel: int
    ) -> Tensor:
        x = torch.empty(numel, dtype=torch.float32, device="cpu")
        form = numel, bits, bucket_numel, self._thread_count()
        self._call("qsgd_dequantize", codes.data_ptr(), scales.data_ptr(), *form, x.data_ptr())
        return x

    # -- hosts -------------------------------------------------------------------------------------

    def sum_vectors(self, out: Tensor, vectors: Sequence[Tensor]) -> None:
        dtype = DTYPE_CODES[vectors[0].dtype]
        summed = _table(vectors), len(vectors), dtype
        self._call("sum_vectors", *_span(out), *summed, self._thread_count())

    def post(self, place: Tensor, number: int) -> None:
        self._call("post", place.data_ptr(), number)

    def posted(self, places: Sequence[Tensor], number: int) -> bool:
        found = c_int32()
        self._call("posted", _table(places), len(places), number, byref(found))
        return bool(found.value)


class _AccumulationStruct(Structure):
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
            segments=addressof(self._segments),
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


class _Room:
    """Room for a stream, which a C function fills: its last `arguments` say where."""

    def __init__(self, capacity: int) -> None:
        self.indices = torch.empty(capacity, dtype=torch.int32, device="cpu")
        self.values = torch.empty(capacity, dtype=torch.float32, device="cpu")
        self._nnz = c_int64()
        self.arguments = (self.indices.data_ptr(), self.values.data_ptr(), byref(self._nnz))

    def entries(self) -> Entries:
        nnz = self._nnz.value
        if nnz == self.indices.numel():
            return self.indices, self.values
        return self.indices[:nnz], self.values[:nnz]


def _entries(indices: Tensor, values: Tensor) -> tuple[int, int, int]:
    return indices.data_ptr(), values.data_ptr(), indices.numel()


def _span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.numel()


def _table(tensors: Sequence[Tensor]) -> object:
    return (c_int64 * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
