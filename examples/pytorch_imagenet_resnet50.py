"""Train ResNet-50 on folders of images or on generated images, with dense or sparse gradients.

    horovodrun -np 2 python examples/pytorch_imagenet_resnet50.py --image-size 64 --epochs 2
    horovodrun -np 8 python examples/pytorch_imagenet_resnet50.py \\
        --train-dir ~/imagenet/train --val-dir ~/imagenet/validation \\
        --checkpoint-format "checkpoint-{epoch}.pt" \\
        --compression examples/policies/cnn.yaml --record run.jsonl

Both folders have one subfolder of images per class. Reading them needs Pillow. Without folders,
each image is noise over a pattern of its class. With `--checkpoint-format` it saves after every
epoch, including residuals, and the same command continues from there.

The learning rate is that of Goyal et al., Accurate, Large Minibatch SGD (2017): it rises for five
epochs, and falls by a factor of ten after 30, 60 and 80.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvd_sparse

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # red, green and blue of ImageNet
SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}
SYNTHETIC_CLASSES = 10


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, with a shortcut around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            convolution = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    """The tensors of `torchvision.models.resnet50`: 25.6 M parameters for 1000 classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)  # at first a block is only its shortcut

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        scores: Tensor = self.fc(self.blocks(x).mean((2, 3)))
        return scores


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch ImageNet Example")
    parser.add_argument("--train-dir", type=Path, help="a folder for each class")
    parser.add_argument("--val-dir", type=Path, help="the same classes")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--synthetic-images", type=int, default=512, help="where no folders are")
    parser.add_argument("--checkpoint-format", help="file of an epoch, with {epoch} in its name")
    parser.add_argument(
        "--batches-per-allreduce",
        type=int,
        default=1,
        help="batches that a worker processes before the workers exchange gradients",
    )
    parser.add_argument("--batch-size", type=int, default=32, help="per worker (default: 32)")
    parser.add_argument("--val-batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--base-lr", type=float, default=0.0125, help="of a worker and batch")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=0.00005, help="weight decay")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--record", help="write what happens to this file, for `hvd-sparse report`")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", "fp16", a policy file, or a constructor: "topk density=0.01 wire=float16"',
    )
    args = parser.parse_args()
    names = ("image_size", "synthetic_images", "batches_per_allreduce", "batch_size", "epochs")
    for name in (*names, "val_batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if (args.train_dir is None) != (args.val_dir is None):
        parser.error("--train-dir and --val-dir belong together")
    if args.checkpoint_format is not None and "{epoch}" not in args.checkpoint_format:
        parser.error("--checkpoint-format must have {epoch} in it")
    return args


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of a folder with one subfolder per class.

    Args:
        folder: The folder.
        size: Width and height of the images returned.
        is_training: Whether to return a random part of an image, or its centre.
    """

    def __init__(self, folder: Path, size: int, is_training: bool) -> None:
        try:
            from PIL import Image
        except ImportError:
            fail(f"{folder}: reading images needs Pillow: pip install pillow")
        self.image, self.size, self.is_training = Image, size, is_training
        if not folder.is_dir():
            fail(f"no such directory: {folder}")
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        if not self.samples:
            fail(f"{folder} must have a folder of images for each class")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with self.image.open(path) as file:
            image = file.convert("RGB")
        box = (random_box if self.is_training else middle_box)(*image.size)
        image = image.resize((self.size, self.size), self.image.Resampling.BILINEAR, box=box)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        values = pixels.view(self.size, self.size, 3).float().div(255)
        values = (values - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
        if self.is_training and torch.rand(()) < 0.5:
            values = values.flip(1)
        return values.permute(2, 0, 1).contiguous(), label


def random_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of a random 8 to 100 % of an image, 3:4 to 4:3 wide."""
    area = (0.08 + 0.92 * float(torch.rand(()))) * width * height
    ratio = math.exp((2 * float(torch.rand(())) - 1) * math.log(4 / 3))
    w, h = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = float(torch.rand(())) * (width - w), float(torch.rand(())) * (height - h)
    return left, top, left + w, top + h


def middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of the central square, 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """Images of noise over a coarse pattern of the class, the same on all workers."""

    classes = tuple(str(number) for number in range(SYNTHETIC_CLASSES))

    def __init__(self, count: int, size: int, first: int) -> None:
        self.count, self.size, self.first = count, size, first
        coarse = torch.randn(SYNTHETIC_CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self.patterns = F.interpolate(coarse, (size, size), mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.Generator().manual_seed(self.first + index)
        label = index % SYNTHETIC_CLASSES
        image = self.patterns[label]
        return image + torch.randn(image.shape, generator=noise), label


def load_images(args: argparse.Namespace) -> tuple[Any, Any]:
    """Load the images for training and for validation."""
    if args.train_dir is None:
        count, size = args.synthetic_images, args.image_size
        return (
            SyntheticImages(count, size, first=0),
            SyntheticImages(max(1, count // 8), size, first=count),
        )
    train_set = ImageFolder(args.train_dir.expanduser(), args.image_size, is_training=True)
    val_set = ImageFolder(args.val_dir.expanduser(), args.image_size, is_training=False)
    if train_set.classes != val_set.classes:
        fail(f"--val-dir must have the classes of --train-dir, got {', '.join(val_set.classes)}")
    return train_set, val_set


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


class Checkpoints:
    """One file per epoch, and a folder beside it with the workers' residuals."""

    def __init__(self, name: str | None, model: nn.Module, optimizer: Any, sparse: Any) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.sparse = sparse if hasattr(sparse, "save_checkpoint") else None

    def path(self, epoch: int) -> Path:
        return Path(str(self.name).format(epoch=epoch))

    def save(self, epoch: int) -> None:
        """Save all that training needs to continue after this many epochs."""
        if self.name is None:
            return
        path = self.path(epoch)
        if self.sparse is not None:
            self.sparse.save_checkpoint(path.with_suffix(".compression"))
        if hvd.rank() == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def load(self, epochs: int) -> int:
        """Load the last checkpoint; returns the number of finished epochs."""
        found = 0
        if self.name is not None:
            found = next((e for e in range(epochs, 0, -1) if self.path(e).exists()), 0)
        # Horovod: the first worker reads the checkpoints and broadcasts them.
        found = int(hvd.broadcast(torch.tensor(found), root_rank=0, name="resume_from_epoch"))
        if found and hvd.rank() == 0:
            state = torch.load(self.path(found), weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if found and self.sparse is not None:
            self.sparse.load_checkpoint(self.path(found).with_suffix(".compression"))
        return found


class Mean:
    """The mean of a metric over all images and all workers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, value: Tensor, count: int) -> None:
        self.sums += torch.tensor([float(value) * count, count])

    def over_workers(self) -> float:
        # Horovod: add up the sums of all workers.
        total, count = hvd.allreduce(self.sums, op=hvd.Sum, name=self.name).tolist()
        return float(total / count)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def learning_rate(args: argparse.Namespace, epochs: float) -> float:
    """The learning rate after `epochs`, a fraction included."""
    # Horovod: the learning rate grows with the number of workers, after a warm-up.
    full = float(args.base_lr * hvd.size() * args.batches_per_allreduce)
    if epochs < args.warmup_epochs:
        full *= (1 + (hvd.size() - 1) * epochs / args.warmup_epochs) / hvd.size()
    return float(full * 0.1 ** sum(epochs >= end for end in (30, 60, 80)))


def main() -> None:
    args = parse_arguments()
    train_dataset, val_dataset = load_images(args)

    # Horovod: initialize library.
    hvd.init()
    torch.manual_seed(args.seed)
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    if use_cuda:
        # Horovod: pin GPU to local rank.
        torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda" if use_cuda else "cpu")

    # Horovod: limit # of CPU threads to be used per worker.
    torch.set_num_threads(1)

    # Horovod: use DistributedSampler to partition the images among workers.
    train_sampler: DistributedSampler[Any] = DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed
    )
    allreduce_batch_size = args.batch_size * args.batches_per_allreduce
    train_loader = DataLoader(
        train_dataset, allreduce_batch_size, sampler=train_sampler, drop_last=True
    )
    if len(train_loader) == 0:
        fail(f"{len(train_sampler)} images for each worker do not fill a batch")
    val_sampler: DistributedSampler[Any] = DistributedSampler(
        val_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    val_loader = DataLoader(val_dataset, args.val_batch_size, sampler=val_sampler)

    # Set up the model. torchvision's resnet50() works, too.
    model = ResNet50(len(train_dataset.classes)).to(device)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=learning_rate(args, 0),
        momentum=args.momentum,
        weight_decay=args.wd,
    )

    # Horovod: (optional) compression algorithm.
    compression = make_compression(args.compression, model, args.record)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
    )

    # Horovod: restore on the first worker, which broadcasts to the others.
    checkpoints = Checkpoints(args.checkpoint_format, model, optimizer, compression)
    done = checkpoints.load(args.epochs)

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def train(epoch: int) -> None:
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        loss_mean, accuracy_mean = Mean("train_loss"), Mean("train_accuracy")
        bar = tqdm(
            train_loader,
            f"Train Epoch #{epoch + 1}",
            unit="step",
            disable=hvd.rank() != 0,
            ncols=90,
        )
        for step, (data, target) in enumerate(bar):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, epoch + (step + 1) / len(train_loader))
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            images, labels = (x.tensor_split(args.batches_per_allreduce) for x in (data, target))
            for part, labels_of_part in zip(images, labels, strict=True):
                output = model(part)
                loss = F.cross_entropy(output, labels_of_part)
                loss_mean.update(loss.detach(), len(part))
                accuracy_mean.update(accuracy(output, labels_of_part), len(part))
                loss.div(args.batches_per_allreduce).backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        report(f"Train Epoch #{epoch + 1}", loss_mean, accuracy_mean)

    def validate(epoch: int) -> None:
        model.eval()
        loss_mean, accuracy_mean = Mean("val_loss"), Mean("val_accuracy")
        with torch.no_grad():
            for data, target in val_loader:
                data, target = data.to(device), target.to(device)
                output = model(data)
                loss_mean.update(F.cross_entropy(output, target), len(data))
                accuracy_mean.update(accuracy(output, target), len(data))
        report(f"Validate Epoch #{epoch + 1}", loss_mean, accuracy_mean)

    def report(what: str, loss_mean: Mean, accuracy_mean: Mean) -> None:
        loss, correct = loss_mean.over_workers(), accuracy_mean.over_workers()
        # Horovod: print on the first worker only.
        if hvd.rank() == 0:
            print(f"{what}: loss {loss:.4f}, accuracy {correct:.2%}", flush=True)

    for epoch in range(done, args.epochs):
        train(epoch)
        validate(epoch)
        checkpoints.save(epoch + 1)
    if hasattr(compression, "close"):
        compression.close()


if __name__ == "__main__":
    main()
