"""Measure images per second of training on random images, with dense or sparse gradients.

    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py
    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --compression "topk density=0.1"
    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --compression policy.yaml

The model is VGG-16 for images of 32 x 32, or any model of torchvision by name, if installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import hvd_sparse

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    # Benchmark settings
    parser = argparse.ArgumentParser(description="PyTorch Synthetic Benchmark")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", "fp16", a policy file, or a constructor: "topk density=0.01 wire=float16"',
    )
    parser.add_argument("--model", default="vgg16-32", help='"vgg16-32", or one of torchvision\'s')
    parser.add_argument("--batch-size", type=int, default=8, help="per worker (default: 8)")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--record", help="write what happens to this file, for `hvd-sparse report`")
    args = parser.parse_args()
    for name in ("batch_size", "num_batches_per_iter", "num_iters"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


def make_model(name: str) -> tuple[nn.Module, int, int]:
    """Make a model; returns it with the size of its images and the number of classes."""
    if name == "vgg16-32":
        layers: list[nn.Module] = []
        inputs = 3
        for width in VGG16:
            if width == 0:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
                inputs = width
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10)), 32, 10
    try:
        from torchvision import models
    except ImportError:
        fail(f"--model {name} needs torchvision: pip install torchvision, or take vgg16-32")
    if name not in models.list_models():
        fail(f"--model: torchvision has no {name!r}")
    return models.get_model(name), 224, 1000


def make_compression(text: str, model: nn.Module, record: str | None) -> Any:
    """Make what `--compression` names: Horovod's own, a policy, or a constructor's result."""
    name, *words = text.split() or ["none"]
    if name in {"none", "fp16"}:
        return getattr(hvd.Compression, name)
    try:
        if name.endswith((".yaml", ".yml")):
            return hvd_sparse.Compression.from_policy(name, model=model, record=record)
        pairs = (word.partition("=") for word in words)
        arguments = {key: yaml.safe_load(value) for key, _, value in pairs}
        constructor = getattr(hvd_sparse.Compression, name)
        return constructor(model.named_parameters(), record=record, **arguments)
    except (AttributeError, TypeError, OSError, hvd_sparse.errors.ConfigError) as error:
        fail(f"--compression {text!r}: {error}")


def main() -> None:
    args = parse_arguments()

    # Horovod: initialize library.
    hvd.init()
    torch.manual_seed(0)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    if use_cuda:
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if use_cuda else "cpu")

    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)

    # Set up the model and fixed random images.
    model, size, classes = make_model(args.model)
    model.to(device)
    data = torch.randn(args.batch_size, 3, size, size, device=device)
    target = torch.randint(classes, (args.batch_size,), device=device)

    # Horovod: scale learning rate by the number of workers.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 * hvd.size())

    # Horovod: (optional) compression algorithm.
    compression = make_compression(args.compression, model, args.record)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def benchmark_step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()

    def log(message: str) -> None:
        # Horovod: print on the first worker only.
        if hvd.rank() == 0:
            print(message, flush=True)

    kind = "GPU" if use_cuda else "CPU"
    numel = sum(p.numel() for p in model.parameters())
    log(f"Model: {args.model}, {numel / 1e6:.1f} M parameters")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    log(f"Compression: {args.compression}")

    # Warm-up
    log("Running warmup...")
    timeit.timeit(benchmark_step, number=args.num_warmup_batches)

    # Benchmark
    log("Running benchmark...")
    img_secs = []
    for x in range(args.num_iters):
        seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
        img_secs.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iter #{x}: {img_secs[-1]:.1f} img/sec per {kind}")

    # Results
    mean, spread = statistics.fmean(img_secs), 1.96 * statistics.pstdev(img_secs)
    log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
    total, total_spread = hvd.size() * mean, hvd.size() * spread
    log(f"Total img/sec on {hvd.size()} {kind}(s): {total:.1f} +-{total_spread:.1f}")
    if hasattr(compression, "stats"):
        stats = compression.stats()
        steps = args.num_warmup_batches + args.num_iters * args.num_batches_per_iter
        sent = stats.totals.bytes_sent / steps
        log(f"Sent sparsely by a worker in a step: {sent / 1e3:.0f} kB of {4 * numel / 1e6:.1f} MB")
        compression.close()


if __name__ == "__main__":
    main()
