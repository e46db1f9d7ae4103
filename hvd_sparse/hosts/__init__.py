"""Two levels: the ranks of a host sum their gradients densely before the hosts exchange.

The L ranks of a host cut a bucket's vector into L shards, at multiples of 16 elements.

```text
grad ─► reduce_scatter in the host ─► accumulate into the shard's residual ─► select ─► collective
                                                                                       across hosts
p.grad ◄─ decode all shards ◄──────────────────────────── gather in the host ◄────────────┘
```

* `Grid` says which rank is on which host (hosts.py). A `GroupTransport` connects the ranks of a
  host (`Hosts.inside`), another one the ranks with the same local rank (`Hosts.across`).
* `InsideHost` is the exchange inside the host. `SharedHost` (shared.py) uses shared memory;
  `OverDevices` (inside.py) sends gradients from device to device over NCCL. All ranks of a host
  decode the same bytes.
* A state has whole tensors, zero outside the shard, so that the sum over all ranks is as with one
  level. `Bucket.load` adds up what the ranks of a host bring, and keeps the shard. The states of
  selectors and collectives belong to the shard.
* Each rank clips its own gradients before the host sums them. With one host everything is applied,
  since there is no other host to send to.
"""

from hvd_sparse.hosts.hosts import Grid, Hosts, Slot, grid_of
