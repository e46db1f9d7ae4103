"""What a report says of a planner's trials: what was tried, what it took, what was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hvd_sparse.recording.log import Recording

COLUMNS = {"plan": "text", "tensors": "", "buckets": "", "predicted": "", "took": "", "steps": ""}


Cells = tuple[Mapping[str, str], list[tuple[Any, ...]]]


def trials_of(recording: Recording) -> Iterator[tuple[str, Cells]]:
    """Of each trial a sentence, and its table: columns with their classes, and rows."""
    for trial in recording.trials:
        tried, chosen = trial["tried"], trial["chosen"]
        gain = tried[0]["step_s"] / tried[chosen]["step_s"]
        words = "The planner stayed dense" if chosen == 0 else f"The planner chose plan {chosen}"
        when = "as an earlier run had found" if trial["recalled"] else f"at step {trial['step']}"
        text = f"{words}, {when}: a step takes {1e3 * tried[chosen]['step_s']:.1f} ms"
        text += f", {gain:.2f} times less than dense." if chosen else "."
        rows = [
            (
                f"{place}: {' and '.join(each['methods']) or 'dense'}",
                each["sparse_tensors"],
                each["buckets"],
                f"{1e3 * each['predicted_s']:.1f} ms",
                f"{1e3 * each['step_s']:.1f} ± {1e3 * each['error_s']:.1f} ms",
                each["steps"],
            )
            for place, each in enumerate(tried)
        ]
        yield text, (COLUMNS, rows)
