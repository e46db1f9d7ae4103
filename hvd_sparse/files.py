"""Writes files completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG

STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
"""Paths of streams: they are links, and a user who names them wants them followed."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a new file beside `path` that replaces it when the block ends without an error.

    Readers see the old file or the complete new one. A symbolic link at `path` is replaced, and its
    target is left alone. A device or a pipe is not replaced: the block writes into it.

    Yields:
        The file to write; it has the same suffix.

    Raises:
        OSError: The file cannot be written or put in its place.
    """
    path = Path(path)
    if _is_stream(path):
        yield path
        return
    partial = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        # Like any new file, it gets the permissions that the umask allows.
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):  # the first error counts
            partial.unlink()
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text as UTF-8, as `replacing` does.

    Raises:
        OSError: The file cannot be written or put in its place.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="replace")


def _is_stream(path: Path) -> bool:
    if os.path.abspath(path).startswith(STREAMS):
        return True
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not (S_ISREG(mode) or S_ISLNK(mode))
