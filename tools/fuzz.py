"""Fuzz the decoders of wire messages with libFuzzer: `make fuzz` runs this in .venv.

Builds the native library and the targets of `csrc/fuzz` with Clang, AddressSanitizer and
UndefinedBehaviorSanitizer under `build/fuzz`, and runs every target from seeds that are real
encodings. The corpus stays there for the next run. An input that breaks
something is kept in `build/fuzz/crashes`; the target runs it again when given its path.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from hvd_sparse import ops

TARGETS = Path("csrc/fuzz")
OUT = Path("build/fuzz")
CRASHES = OUT / "crashes"
FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
CHECKS = "address,undefined"
MOST_INPUT_BYTES = 4096
MOST_SECONDS_PER_INPUT = 20
PACKAGES = "apt-get install clang libclang-rt-dev"

MOST_MOVES = 255
FAR = 253
"""The move of a step that takes four bytes (`TakeIndices` in csrc/fuzz/fuzz.h)."""
ISAS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    every = sorted(path.stem for path in TARGETS.glob("*.cpp"))
    targets: list[str] = arguments.target or every
    unknown = set(targets) - set(every)
    if unknown:
        raise SystemExit(f"fuzz: --target must be of {every}, got {sorted(unknown)}")
    if shutil.which("clang++") is None:
        raise SystemExit(f"fuzz: no clang++: {PACKAGES}")

    workers = min(len(targets), os.cpu_count() or 1)
    rounds = -(-len(targets) // workers)
    seconds = max(1, round(arguments.seconds / rounds))
    library = build_library()
    CRASHES.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(workers) as pool:
        binaries = list(pool.map(lambda target: build_target(target, library), targets))
        failed = [
            target
            for target, is_good in zip(
                targets, pool.map(lambda binary: run_target(binary, seconds), binaries), strict=True
            )
            if not is_good
        ]
    if failed:
        raise SystemExit(f"fuzz: {', '.join(failed)} failed; the inputs are in {CRASHES}")


def build_library() -> Path:
    """Build the instrumented native library."""
    flags = [*FLAGS, f"-fsanitize=fuzzer-no-link,{CHECKS}"]
    command = [sys.executable, "setup.py", "-q", "build"]
    command += ["--build-base", str(OUT), "--build-lib", str(OUT / "lib")]
    environment = {**os.environ, "CXX": "clang++", "CXXFLAGS": " ".join(flags)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise SystemExit(f"fuzz: the library did not build:\n{said.stdout}{said.stderr}")
    return (OUT / "lib" / "hvd_sparse" / "_native.so").resolve()


def build_target(target: str, library: Path) -> Path:
    """Build a target's program."""
    binary = OUT / target
    command = ["clang++", "-std=c++17", "-Wall", "-Wextra", *FLAGS, f"-fsanitize=fuzzer,{CHECKS}"]
    command += [str(TARGETS / f"{target}.cpp"), str(library), "-o", str(binary)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise SystemExit(f"fuzz: {target} did not build ({PACKAGES}):\n{said.stderr}")
    return binary


def run_target(binary: Path, seconds: int) -> bool:
    """Runs a target; prints its statistics, or its failure."""
    corpus = OUT / "corpus" / binary.name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[binary.name]()):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [str(binary.resolve()), str(corpus), f"-max_total_time={seconds}"]
    command += [f"-timeout={MOST_SECONDS_PER_INPUT}", f"-max_len={MOST_INPUT_BYTES}"]
    command += [f"-artifact_prefix={CRASHES}/{binary.name}-", "-print_final_stats=1"]
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    said = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    ).stderr
    tried = re.search(r"stat::number_of_executed_units: (\d+)", said)
    edges = re.findall(r" cov: (\d+) ", said)
    if "DONE" in said and tried is not None and edges:
        print(f"fuzz: {binary.name}: {tried[1]} inputs in {seconds} s, {edges[-1]} edges")
        return True
    print(f"fuzz: {binary.name} failed:\n{said[-6000:]}")
    return False


