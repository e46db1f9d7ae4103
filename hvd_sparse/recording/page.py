"""One self-contained HTML page about a recording."""

from __future__ import annotations

from datetime import datetime, timezone
from html import escape
from itertools import pairwise

from hvd_sparse.errors import ConfigError
from hvd_sparse.recording import figures
from hvd_sparse.recording.log import Plan, Recording
from hvd_sparse.recording.summary import Curves, bucket_means, curves, rank_means, slowest_rank

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


def report_page(recording: Recording) -> str:
    """The page.

    Raises:
        ConfigError: The recording holds no step.
        UnsupportedError: matplotlib is not installed.
    """
    if not recording.steps:
        raise ConfigError("the recording holds no step yet")
    of_run, plan = curves(recording), last_plan(recording)
    since = f" Since the last change of the plan, at step {plan.step}." if plan.step else ""
    parts = [
        heading(recording),
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
        ranks_section(recording),
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
    started = datetime.fromtimestamp(run["start_unix_s"], timezone.utc)
    facts = (
        f"Rank {run['rank']} of {run['world_size']} on {run.get('host', '?')}, transport "
        f"{run['transport']}; hvd_sparse {run.get('hvd_sparse', '?')}, torch "
        f"{run.get('torch', '?')}; begun {started:%Y-%m-%d %H:%M:%S} UTC."
    )
    warning = (
        '<p class="warn">The recording is cut off: its last line is not complete.</p>'
        if recording.truncated
        else ""
    )
    return f"<h1>What happened</h1>\n<p>{escape(facts)}</p>{warning}"


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
        (f"{lines[-1]['step']:,}", "steps"),
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
        rows.append(
            f"<tr><td>{plan.step}</td><td>{len(plan.buckets)}</td><td>{numel:,}</td>"
            f'<td class="text">{escape(", ".join(kinds) or "all dense")}</td></tr>'
        )
    head = '<tr><th>from step</th><th>buckets</th><th>elements</th><th class="text">kinds</th></tr>'
    return section("Plans", f"{len(rows)} in this run.", table(head, rows))


def buckets_section(plan: Plan) -> str:
    """Every bucket of the last plan."""
    means = bucket_means(plan)
    rows = []
    for place, bucket in enumerate(plan.buckets):
        names, k = bucket["names"], max(1, bucket["k"])
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
        rows.append(
            f'<tr><td>{place}</td><td class="text names">{escape(label)}</td>'
            f"<td>{bucket['numel']:,}</td><td>{bucket['k']:,}</td>"
            f"<td>{means['nnz_selected'][place] / k:.2f}</td>"
            f"<td>{means['nnz_applied'][place] / k:.2f}</td>"
            f"<td>{nbytes(means['bytes_sent'][place])}</td>"
            + "".join(
                f"<td>{1e3 * means[name][place]:.2f}</td>"
                for name in ("accumulate_select_s", "exchange_s", "decode_s", "wait_s")
            )
            + f'<td class="text">{escape(bucket["collective"])}</td></tr>'
        )
    head = (
        '<tr><th>bucket</th><th class="text">tensors</th><th>n</th><th>k</th><th>selected/k</th>'
        "<th>applied/k</th><th>sent</th><th>select</th><th>exchange</th><th>decode</th>"
        '<th>wait</th><th class="text">collective</th></tr>'
    )
    return section("Buckets", "Means per step under the last plan; times in ms.", table(head, rows))


def table(head: str, rows: list[str]) -> str:
    """An HTML table that scrolls by itself where it is too wide."""
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def nbytes(count: float) -> str:
    """Bytes with a fitting unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
