"""Pretrain a BERT-style encoder on any text: masked words, with dense or sparse gradients.

    horovodrun -np 2 python examples/pytorch_bert_pretraining.py
    horovodrun -np 2 python examples/pytorch_bert_pretraining.py --compression "topk density=0.01"
    horovodrun -np 8 python examples/pytorch_bert_pretraining.py --data wiki/*.txt \\
        --most-bytes 1000000000 --vocabulary 30522 --hidden 768 --layers 12 \\
        --checkpoint runs/bert --record run.jsonl \\
        --compression examples/policies/transformer.yaml

Without `--data` it reads the sources of Python's standard library. The vocabulary has the text's
most common words, and all bytes for other words. With `--checkpoint DIR` it saves after every
epoch, including residuals, and the same command continues from there.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import horovod.torch as hvd
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvd_sparse

WORD = re.compile(rb"\w+|\s+|[^\w\s]")
BYTES, MASK = 256, 256
"""Tokens below 256 are bytes. The mask follows, then the words."""
MASKED, BECOME_MASK, BECOME_RANDOM = 0.15, 0.8, 0.1
"""As in BERT: 15 % must be predicted. 80 % of these are masked, 10 % are replaced."""
NOT_ASKED = -100
TEST_SHARE = 0.05


class Bert(nn.Module):
    """Embeddings, an encoder, and a head that shares the word embeddings."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, hidden)
        self.pos_embeddings = nn.Embedding(length, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        for embedding in (self.word_embeddings, self.pos_embeddings):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, asked: Tensor) -> Tensor:
        """Scores `(masked positions, vocabulary)` of the positions in `asked`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.word_embeddings(tokens) + self.pos_embeddings(places))
        x = self.transform(self.encoder(x)[asked])
        return F.linear(x, self.word_embeddings.weight, self.bias)


def fail(message: object) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_arguments() -> argparse.Namespace:
    # Training settings
    parser = argparse.ArgumentParser(description="PyTorch BERT pretraining example")
    parser.add_argument("--batch-size", type=int, default=8, help="per worker (default: 8)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW (default: 3e-4)")
    parser.add_argument("--warmup-share", type=float, default=0.1, help="of all steps")
    parser.add_argument("--wd", type=float, default=0.01, help="weight decay (default: 0.01)")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=0, help="steps between loss lines")
    parser.add_argument("--data", type=Path, nargs="+", help="text files")
    parser.add_argument("--most-bytes", type=int, default=4_000_000, help="to read of them")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--hidden", type=int, default=256, help="width of the encoder")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, help="default: one for each 64 of --hidden")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--record", help="write what happens to this file, for `hvd-sparse report`")
    parser.add_argument(
        "--compression",
        default="none",
        help='"none", "fp16", a policy file, or a constructor: "topk density=0.01 wire=float16"',
    )
    args = parser.parse_args()
    args.heads = args.heads or max(1, args.hidden // 64)
    for name in ("batch_size", "epochs", "length", "hidden", "layers", "heads", "most_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.hidden % args.heads:
        parser.error(f"--hidden must be a multiple of --heads, got {args.hidden} and {args.heads}")
    if args.vocabulary <= MASK:
        parser.error(f"--vocabulary must be above {MASK}: all bytes and the mask, and then words")
    return args


def load_text(args: argparse.Namespace) -> list[TensorDataset]:
    """Load samples of tokens for training and for the test: the last 5 % of the text."""
    paths = args.data or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray()
    for path in paths:
        try:
            text += path.read_bytes()[: args.most_bytes - len(text)]
        except OSError as error:
            fail(f"--data: {error}")
    words = WORD.findall(text)
    saved: Counter[bytes] = Counter()
    for word, count in Counter(map(bytes, words)).items():
        if len(word) > 1:
            saved[word] = count * (len(word) - 1)  # tokens saved if the word is one token
    # Words that save the same come in the same order on all workers.
    best = sorted(saved, key=lambda word: (-saved[word], word))[: args.vocabulary - MASK - 1]
    numbers = {word: number for number, word in enumerate(best, MASK + 1)}
    tokens: list[int] = []
    for word in words:
        number = numbers.get(bytes(word))
        tokens.extend(word if number is None else [number])
    samples = len(tokens) // args.length
    if samples < 1 / TEST_SHARE:
        fail(f"--data: {len(tokens)} tokens are too few for samples of {args.length}")
    rows = torch.tensor(tokens[: samples * args.length], dtype=torch.int32).view(samples, -1)
    tests = math.ceil(TEST_SHARE * samples)
    return [TensorDataset(rows[:-tests]), TensorDataset(rows[-tests:])]


def hide(rows: Tensor, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mask some tokens; returns them with the targets, `NOT_ASKED` where nothing is predicted."""
    tokens = rows.long()
    chance = torch.rand(tokens.shape, generator=generator)
    asked = chance < MASKED
    asked[:, 0] |= ~asked.any(1)  # at least one in every sample
    targets = tokens.where(asked, NOT_ASKED)
    fate = torch.rand(tokens.shape, generator=generator)
    randoms = torch.randint(vocabulary, tokens.shape, generator=generator)
    tokens = tokens.where(~asked | (fate >= BECOME_MASK), MASK)
    is_random = asked & (fate >= BECOME_MASK) & (fate < BECOME_MASK + BECOME_RANDOM)
    return randoms.where(is_random, tokens), targets


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


