"""The wire: how parts of a vector become messages, and who keeps what rounding loses."""

from hvd_sparse.wire.base import Packer, Wire, sum_of
from hvd_sparse.wire.compact import INDEX_FORMS, CompactWire, make_wire
from hvd_sparse.wire.plain import PLAIN, PlainWire
from hvd_sparse.wire.values import VALUE_CODECS

__all__ = [
    "INDEX_FORMS",
    "PLAIN",
    "VALUE_CODECS",
    "CompactWire",
    "Packer",
    "PlainWire",
    "Wire",
    "make_wire",
    "sum_of",
]
