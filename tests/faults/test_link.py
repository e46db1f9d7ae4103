"""The cable between two hosts is pulled in the middle of a training."""

from __future__ import annotations

import re
import time
from pathlib import Path
from threading import Thread

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import nn

from hvd_sparse import Compression
from tests.launch import horovodrun
from tools.ledger import Ledger
from tools.netlab import Network

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
    ledger = Ledger(model.named_parameters())
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
            ledger.feed({name: gradient})
            loss = loss + (p * gradient).sum()
        try:
            loss.backward()
            optimizer.step()
        except HorovodInternalError as error:
            print(f"FAILED after {time.monotonic() - began_at:.1f} s: {error}", flush=True)
            raise
        longest_s = max(longest_s, time.monotonic() - began_at)
    assert ledger.lost(compression.state_dict()["residual"]) == 0.0
    print(f"BALANCED, the longest step took {longest_s:.1f} s", flush=True)
    compression.close()


pytestmark = [
    pytest.mark.netlab,
    pytest.mark.launches,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

HOSTS = "nl1:1,nl2:1"


def cut_when(file: Path, network: Network, mend_after_s: float | None) -> Thread:
    """Cut the second host off once the file is there."""

    def cut() -> None:
        while not file.exists():
            time.sleep(0.02)
        network.cut("nl2")
        if mend_after_s is not None:
            time.sleep(mend_after_s)
            network.mend("nl2")

    thread = Thread(target=cut, daemon=True)
    thread.start()
    return thread


def test_a_link_that_is_mended_in_time_costs_nothing(netlab: Network, tmp_path: Path) -> None:
    thread = cut_when(tmp_path / "cut", netlab, CUT_FOR_S)
    try:
        done = horovodrun(
            2, train, tmp_path / "cut", hosts=HOSTS, prefix=netlab.on("nl1"), timeout=200
        )
    finally:
        thread.join(2 * CUT_FOR_S)
        netlab.mend("nl2")
    balanced = re.findall(r"BALANCED, the longest step took ([\d.]+) s", done.stdout)
    assert len(balanced) == 2, done.stdout
    assert all(float(s) > CUT_FOR_S / 2 for s in balanced), balanced  # else nothing was cut


def test_a_link_that_stays_cut_ends_both_ranks(netlab: Network, tmp_path: Path) -> None:
    thread = cut_when(tmp_path / "cut", netlab, None)
    try:
        done = horovodrun(
            2,
            train,
            tmp_path / "cut",
            hosts=HOSTS,
            prefix=netlab.on("nl1"),
            timeout=200,
            check=False,
        )
    finally:
        thread.join(1.0)
        netlab.mend("nl2")
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    failed = dict(re.findall(r"\[(\d)\]<stdout>:.*?FAILED after [\d.]+ s: (.*)", output))
    assert re.search(r"rank 1 did not answer within|lost the connection to rank 1", failed["0"])
    seconds = [float(s) for s in re.findall(r"FAILED after ([\d.]+) s", output)]
    assert max(seconds) < TIMEOUT_S + 10.0, seconds
