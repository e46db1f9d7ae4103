"""The wire: how parts of a vector become messages, and who keeps what rounding loses.

A `Wire` encodes a part and decodes it; `Compression(wire="float16+gap")` names one of `WIRES`. A
message starts with the number of entries, or -1 for a dense part. A wire has no state: QSGD draws
by a hash of step, rank, message and place. `expected_bytes` tells the cost model what an index and
a value take. A message may have been damaged: `decode` returns a part whose indices ascend within
its bounds, or raises `MessageError`. Nothing that comes after it checks the part again.

A collective encodes through its `Packer`, which keeps the law of mass: whoever encodes goes on with
what the receivers will read, and keeps the difference. `packer.lost(numel)` is part of what the
collective returns. Where only some entries are applied (Ok-Topk, gTopk), the others go back whole
to the ranks that brought them, and differences are returned for applied indices alone. Where
several ranks encode the same part (recursive doubling), they draw the same numbers, and the first
of them keeps the difference.
"""

from hvd_sparse.wire.compact import WIRES, CompactWire
from hvd_sparse.wire.messages import Packer, Wire
from hvd_sparse.wire.plain import PLAIN, PlainWire
