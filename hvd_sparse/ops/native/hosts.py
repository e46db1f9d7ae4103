"""What the ranks of one host do in memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor

from hvd_sparse.ops._layout import DTYPE_CODES
from hvd_sparse.ops.native._library import NativeLibrary, Signatures, check


class NativeHosts(NativeLibrary):
    """As `hvd_sparse.ops.hosts`, on checked arguments."""

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
