"""What a CUDA device shows of this package, in two calls of ten minutes at most.

`python3 -m tools.gpu_lease --dry-run --out DIR` prints the calls, with their minutes, and needs no
device. Each call leaves one file in DIR, an archive; a phase that is through is not run again.

A call needs no set-up, no network, no Horovod and no pydantic: only a Python with torch, and CuPy
beside it where there is a device. A device may be lent for minutes, so each phase has a time limit
of its own and writes each row as soon as it has it. What fails is a row, too, and the next phase
begins.
"""
