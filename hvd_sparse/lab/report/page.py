"""Draws a recording as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import pairwise

import numpy as np

from hvd_sparse.errors import ConfigError
from hvd_sparse.lab.report import figures
from hvd_sparse.lab.report.log import MOST_UNIX_S, Plan, Recording
from hvd_sparse.lab.report.summary import (
    Curves,
    bucket_means,
    collectives,
    curves,
    dense_bytes,
    faults_in_words,
    faults_of,
    is_many,
    kinds,
    last_plan,
    rank_ms,
    slowest_rank,
    steps_of,
)
from hvd_sparse.tables import nbytes, tensors

REACHED = ("wanted", "selected", "applied")
BUCKET_CURVES = {
    "residual": (
        "Residual norm",
        "residual norm",
        "Euclidean norm of what this rank has not sent yet. The largest buckets are named.",
    ),
    "threshold": (
        "Threshold",
        "threshold",
        "Entries of at least this magnitude were selected. The largest buckets are named.",
    ),
    "imbalance": (
        "Balance of the partitions",
        "f(t)",
        "P times the most entries that one rank selected, divided by all selected entries. "
        "1 means that the partitions are balanced.",
    ),
}
WARN = ' class="warn"'
PHASES = ("accumulate_select_s", "exchange_s", "decode_s", "wait_s")


def report_page(runs: Sequence[Recording], recording: Recording) -> str:
    """The whole page of one of a file's runs.

    Raises:
        ConfigError: The recording holds no step.
        UnsupportedError: matplotlib is not installed.
    """
    if not recording.steps:
        others = "" if len(runs) == 1 else f"; the file has {len(runs)} runs, choose one by --run"
        raise ConfigError(f"the recording holds no step yet{others}")
    of_run = curves(recording)
    parts = [
        heading(recording),
        runs_section(runs, recording),
        section(
            "Time per phase",
            "Work of the background thread, summed over the buckets. It overlaps with the backward "
            "pass; training waits only for the part that backward does not hide.",
            figures.svg("phases", figures.phases, of_run),
        ),
        section(
            "Step time",
            "Time from the end of one step to the end of the next, and the part of it in which the "
            "training thread waited for the buckets' results.",
            figures.svg("step", figures.step_time, of_run),
        ),
        *bucket_figures(recording, of_run),
        ranks_section(recording),
        *trials_sections(recording),
        plans_section(recording),
        *bucket_tables(last_plan(recording)),
    ]
    title = f"hvd_sparse run, rank {recording.run['rank']} of {recording.run['world_size']}"
    return document(title, filter(None, parts))


def bucket_figures(recording: Recording, of_run: Curves) -> Iterator[str]:
    """Figures of the buckets; none where all tensors were dense."""
    plan = last_plan(recording)
    if not plan.buckets:
        return
    yield section(
        "Bytes sent",
        "Bytes that this rank sent, headers included, and those of a dense ring allreduce of the "
        "same tensors. Horovod's own traffic is not counted.",
        figures.svg("bytes", figures.sent_bytes, of_run),
    )
    since = f" Since the last change of the plan, after step {plan.step}." if plan.step else ""
    yield section(
        "Density reached",
        "Entries selected on this rank and entries applied, per element, and the target." + since,
        figures.svg("density", figures.density, plan),
    )
    for name, (title, label, text) in BUCKET_CURVES.items():
        if plan.residuals if name == "residual" else any(any(s[name]) for s in plan.steps):
            drawn = figures.svg(name, figures.bucket_curves, plan, name, label)
            yield section(title, text + since, drawn)


def heading(recording: Recording) -> str:
    """What ran, where and when, and how its gradients were compressed."""
    run, plans = recording.run, [plan for plan in recording.plans if plan.steps]
    in_force = kinds(plans[-1]) if plans else []
    facts = (
        f"Rank {run['rank']} of {run['world_size']} on {run['host']}, process {run['pid']}, "
        f"transport {run['transport']}; hvd_sparse {run['hvd_sparse']}, torch {run['torch']}; "
        f"begun {begun(recording)}. Compressed by {'; '.join(in_force) or 'nothing: all dense'}."
    )
    first, figures = summary(recording)
    faults = faults_of(recording.steps)
    told = [("", figures), ("", facts)]
    told += [(WARN if is_many(faults) else "", f"Page faults: {faults_in_words(faults)}.")]
    if recording.torn_lines:
        torn = f"{recording.torn_lines} line(s) of the recording are cut off and left out."
        told += [(WARN, torn)]
    shown = (f"<p{kind}>{escape(text)}</p>" for kind, text in told)
    return "\n".join([f"<h1>{escape(first)}</h1>", *shown])


def begun(recording: Recording, after_s: float = 0.0) -> str:
    """The date and time at which a run began, or of some seconds later."""
    at = min(recording.run["start_unix_s"] + after_s, MOST_UNIX_S)
    return f"{datetime.fromtimestamp(at, timezone.utc):%F %T} UTC"


def other_compressions(runs: Sequence[Recording], shown: Recording) -> list[int]:
    """Numbers of the runs of the same process at the same time, which are other compressions."""

    def span(run: Recording) -> tuple[float, float]:
        start = run.run["start_unix_s"]
        return start, start + (run.steps[-1]["at_s"] if run.steps else 0.0)

    start, stop = span(shown)
    return [
        number
        for number, run in enumerate(runs, 1)
        if run is not shown
        and (run.run["host"], run.run["pid"]) == (shown.run["host"], shown.run["pid"])
        and span(run)[0] < stop
        and start < span(run)[1]
    ]


def runs_section(runs: Sequence[Recording], shown: Recording) -> str:
    """The runs of the file, if there are several."""
    if len(runs) == 1:
        return ""
    rows = [
        (
            f"{number} (this one)" if run is shown else number,
            begun(run),
            begun(run, run.steps[-1]["at_s"]) if run.steps else "–",
            run.run["pid"],
            run.run["world_size"],
            f"{steps_of(run):,}",
            "; ".join(kinds(last_plan(run))) or "all dense" if run.steps else "–",
        )
        for number, run in enumerate(runs, 1)
    ]
    columns = {"run": "", "begun": "", "last line": "", "process": "", "ranks": "", "steps": ""}
    columns |= {"compressed by": "text"}
    text = "The file holds several runs, as after a restart; --run chooses the one to show."
    if others := other_compressions(runs, shown):
        numbers = ", ".join(map(str, others))
        text += f" Another compression of the same process at the same time: run {numbers}."
    return section("Runs", text, table(columns, rows))


def summary(recording: Recording) -> tuple[str, str]:
    """Whether it paid, in a sentence; and the other figures of the run."""
    lines, world_size = recording.steps, recording.run["world_size"]
    steps = sum(line["steps"] for line in lines)
    step_ms = 1e3 * sum(line["seconds"] for line in lines) / steps
    wait_ms = 1e3 * sum(sum(line["wait_s"]) for line in lines) / steps
    took = f"a step takes {step_ms:.3g} ms, {wait_ms:.3g} of them waiting for exchanges"
    told = f"{steps_of(recording):,} steps"
    dense_steps = sum(line["steps"] for p in recording.plans if not p.buckets for line in p.steps)
    plans = [plan for plan in recording.plans if plan.buckets and plan.steps]
    if not plans:
        return f"Sent nothing sparsely; {took}", f"{told}, all dense."
    by_plan = [sum(line["steps"] for line in plan.steps) for plan in plans]
    sent = sum(sum(line["bytes_sent"]) for plan in plans for line in plan.steps) / sum(by_plan)
    ring = float(np.average([dense_bytes(plan, world_size) for plan in plans], weights=by_plan))
    plan = last_plan(recording)
    numel = max(1, sum(bucket["numel"] for bucket in plan.buckets))
    k = sum(bucket["k"] for bucket in plan.buckets)
    selected = float(bucket_means(plan)["nnz_selected"].sum())
    less = f"Sent {ring / sent:.3g} × fewer bytes than dense" if sent else "Sent nothing"
    less += f" in {sum(by_plan):,} of {steps:,} steps" if dense_steps else ""
    return f"{less}; {took}", (
        f"{told}, {dense_steps:,} of them with all tensors dense; {nbytes(sent)} sent per step; "
        f"density selected here {selected / numel:.3g}, target {k / numel:.3g}, "
        f"of {numel:,} elements."
    )


def ranks_section(recording: Recording) -> str:
    """The rank that the others wait for, if there is one."""
    if not recording.ranks or recording.run["world_size"] < 2:
        return ""
    exchange_ms = rank_ms(recording).mean(axis=0)
    slowest = slowest_rank(recording)
    if slowest is None:
        text = (
            "No rank stands out as the one that the others wait for: all spend between "
            f"{exchange_ms.min():.3g} and {exchange_ms.max():.3g} ms per step in exchanges."
        )
    else:
        others_ms = float(np.median(np.delete(exchange_ms, slowest)))
        text = (
            f"The others wait for rank {slowest}: it spends {exchange_ms[slowest]:.3g} ms per step "
            f"in exchanges, the others {others_ms:.3g} ms (median)."
        )
    return section("Ranks", text, figures.svg("ranks", figures.ranks, recording))


def trials_sections(recording: Recording) -> Iterator[str]:
    """What each trial of a planner measured, and what was chosen."""
    columns = {"plan": "text", "tensors": "", "buckets": "", "predicted": "", "took": ""}
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
        yield section("Trial of plans", text, table({**columns, "steps": ""}, rows))


def plans_section(recording: Recording) -> str:
    """When the plan changed, and how each plan compressed."""
    rows = []
    for plan, following in pairwise([*recording.plans, None]):
        if plan is None or (following is not None and following.step == plan.step):
            continue  # replaced before a step was taken by it
        last = recording.steps[-1]["step"] if following is None else following.step
        numel = sum(bucket["numel"] for bucket in plan.buckets)
        words = "; ".join(kinds(plan)) or "all dense"
        steps = f"{plan.step + 1:,}–{last:,}" if last > plan.step else "none yet"
        rows.append((steps, len(plan.buckets), f"{numel:,}", words))
    columns = {"steps": "", "buckets": "", "elements": "", "compressed by": "text"}
    return section("Plans", f"{len(rows)} in this run.", table(columns, rows))


def bucket_tables(plan: Plan) -> list[str]:
    """Tables of a plan's buckets: how each is compressed, and what it costs."""
    if not plan.buckets:
        return []
    means = bucket_means(plan)
    how, cost = [], []
    for place, bucket in enumerate(plan.buckets):
        numel, names = max(1, bucket["numel"]), tensors(bucket["names"])
        threshold = plan.steps[-1]["threshold"][place]
        how.append(
            (
                place,
                names,
                f"{bucket['numel']:,}",
                f"{bucket['compressor']}, {bucket['wire']}",
                ", ".join(collectives(plan, [place])),
                f"{bucket['k'] / numel:.2g}",
                *(f"{means[f'nnz_{name}'][place] / numel:.2g}" for name in REACHED),
                f"{threshold:.2g}" if threshold else "–",
            )
        )
        sent, received = (nbytes(means[f"bytes_{way}"][place]) for way in ("sent", "received"))
        times = (f"{1e3 * means[name][place]:.2f}" for name in PHASES)
        cost.append((place, names, sent, received, *times))
    columns = {"": "", "tensors": "text names", "n": "", "compressor, wire": "text"}
    columns |= {"collective": "text", "target": "", "wanted": "", "selected": "", "applied": ""}
    text = (
        "Densities are means over the steps of the last plan that has buckets. The wanted density "
        "includes the warm-up. The threshold is the last one."
    )
    titles = ("sent", "received", "select", "exchange", "decode", "wait")
    return [
        section("Buckets", text, table({**columns, "threshold": ""}, how)),
        section(
            "Cost of each bucket",
            "Means per step under the same plan: bytes, and times in ms.",
            table({"": "", "tensors": "text names", **dict.fromkeys(titles, "")}, cost),
        ),
    ]


