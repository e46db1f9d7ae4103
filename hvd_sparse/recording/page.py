"""One self-contained HTML page about a recording."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import pairwise

from hvd_sparse.errors import ConfigError
from hvd_sparse.recording import figures
from hvd_sparse.recording.log import Plan, Recording
from hvd_sparse.recording.summary import Curves, bucket_means, curves, rank_means, slowest_rank
from hvd_sparse.recording.trials import trials_of

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; color: #4b5563; } svg { width: 100%; height: auto; display: block; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .6rem;
         margin: 1.2rem 0; }
.tiles div { border: 1px solid #e5e7eb; border-radius: 8px; padding: .5rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; } .tiles span { color: #6b7280; font-size: .85rem; }
.warn { background: #fef3c7; border-radius: 6px; padding: .4rem .8rem; color: #78350f; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid #e5e7eb;
         white-space: nowrap; }
th { color: #6b7280; font-weight: 600; } td.text, th.text { text-align: left; }
td.names { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
"""


def report_page(runs: Sequence[Recording], recording: Recording) -> str:
    """The page.

    Args:
        runs: All runs of the file.
        recording: The one to show.

    Raises:
        ConfigError: The recording holds no step.
        UnsupportedError: matplotlib is not installed.
    """
    if not recording.steps:
        others = "" if len(runs) == 1 else f"; the file has {len(runs)} runs, choose one by --run"
        raise ConfigError(f"the recording holds no step yet{others}")
    of_run, plan = curves(recording), last_plan(recording)
    since = f" Since the last change of the plan, at step {plan.step}." if plan.step else ""
    parts = [
        heading(recording),
        runs_section(runs, recording),
        tiles(recording, of_run),
        section(
            "Time per phase",
            "Work of the background thread, added up over the buckets. It runs beside backward; "
            "only what backward does not hide is waited for.",
            figures.svg(figures.phases(of_run), "phases"),
        ),
        section(
            "Step time",
            "From the end of one step to the end of the next, and the part of it for which the "
            "training thread waited for the buckets' results.",
            figures.svg(figures.step_time(of_run), "step"),
        ),
        section(
            "Bytes sent",
            "By this rank, headers included, against a dense ring allreduce of the same tensors.",
            figures.svg(figures.sent_bytes(of_run), "bytes"),
        ),
        section(
            "Density reached",
            "Entries selected on this rank and entries applied, per element, against the target."
            + since,
            figures.svg(figures.density(plan), "density"),
        ),
        section(
            "Residual norm",
            "Euclidean, of what this rank has not sent yet; the largest buckets are named." + since,
            figures.svg(figures.bucket_curves(plan, "residual", "residual norm"), "residual"),
        )
        if plan.residuals
        else "",
        section(
            "Threshold",
            "Magnitude from which entries were selected; the largest buckets are named." + since,
            figures.svg(figures.bucket_curves(plan, "threshold", "threshold"), "threshold"),
        ),
        section(
            "Balance of the partitions",
            "P times the most entries that a rank selected, over all of them: 1 is even." + since,
            figures.svg(figures.bucket_curves(plan, "imbalance", "f(t)"), "imbalance"),
        )
        if any(any(line["imbalance"]) for line in plan.steps)
        else "",
        ranks_section(recording),
        *(section("Trial of plans", text, table(*cells)) for text, cells in trials_of(recording)),
        plans_section(recording),
        buckets_section(plan),
    ]
    title = f"hvd_sparse run, rank {recording.run['rank']} of {recording.run['world_size']}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width">'
        f"<style>{CSS}</style></head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )


def last_plan(recording: Recording) -> Plan:
    """The last plan under which a step was recorded."""
    return next(plan for plan in reversed(recording.plans) if plan.steps)


def heading(recording: Recording) -> str:
    """What ran, where and when."""
    run = recording.run
    facts = (
        f"Rank {run['rank']} of {run['world_size']} on {run['host']}, transport "
        f"{run['transport']}; hvd_sparse {run['hvd_sparse']}, torch {run['torch']}; begun "
        f"{begun(recording)}."
    )
    warning = (
        f'<p class="warn">{recording.torn_lines} line(s) of the recording are cut off and left '
        "out.</p>"
        if recording.torn_lines
        else ""
    )
    return f"<h1>What happened</h1>\n<p>{escape(facts)}</p>{warning}"


def begun(recording: Recording) -> str:
    """When a run began."""
    return f"{datetime.fromtimestamp(recording.run['start_unix_s'], timezone.utc):%F %T} UTC"


def runs_section(runs: Sequence[Recording], shown: Recording) -> str:
    """The runs of the file, if there are several."""
    if len(runs) == 1:
        return ""
    rows = [
        (
            f"{number} (this one)" if run is shown else number,
            begun(run),
            run.run["world_size"],
            run.run["transport"],
            f"{steps_of(run):,}",
        )
        for number, run in enumerate(runs, 1)
    ]
    columns = {"run": "", "begun": "", "ranks": "", "transport": "text", "steps": ""}
    text = "The file holds several, as after a restart; --run chooses the one to show."
    return section("Runs", text, table(columns, rows))


