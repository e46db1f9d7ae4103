"""How ranks ended, as `tests/adapter/test_exit.py` reports it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How one rank's process ended.

    Attributes:
        code: Its exit status; negative: the signal that ended it.
        seconds: Since the failure, the interpreter's own end included.
        stderr: What it wrote.
    """

    code: int
    seconds: float
    stderr: str


def endings_in(text: str) -> dict[str, list[Ending]]:
    """The reports of `tests/adapter/test_exit.py`: of each case, those of all ranks, in order."""
    ranks: dict[str, dict[int, Ending]] = {}
    for found in re.finditer(r'\{"case"', text):
        report, _ = json.JSONDecoder().raw_decode(text, found.start())
        case, rank = report.pop("case"), report.pop("rank")
        ranks.setdefault(case, {})[rank] = Ending(**report)
    return {case: [found[rank] for rank in sorted(found)] for case, found in ranks.items()}