# -- pieces of HTML, which escape their content ---------------------------------------------------

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; color: #4b5563; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
.warn { background: #fef3c7; border-radius: 6px; padding: .4rem .8rem; color: #78350f; }
.wide { overflow-x: auto; scrollbar-width: thin;  /* a shadow: there is more */
        background: linear-gradient(to left, #fff 30%, transparent) right / 3rem 100% local,
                    linear-gradient(to left, #9ca3af, transparent) right / 1rem 100% scroll;
        background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: .8rem; width: 100%; }
th, td { padding: .25rem .35rem; text-align: right; border-bottom: 1px solid #e5e7eb;
         white-space: nowrap; vertical-align: top; }
th { color: #6b7280; font-weight: 600; } td.text, th.text { text-align: left; }
td.text { white-space: normal; }
td.names { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A self-contained page of finished parts."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width">'
        f"<style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def section(title: str, text: str, body: str) -> str:
    """A heading, a sentence, and a figure or table."""
    return f"<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n{body}"


def table(columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> str:
    """A table that scrolls by itself where it is too wide; `columns`: titles, and cells' class."""
    shown = [tagged("th", columns, columns), *(tagged("td", cells, columns) for cells in rows)]
    return f'<div class="wide"><table>{"".join(shown)}</table></div>'


def tagged(tag: str, cells: Iterable[object], columns: Mapping[str, str]) -> str:
    pairs = zip(cells, columns.values(), strict=True)
    inner = (f'<{tag} class="{kind}">{escape(str(cell))}</{tag}>' for cell, kind in pairs)
    return f"<tr>{''.join(inner)}</tr>"
