"""Run one of Horovod's own PyTorch examples with sparse gradients, otherwise unchanged.

    git clone --depth 1 --branch v0.28.1 https://github.com/horovod/horovod
    python -m tools.horovod_examples horovod/examples/pytorch/pytorch_mnist.py -- --epochs 1
    python -m tools.horovod_examples horovod/examples/pytorch/pytorch_imagenet_resnet50.py \\
        --compression "oktopk density=0.01" --np 4 -- --train-dir train --val-dir val

Horovod's examples choose between its fp16 compression and none in one expression. That expression
becomes a constructor of `hvd_sparse.Compression`, beside an import; `--show` prints the difference
and runs nothing. What follows `--` goes to the example. The examples import torchvision, and some
tensorboard.
"""

from __future__ import annotations

import argparse
import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

IMPORT = re.compile(r"^import horovod\.torch as hvd$", re.MULTILINE)
CHOICE = re.compile(
    r"hvd\.Compression\.fp16 if args\.fp16_allreduce else\s+\\?\s*hvd\.Compression\.none"
)


class ExampleError(Exception):
    """The script is not one of Horovod's examples; the message says why."""


def with_compression(source: str, text: str) -> str:
    """The script with the compression in `text`: a constructor's name and its arguments.

    Raises:
        ExampleError: The script does not import Horovod, or choose a compression, in one place.
    """
    name, *words = text.split()
    arguments = "".join(
        f", {key}={yaml.safe_load(value)!r}"
        for key, _, value in (word.partition("=") for word in words)
    )
    call = f"hvd_sparse.Compression.{name}(model.named_parameters(){arguments})"
    for pattern, new in (
        (IMPORT, "import horovod.torch as hvd\nimport hvd_sparse"),
        (CHOICE, call),
    ):
        source, count = pattern.subn(lambda _, new=new: new, source)  # type: ignore[misc]
        if count != 1:
            raise ExampleError(f"{pattern.pattern!r} must occur once, got {count} times")
    return source


def main() -> None:
    """Change the script, show the difference, run it."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="What follows -- goes to the script."
    )
    parser.add_argument("script", type=Path, help="one of Horovod's examples/pytorch")
    parser.add_argument("--compression", default="topk density=0.01 dense_below=0")
    parser.add_argument("--np", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--controller", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--show", action="store_true", help="print the difference, run nothing")
    ours, arguments = sys.argv[1:], list[str]()
    if "--" in ours:
        ours, arguments = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    options = parser.parse_args(ours)
    try:
        before = options.script.read_text(encoding="utf-8")
        after = with_compression(before, options.compression)
    except (OSError, ExampleError) as error:
        sys.exit(f"error: {options.script}: {error}")
    one, other = (text.splitlines(keepends=True) for text in (before, after))
    sys.stdout.writelines(difflib.unified_diff(one, other, "as published", "as run", n=0))
    sys.stdout.flush()
    if options.show:
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / options.script.name
        script.write_text(after, encoding="utf-8")
        command = [str(Path(sys.executable).parent / "horovodrun"), f"--{options.controller}"]
        command += ["-np", str(options.np), "-H", f"localhost:{options.np}"]
        command += [sys.executable, str(script), *arguments]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
