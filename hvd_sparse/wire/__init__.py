"""The wire: how parts of a vector become messages, and who keeps what rounding loses."""

from hvd_sparse.wire.compact import WIRES, CompactWire
from hvd_sparse.wire.messages import Packer, Wire
from hvd_sparse.wire.plain import PLAIN, PlainWire

__all__ = [
    "PLAIN",
    "WIRES",
    "CompactWire",
    "Packer",
    "PlainWire",
    "Wire",
]
