"""Run under torchrun: a training that a rank's death ends once, and that goes on from its state.

The rank dies when all is done, so that what comes of the second half can be compared.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import hvd_sparse
from tests.ddp.training import batch, trained

STEPS, SAVED = 8, 4


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    made = hvd_sparse.Compression.topk(density=0.05, dense_below=100, timeout_s=10.0)
    with trained(made) as (model, module):
        begin = 0
        if not is_first:
            module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            made.load_checkpoint(folder / "compression")
            begin = SAVED
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(begin, STEPS):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
            if step == SAVED - 1:
                made.save_checkpoint(folder / "compression")
                if dist.get_rank() == 0:
                    torch.save(module.state_dict(), folder / "model.pt")
                dist.barrier()
        if dist.get_rank() == 0:
            torch.save(module.state_dict(), folder / ("first.pt" if is_first else "again.pt"))
        dist.barrier()
        if is_first and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_first:
            model(batch(STEPS)).square().mean().backward()  # and waits for rank 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