def indices_of(numel: int, nnz: int, seed: int) -> Tensor:
    """int32 `(nnz,)`, ascending in `[0, numel)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(numel, generator=generator)[:nnz].sort().values.int()


def moves(indices: Tensor) -> bytes:
    """Ascending indices as the targets read them: a count of moves, then each move."""
    steps = torch.diff(indices.long(), prepend=torch.tensor([-1])).tolist()[:MOST_MOVES]
    coded = (bytes([step - 1]) if step <= FAR else struct.pack("<Bi", FAR, step) for step in steps)
    return bytes([len(steps)]) + b"".join(coded)


SHAPES = [(1, 1), (300, 300), (5000, 40), (100_000, 200), (2**31 - 1, 0)]
"""Lengths, and numbers of entries."""


def streams() -> Iterator[tuple[int, Tensor]]:
    """Lengths of vectors, and indices in them."""
    for seed, (numel, nnz) in enumerate(SHAPES):
        places = indices_of(numel, nnz, seed) if nnz else torch.tensor([], dtype=torch.int32)
        yield numel, places


def gap() -> Iterator[bytes]:
    """Codes of `gap_encode`, and indices to be encoded."""
    for numel, indices in streams():
        for start in (0, 7):
            code = ops.on_host().gap_encode(indices + start, start).numpy().tobytes()
            yield struct.pack("<BIIIB", 0, indices.numel(), start, numel, start % 8) + code
        yield struct.pack("<BI", 1, 0) + moves(indices)


def qsgd() -> Iterator[bytes]:
    """Codes and scales of `qsgd_quantize`, and values to be rounded."""
    x = torch.randn(700, generator=torch.Generator().manual_seed(0))
    for isa in range(ISAS):
        for bits_code, bits in enumerate((2, 4, 8)):
            for bucket_code, bucket_numel in enumerate((512, 1024)):
                head = struct.pack("<BBBBBBH", isa, 0, isa, bits_code, bucket_code, 0, x.numel())
                codes, scales = ops.on_host().qsgd_quantize(x, bits, bucket_numel, 5)
                yield head + scales.numpy().tobytes() + codes.numpy().tobytes()
                head = struct.pack("<BBBBBBH", isa, 1, isa, bits_code, bucket_code, 0, x.numel())
                yield head + struct.pack("<QI", 5, 5) + x.numpy().tobytes()


def merge() -> Iterator[bytes]:
    """Several streams over the same vector."""
    for numel, nnz in SHAPES:
        for count in (1, 2, 3, 6):
            lists = [moves(indices_of(min(numel, 10**6), nnz, seed)) for seed in range(count)]
            body = b"".join(struct.pack("<H", seed) + list_ for seed, list_ in enumerate(lists))
            yield struct.pack("<BBI", count - 1, count - 1, numel) + body


def filter_() -> Iterator[bytes]:
    """Pairs of streams, of equal and of different lengths."""
    for isa in range(ISAS):
        for (_, one), (_, other) in zip(streams(), [*streams()][::-1], strict=True):
            yield struct.pack("<BII", isa, 0x3F000000, 3) + moves(one) + moves(other)


def scatter() -> Iterator[bytes]:
    """Every function and type, on short vectors and long ones, and on empty ones: these have no
    address to fetch ahead from."""
    for isa in range(ISAS):
        for is_long, what, numel in ((0, 0, 4001), (0, 1, 4001), (255, 0, 4001), (0, 1, 0)):
            indices = moves(indices_of(4000, 100, isa))
            head = struct.pack("<BBBBHI", isa, what, isa, is_long, numel, 9)
            for choice in range(3):
                yield head + indices + struct.pack("<BB", choice, 5)


SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "filter": filter_,
    "gap": gap,
    "merge": merge,
    "qsgd": qsgd,
    "scatter": scatter,
}
"""First inputs by the names of the targets."""


if __name__ == "__main__":
    main()
