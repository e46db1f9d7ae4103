"""What came over a wire, under libFuzzer: `make fuzz` runs this in .venv.

Builds the native library and the targets of `csrc/fuzz` with Clang, AddressSanitizer and
UndefinedBehaviorSanitizer under `build/fuzz`, and runs every target from seeds that are real
encodings (`tools/fuzz_seeds.py`). The corpus stays there for the next run. An input that breaks
something is kept in `build/fuzz/crashes`; the target runs it again when given its path.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.fuzz_seeds import SEEDS

TARGETS = Path("csrc/fuzz")
OUT = Path("build/fuzz")
CRASHES = OUT / "crashes"
FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
CHECKS = "address,undefined"
MOST_INPUT_BYTES = 4096
MOST_SECONDS_PER_INPUT = 20
PACKAGES = "apt-get install clang libclang-rt-dev"


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
    """The native library, instrumented."""
    flags = [*FLAGS, f"-fsanitize=fuzzer-no-link,{CHECKS}"]
    command = [sys.executable, "setup.py", "-q", "build"]
    command += ["--build-base", str(OUT), "--build-lib", str(OUT / "lib")]
    environment = {**os.environ, "CXX": "clang++", "CXXFLAGS": " ".join(flags)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise SystemExit(f"fuzz: the library did not build:\n{said.stdout}{said.stderr}")
    return (OUT / "lib" / "hvd_sparse" / "_native.so").resolve()


def build_target(target: str, library: Path) -> Path:
    """A target's program."""
    binary = OUT / target
    command = ["clang++", "-std=c++17", "-Wall", "-Wextra", *FLAGS, f"-fsanitize=fuzzer,{CHECKS}"]
    command += [str(TARGETS / f"{target}.cpp"), str(library), "-o", str(binary)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode != 0:
        raise SystemExit(f"fuzz: {target} did not build ({PACKAGES}):\n{said.stderr}")
    return binary


def run_target(binary: Path, seconds: int) -> bool:
    """Runs a target; prints a line of what was tried, or what broke."""
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


if __name__ == "__main__":
    main()