def steps_of(recording: Recording) -> int:
    """Steps of the run: those of the same process before it are not counted."""
    first: int = recording.plans[0].step if recording.plans else 0
    last: int = recording.steps[-1]["step"] if recording.steps else first
    return max(0, last - first)


def tiles(recording: Recording, of_run: Curves) -> str:
    """The run in six figures."""
    lines = recording.steps
    steps = sum(line["steps"] for line in lines)
    step_s = sum(line["seconds"] for line in lines) / steps
    wait_s = sum(sum(line["wait_s"]) for line in lines) / steps
    sent = sum(sum(line["bytes_sent"]) for line in lines) / steps
    dense = float(of_run.dense_bytes.mean())
    plan = last_plan(recording)
    numel = sum(bucket["numel"] for bucket in plan.buckets)
    k = sum(bucket["k"] for bucket in plan.buckets)
    selected = float(bucket_means(plan)["nnz_selected"].sum())
    shown = [
        (f"{steps_of(recording):,}", "steps"),
        (f"{1e3 * step_s:.1f} ms", "per step"),
        (f"{100 * wait_s / step_s:.0f} %" if step_s else "–", "of it waiting for buckets"),
        (nbytes(sent), "sent per step"),
        (f"{dense / sent:.0f} ×" if sent else "–", "less than dense"),
        (f"{selected / max(1, k):.2f} k", f"selected of {numel:,} elements"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{escape(v)}</b><span>{escape(n)}</span></div>" for v, n in shown)
        + "</div>"
    )


def section(title: str, text: str, body: str) -> str:
    """A heading, a sentence and a picture or table."""
    return f"<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n{body}"


def ranks_section(recording: Recording) -> str:
    """Which rank the others wait for."""
    if not recording.ranks or recording.run["world_size"] < 2:
        return ""
    exchange_s = rank_means(recording, "exchange_s")
    slowest = slowest_rank(recording)
    most = int(exchange_s.argmax())
    text = (
        f"The others wait for rank {slowest}: it spends the least time in the exchange, "
        f"{exchange_s[slowest]:.2g} s between two comparisons, where rank {most} spends "
        f"{exchange_s[most]:.2g} s."
    )
    return section("Slowest rank", text, figures.svg(figures.ranks(recording), "ranks"))


def plans_section(recording: Recording) -> str:
    """When the plan changed, and to what."""
    rows = []
    for plan, following in pairwise([*recording.plans, None]):
        if plan is None or (following is not None and following.step == plan.step):
            continue  # replaced before a step was taken by it
        numel = sum(bucket["numel"] for bucket in plan.buckets)
        kinds = sorted({f"{b['selector']} by {b['collective']}" for b in plan.buckets})
        words = ", ".join(kinds) or "all dense"
        rows.append((plan.step, len(plan.buckets), f"{numel:,}", words))
    columns = {"from step": "", "buckets": "", "elements": "", "kinds": "text"}
    return section("Plans", f"{len(rows)} in this run.", table(columns, rows))


def buckets_section(plan: Plan) -> str:
    """Every bucket of the last plan."""
    means = bucket_means(plan)
    rows = []
    for place, bucket in enumerate(plan.buckets):
        names, k = bucket["names"], max(1, bucket["k"])
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        rows.append(
            (
                place,
                label,
                f"{bucket['numel']:,}",
                f"{bucket['k']:,}",
                f"{means['nnz_selected'][place] / k:.2f}",
                f"{means['nnz_applied'][place] / k:.2f}",
                nbytes(means["bytes_sent"][place]),
                *(
                    f"{1e3 * means[name][place]:.2f}"
                    for name in ("accumulate_select_s", "exchange_s", "decode_s", "wait_s")
                ),
                bucket["collective"],
            )
        )
    columns = {"bucket": "", "tensors": "text names", "n": "", "k": "", "selected/k": ""}
    columns |= {"applied/k": "", "sent": "", "select": "", "exchange": "", "decode": "", "wait": ""}
    columns |= {"collective": "text"}
    text = "Means per step under the last plan; times in ms."
    return section("Buckets", text, table(columns, rows))


def table(columns: Mapping[str, str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table that scrolls by itself where it is too wide.

    Args:
        columns: Titles, and the class of each column's cells.
        rows: The cells; whatever is in them is escaped.
    """
    shown = [tagged("th", columns, columns), *(tagged("td", cells, columns) for cells in rows)]
    return f'<div class="wide"><table>{"".join(shown)}</table></div>'


def tagged(tag: str, cells: Iterable[object], columns: Mapping[str, str]) -> str:
    """One row."""
    pairs = zip(cells, columns.values(), strict=True)
    inner = (f'<{tag} class="{kind}">{escape(str(cell))}</{tag}>' for cell, kind in pairs)
    return f"<tr>{''.join(inner)}</tr>"


def nbytes(count: float) -> str:
    """Bytes with a fitting unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
