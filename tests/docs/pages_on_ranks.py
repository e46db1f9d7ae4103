"""Run under horovodrun: the Python blocks of every page, in order, in one namespace per page.

A namespace begins with what a training script has: `model`, `optimizer`, `loader` and `loss_of`. A
block that makes a `DistributedOptimizer`, or a hook for DDP, gets new ones, and two steps are
trained with what it made. Policies of the page are written to policy.yaml where they stand.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_sparse.adapter import SparseCompressor

MODELS = """
from collections import OrderedDict
from torch import nn

def make():
    layers = {"body": nn.Linear(128, 256), "relu": nn.ReLU(), "head": nn.Linear(256, 20)}
    return nn.Sequential(OrderedDict(layers))
"""
"""The module `models` of the pages, and the model that they begin with."""

MAKES_ONE = re.compile(r"DistributedOptimizer\(|ddp\.register\(")
"""What is in a block after which two steps are trained."""


def given() -> dict[str, Any]:
    torch.manual_seed(0)
    models: dict[str, Any] = {}
    exec(MODELS, models)
    model = models["make"]()
    loader = [(torch.randn(8, 128), torch.randint(20, (8,))) for _ in range(3)]
    return {
        "model": model,
        "module": model,
        "DistributedDataParallel": DistributedDataParallel,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": loader,
        "loss_of": nn.functional.cross_entropy,
    }


def train(names: dict[str, Any]) -> None:
    """Two steps with a page's optimizer, on data that its model takes."""
    for data, target in names["loader"][:2]:
        names["optimizer"].zero_grad()
        names["loss_of"](names["model"](data), target).backward()
        names["optimizer"].step()


def close(names: dict[str, Any]) -> None:
    """Close the compressions; the one that a page did not name, too."""
    named = [*names.values(), getattr(names["optimizer"], "_compression", None)]
    for value in named:
        if isinstance(value, SparseCompressor):
            value.close()


def run_page(blocks: list[dict[str, Any]]) -> None:
    names = given()
    if hvd.rank() == 0:
        Path("models.py").write_text(MODELS)
    for block in blocks:
        if block["language"] == "yaml":
            if hvd.rank() == 0:
                Path("policy.yaml").write_text(block["text"])
            hvd.barrier()
            continue
        makes_one = bool(MAKES_ONE.search(block["text"]))
        if makes_one:
            close(names)
            names.update(given())
        try:
            exec(compile(block["text"], block["place"], "exec"), names)
            if makes_one:
                train(names)
        except BaseException:
            print(f"FAILED {block['place']}\n{traceback.format_exc()}", flush=True)
            raise
        if hvd.rank() == 0:
            print(f"RAN {block['place']}", flush=True)
    close(names)


def main() -> None:
    listing = Path(sys.argv[1])
    hvd.init()
    torch.distributed.init_process_group(
        "gloo", f"file://{listing.parent}/store", rank=hvd.rank(), world_size=hvd.size()
    )
    for page, blocks in json.loads(listing.read_text()).items():
        os.chdir(listing.parent / page)
        run_page(blocks)
    hvd.shutdown()


if __name__ == "__main__":
    main()
