"""Train a small transformer on bytes with DistributedDataParallel and AdamW, without Horovod.

    torchrun --nproc-per-node 2 examples/ddp_language_model.py
    torchrun --nproc-per-node 2 examples/ddp_language_model.py --density 0.05 --checkpoint runs/a
    torchrun --nproc-per-node 2 examples/ddp_language_model.py --density 0

A density of 0 trains by plain DDP. Without `--data` it reads the sources of Python's standard
library. With `--checkpoint DIR` it saves at the end, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_sparse

BYTES = 256


class Net(nn.Module):
    """Two layers of causal attention over bytes: 0.9 M parameters at width 192."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(width, BYTES)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: Tensor) -> Tensor:
        inside = self.layers(self.embedding(text) + self.places, mask=self.mask, is_causal=True)
        scores: Tensor = self.out(inside)
        return scores.transpose(1, 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyTorch DDP language model example")
    parser.add_argument("--density", type=float, default=0.01, help="0: plain DDP (default: 0.01)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker (default: 16)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample (default: 64)")
    parser.add_argument("--data", type=Path, nargs="+", help="text files")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    return parser.parse_args()


def load_text(paths: list[Path] | None) -> Tensor:
    paths = paths or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray().join(path.read_bytes() for path in paths)
    return torch.frombuffer(text, dtype=torch.uint8)


def main() -> None:
    args = parse_arguments()
    has_devices = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    dist.init_process_group("nccl" if has_devices else "gloo")  # NCCL wants one for each
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)

    torch.manual_seed(0)
    module = Net(args.width, args.length).to(device)
    model = DistributedDataParallel(module)
    optimizer: Any = torch.optim.AdamW(module.parameters(), lr=args.lr)
    compression = None
    if args.density > 0:
        # hvd_sparse: an optimizer and a compression that fit each other, and one line for DDP.
        optimizer, compression = hvd_sparse.sparse_adamw(
            module.named_parameters(), lr=args.lr, density=args.density, clip_norm=1.0
        )
        hvd_sparse.ddp.register(model, compression)
    if args.checkpoint is not None and (args.checkpoint / "model.pt").exists():
        state = torch.load(args.checkpoint / "model.pt", map_location=device, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if compression is not None:
            compression.load_checkpoint(args.checkpoint / "compression")

    text = load_text(args.data)
    generator = torch.Generator().manual_seed(1 + rank)
    began_at = time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.length, (args.batch_size,), generator=generator)
        rows = torch.stack([text[at : at + args.length + 1] for at in starts.tolist()])
        rows = rows.to(device).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        if compression is None:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    seconds = time.perf_counter() - began_at

    if args.checkpoint is not None:
        if compression is not None:
            compression.save_checkpoint(args.checkpoint / "compression")  # every worker's residuals
        if rank == 0:
            args.checkpoint.mkdir(parents=True, exist_ok=True)
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoint / "model.pt")
    if rank == 0:
        print(f"{args.steps} steps in {seconds:.1f} s")
        if compression is not None:
            print(compression.stats())
    if compression is not None:
        compression.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
