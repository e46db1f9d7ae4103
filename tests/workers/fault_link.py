"""Two hosts whose link is cut in the middle of a training, over real Horovod.

Every gradient is a whole number: see `adapter_ledger.py`. Rank 0 writes a file when the link is to
be cut.
"""

from __future__ import annotations

import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import nn

from hvd_sparse import Compression

TIMEOUT_S = 10.0
CUT_STEP = 5
CUT_FOR_S = 4.0
"""Less than the timeout: nobody is given up."""
STEPS = 40
STEP_S = 0.05
"""The link is down before the steps are done."""


def train(cut: str) -> None:
    """Train while the test cuts the link, and balance the books."""
    model = nn.Module()
    model.large = nn.Parameter(torch.zeros(3000))
    model.bias = nn.Parameter(torch.zeros(30))
    compression = Compression.oktopk(model.named_parameters(), density=0.02, timeout_s=TIMEOUT_S)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Sum,
    )
    brought = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(hvd.rank())
    longest_s = 0.0
    for step in range(STEPS):
        if step == CUT_STEP and hvd.rank() == 0:
            Path(cut).touch()
        began_at = time.monotonic()
        time.sleep(STEP_S)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for name, p in model.named_parameters():
            gradient = torch.randint(-9, 10, p.shape, generator=generator).float()
            brought[name] += gradient
            loss = loss + (p * gradient).sum()
        try:
            loss.backward()
            optimizer.step()
        except HorovodInternalError as error:
            print(f"FAILED after {time.monotonic() - began_at:.1f} s: {error}", flush=True)
            raise
        longest_s = max(longest_s, time.monotonic() - began_at)
    residual = compression.state_dict()["residual"]
    for name, p in model.named_parameters():
        left = residual.get(name, torch.zeros_like(p))
        total = hvd.allreduce(brought[name], op=hvd.Sum, name=f"link.brought.{name}")
        held = hvd.allreduce(left, op=hvd.Sum, name=f"link.held.{name}")
        assert torch.equal(held - p.detach(), total), name
    print(f"BALANCED, the longest step took {longest_s:.1f} s", flush=True)
    compression.close()
