"""What a rank does that stays away under DDP: its peer ends by one error, soon."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hvd_sparse
from tests.ddp.training import batch, trained
from tests.launch import Launch, horovodrun, launch_environment

pytestmark = [pytest.mark.slow, pytest.mark.launches]

TIMEOUT_S = 4.0
SLACK_S = 45.0
"""Four processes begin on two cores."""

FAULTS = {
    "never": "waited 4 s for the other 1 ranks to connect .*, and rank 1 did not come",
    "fewer": "rank 1",
}
"""What rank 1 does, and what rank 0 has to say; others stand in tests/faults/test_matrix.py."""


def main(fault: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made = hvd_sparse.Compression.topk(
        density=0.1, dense_below=100, timeout_s=TIMEOUT_S, busy_timeout_s=TIMEOUT_S
    )
    with trained(made) as (model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if fault == "never" and dist.get_rank() == 1:
            time.sleep(3 * TIMEOUT_S)
            return
        for step in range(8):
            if step == 4 and dist.get_rank() == 1:
                return
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()


def test_a_peer_says_which_rank_it_was() -> None:
    with ExitStack() as undo:
        survivors: dict[str, Launch] = {}
        for fault in FAULTS:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            command = [sys.executable, "-m", "tests.ddp.test_faults", fault]
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            ranks = [
                undo.enter_context(
                    Launch(command, launch_environment({**place, "RANK": str(rank)}))
                )
                for rank in range(2)
            ]
            survivors[fault] = ranks[0]
        deadline = time.monotonic() + 3 * TIMEOUT_S + SLACK_S
        for fault, survivor in survivors.items():
            try:
                status = survivor.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                survivor.abort()
                raise survivor.error(f"{fault}: rank 0 did not end") from None
            said = survivor.outputs()[1]
            last = [line for line in said.splitlines() if "hvd_sparse.errors" in line][-1:]
            assert status != 0, fault
            assert last, survivor.error(fault)
            assert re.search(FAULTS[fault], last[0]), last


def test_torchrun_restarts_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    horovodrun(
        2,
        "ddp/restarting.py",
        tmp_path,
        controller="torchrun",
        options=["--max-restarts=1", "--monitor-interval=0.1"],
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # or torch itself meets old addresses
    )
    ends = [torch.load(tmp_path / f"{time}.pt", weights_only=True) for time in ("first", "again")]
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name


if __name__ == "__main__":
    main(sys.argv[1])