def make_optimizer(model: nn.Module, lr: float, decay: float) -> torch.optim.Optimizer:
    """AdamW, without decay for biases and normalisation."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def save(folder: Path, model: nn.Module, optimizer: Any, compression: Any, epochs: int) -> None:
    """Save all that training needs to continue; the last checkpoint stands until then."""
    # Every worker has its own residuals.
    if hasattr(compression, "save_checkpoint"):
        compression.save_checkpoint(folder / f"compression-{epochs}")
    if hvd.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epochs": epochs}, folder / "new.pt")
        (folder / "new.pt").replace(folder / "model.pt")
    hvd.barrier()
    if hvd.local_rank() == 0:
        shutil.rmtree(folder / f"compression-{epochs - 1}", ignore_errors=True)


def load(folder: Path, model: nn.Module, optimizer: Any, compression: Any) -> int:
    """Load the last checkpoint; returns the number of finished epochs."""
    epochs, file = 0, folder / "model.pt"
    if hvd.rank() == 0 and file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epochs = state["epochs"]
    # Horovod: the first worker reads the checkpoint and broadcasts it.
    epochs = int(hvd.broadcast(torch.tensor(epochs), root_rank=0, name="epochs"))
    if epochs and hasattr(compression, "load_checkpoint"):
        compression.load_checkpoint(folder / f"compression-{epochs}")
    return epochs


def main() -> None:
    args = parse_arguments()
    train_dataset, test_dataset = load_text(args)

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

    # Horovod: use DistributedSampler to partition the data.
    train_sampler: DistributedSampler[Any] = DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed, drop_last=True
    )
    train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler: DistributedSampler[Any] = DistributedSampler(
        test_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    test_loader = DataLoader(test_dataset, batch_size=args.batch_size, sampler=test_sampler)

    model = Bert(args.vocabulary, args.hidden, args.layers, args.heads, args.length).to(device)
    optimizer = make_optimizer(model, args.lr, args.wd)

    # Horovod: (optional) compression algorithm.
    compression = make_compression(args.compression, model, args.record)

    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    done = load(args.checkpoint, model, optimizer, compression) if args.checkpoint else 0

    # Horovod: broadcast optimizer state & parameters. The first may run a step to create state.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def answers(rows: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Scores of the masked positions, and their true tokens."""
        tokens, targets = (x.to(device) for x in hide(rows, args.vocabulary, generator))
        asked = targets != NOT_ASKED
        return model(tokens, asked), targets[asked]

    steps = args.epochs * len(train_loader)
    warmup_steps = max(1, round(args.warmup_share * steps))

    def train(epoch: int) -> None:
        model.train()
        # Horovod: set epoch to sampler for shuffling.
        train_sampler.set_epoch(epoch)
        # Other words are hidden in every epoch and on every worker.
        generator = torch.Generator().manual_seed(1000 * epoch + hvd.rank())
        for batch_index, (rows,) in enumerate(train_loader):
            step = (epoch - 1) * len(train_loader) + batch_index + 1
            for group in optimizer.param_groups:
                left = (steps + 1 - step) / max(1, steps + 1 - warmup_steps)
                group["lr"] = args.lr * min(step / warmup_steps, left)
            optimizer.zero_grad()
            loss = F.cross_entropy(*answers(rows, generator))
            loss.backward()
            optimizer.step()
            bar.update()
            if args.log_interval and batch_index % args.log_interval == 0 and hvd.rank() == 0:
                where = f"[{batch_index}/{len(train_loader)}]"
                bar.write(f"Train Epoch: {epoch} {where}\tLoss: {loss.item():.6f}")

    def test() -> None:
        model.eval()
        generator = torch.Generator().manual_seed(0)
        sums = torch.zeros(3, dtype=torch.float64)
        with torch.no_grad():
            for (rows,) in test_loader:
                scores, targets = answers(rows, generator)
                sums[0] += F.cross_entropy(scores, targets, reduction="sum").item()
                sums[1] += (scores.argmax(1) == targets).sum().item()
                sums[2] += len(targets)
        # Horovod: add up the sums of all workers.
        loss, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="test").tolist()
        # Horovod: print on the first worker only.
        if hvd.rank() == 0:
            accuracy = correct / count
            print(f"Test set: Average loss: {loss / count:.4f}, Accuracy: {accuracy:.2%}")

    bar = tqdm(
        total=steps - done * len(train_loader),
        desc=f"{args.compression}, {hvd.size()} workers",
        unit="step",
        mininterval=0.5,
        ncols=90,
        disable=hvd.rank() != 0,
    )
    for epoch in range(done + 1, args.epochs + 1):
        train(epoch)
        if args.checkpoint:
            save(args.checkpoint, model, optimizer, compression, epoch)
    bar.close()
    test()
    if hasattr(compression, "close"):
        compression.close()


if __name__ == "__main__":
    main()
