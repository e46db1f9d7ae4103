"""A file that lines of JSON are added to."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from stat import S_ISREG
from typing import Any


class LineFile:
    """Adds lines to the end of a file; missing folders are made.

    Every line is one unbuffered write, so nothing waits in memory for a flush that may fail, and
    processes that add to one file do not cut each other's lines. A pipe without a reader, or whose
    reader is slow, is an error and no wait.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        self._file = os.open(path, flags, 0o666)
        self._closing = weakref.finalize(self, os.close, self._file)
        status = os.fstat(self._file)
        self._has_content = S_ISREG(status.st_mode) and status.st_size > 0

    def write(self, line: dict[str, Any]) -> None:
        """Add one line.

        Raises:
            OSError: It could not be written whole; a part of it may be in the file.
        """
        text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        if self._has_content:  # whose last line a killed process may have left without its end
            text, self._has_content = "\n" + text, False
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: The system found only now that something could not be written.
        """
        if self._closing.detach():
            os.close(self._file)
