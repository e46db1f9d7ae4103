"""Wall-clock time to a loss: a language model on Python sources, ours beside the alternatives.

    python -m benchmarks.time_to_loss --json FILE --netlab 1gbit 100mbit --plot docs/time_to_loss
    python -m benchmarks.time_to_loss --json FILE --netlab 1gbit --quick
    python -m benchmarks.time_to_loss --json FILE --netlab 1gbit 100mbit --seeds 3 \\
        --model transformer --optimizer adamw \\
        --ways horovod horovod-fp16 powersgd-2 topk@0.01 sparse_adamw@0.01

Every way trains an LSTM of 24.8 M parameters or a transformer of 35 M with the same batches for the
same time: with Adam or AdamW, or with SGD and momentum, which `dgc` corrects. The result is the
time until the loss on held-out files is within 1 % of plain Horovod's final loss. A planner's trial
counts; validation does not.
Checkpoints are written every minute: the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._launch import Job, Jobs, Launcher
from benchmarks.report import Row, Spread, row_of, write_report
from benchmarks.ways import check_names, is_ours
from hvd_sparse.lab.plots import load_pyplot

WORKER = "benchmarks/time_to_loss_worker.py"
RANKS = 2
ADAM, LSTM = "adam", "lstm"
DENSE = "horovod"
WAYS = (DENSE, "topk@0.05/float16+gap", "topk@0.01/float16+gap", "powersgd-2", "planned@0.01")
QUICK_WAYS = WAYS[:4]
WITHIN = 0.01
BESIDE_TRAINING = 3.0
"""A launch may take so many times the time that it trains for."""
GOALS = {  # the factor of time over plain Horovod, and over the best PowerSGD
    "1gbit": (3.0, 1.4),
    "100mbit": (8.0, 2.0),
}
Curve = Sequence[Sequence[float]]
"""[seconds, steps, loss] of every measurement."""


def jobs_of(options: argparse.Namespace, places: list[Launcher]) -> Iterator[Job]:
    """All trainings, seed by seed."""
    for seed in range(1, options.seeds + 1):
        for at in places:
            for way in options.ways:
                mark = f"{at.place}-{way.replace('/', '-')}-{seed}-{options.seconds:g}"
                arguments = ["--way", way, "--seed", str(seed)]
                arguments += ["--seconds", f"{options.seconds:g}"]
                arguments += ["--every-seconds", f"{options.every_seconds:g}"]
                arguments += ["--checkpoint", str((checkpoints_of(options) / mark).resolve())]
                arguments += ["--lr", f"{options.lr:g}", "--width", str(options.width)]
                arguments += ["--corpus-bytes", str(options.corpus_bytes)]
                if options.optimizer != ADAM:
                    arguments += ["--optimizer", options.optimizer]
                if options.model != LSTM:
                    arguments += ["--model", options.model]
                if is_ours(way):
                    arguments += ["--warmup-steps", str(options.warmup_steps)]
                yield Job(way, at, RANKS, seed, WORKER, tuple(arguments))


def checkpoints_of(options: argparse.Namespace) -> Path:
    """The folder of checkpoints, beside the report; removed when everything is trained."""
    folder: Path = options.json.with_suffix(".checkpoints")
    return folder


def seconds_to(curve: Curve, loss: float) -> float | None:
    """When a curve first reaches a loss, by linear interpolation."""
    for (before_s, _, before), (after_s, _, after) in pairwise(curve):
        if after <= loss < before:
            return before_s + (after_s - before_s) * (before - loss) / (before - after)
    return None


def title_of(found: Mapping[str, Sequence[Any]]) -> str:
    """What was trained, on which text."""
    first = next(iter(found.values()))[0]
    size = f"LSTM, {first['numel'] / 1e6:.1f} M"
    if not first.get("model", "LSTM").startswith("LSTM"):
        size = first["model"]
    model = f"{size}, {first.get('optimizer', ADAM)}"
    return f"{model}, Python sources {first['digest']}"


def rows_of(place: str, found: Mapping[str, Sequence[Any]]) -> Iterator[Row]:
    """Every way's time to plain Horovod's final loss."""
    case = f"{title_of(found)}; {place}, P={RANKS}"
    for way, results in found.items():
        last = Spread.of(results, lambda result: result["curve"][-1][2])
        yield row_of(case, f"loss in the end, {way}", last, "nats")
        steps = Spread.of(results, lambda result: result["curve"][-1][1])
        yield row_of(case, f"steps, {way}", steps, "steps")
    if DENSE not in found:
        return
    goals = [result["curve"][-1][2] * (1 + WITHIN) for result in found[DENSE]]
    times = {
        way: [
            seconds_to(result["curve"], loss) for result, loss in zip(results, goals, strict=False)
        ]
        for way, results in found.items()
    }
    reached = {way: each for way, each in times.items() if None not in each}
    for way in times.keys() - reached.keys():
        yield Row(
            case, f"{way} never comes down to plain Horovod's last loss + 1 %", 0, "s", met=False
        )
    rivals = [way for way in reached if way.startswith("powersgd")]
    best_rival = min(rivals, key=lambda way: sum(s or 0.0 for s in reached[way]), default=None)
    for way, each in reached.items():
        for number, baseline in enumerate((DENSE, best_rival)):
            if baseline not in reached or baseline == way:
                continue
            pairs = list(zip(each, reached[baseline], strict=False))
            factor = Spread.of(pairs, lambda pair: pair[1] / pair[0]).middle
            goal = GOALS.get(place, (None, None))[number] if is_ours(way) else None
            other_s = Spread.of(pairs, lambda pair: pair[1]).middle
            yield row_of(
                case,
                f"time to plain Horovod's last loss + 1 %, {way}",
                Spread.of(pairs, lambda pair: pair[0]),
                "s",
                baseline=f"{baseline}: {other_s:.0f} s",
                ratio=factor,
                goal=None if goal is None else f"at least {goal:g} ×",
                met=None if goal is None else factor >= goal,
            )


def plot_curves(
    found: Mapping[str, Sequence[Any]], path: Path, title: str, label: str, **axis: Any
) -> None:
    """The last figure of each measurement over seconds of training, a line for each way and seed.

    `label` and the options of `axis` are the vertical axis'.
    """
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, (way, results) in enumerate(found.items()):
        for seed, result in enumerate(results):
            seconds, *_, figures = zip(*result["curve"], strict=True)
            axes.plot(seconds, figures, color=f"C{number}", label=None if seed else way)
    axes.set(xlabel="seconds of training", ylabel=label, **axis)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(jobs: Jobs, options: argparse.Namespace) -> None:
    """Write the rows and plots of the finished trainings."""
    places = jobs.by_place()
    rows = [row for place, found in places.items() for row in rows_of(place, found)]
    if options.plot:
        for place, found in places.items():
            path = options.plot.with_name(f"{options.plot.name}-{place}.png")
            title = f"{title_of(found)}; {place}, {RANKS} workers"
            plot_curves(found, path, title, "loss on held-out files, nats per token")
    write_report("time_to_loss", rows, options.json)


def main() -> None:
    """Run missing trainings, print the table, write the JSON, draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the results are written")
    parser.add_argument("--ways", nargs="+", help="see benchmarks/ways.py")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="of a training; default: 900, quick 240")
    parser.add_argument("--every-seconds", type=float, default=10.0, help="between measurements")
    parser.add_argument("--optimizer", choices=(ADAM, "adamw", "sgd"), default=ADAM)
    parser.add_argument("--model", choices=(LSTM, "transformer"), default=LSTM)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=768, help="width of the LSTM")
    parser.add_argument("--corpus-bytes", type=int, default=24_000_000)
    parser.add_argument("--warmup-steps", type=int, default=0, help="of our density; each is slow")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK_WAYS)}")
    parser.add_argument("--plot", type=Path, metavar="PREFIX", help="PREFIX-RATE.png")
    Launcher.add_arguments(parser, several=True)
    Jobs.add_arguments(parser)
    options = parser.parse_args()
    options.ways = options.ways or (QUICK_WAYS if options.quick else WAYS)
    if wrong := check_names(options.ways):
        parser.error(f"--ways: {wrong}")
    places = Launcher.each_of(parser, options)
    if options.plot:
        load_pyplot()
    options.seconds = options.seconds or (240.0 if options.quick else 900.0)

    jobs = Jobs(options.json, jobs_of(options, places))
    jobs.run(options.minutes, timeout_s=BESIDE_TRAINING * options.seconds + 300.0)
    report(jobs, options)
    jobs.exit_where_missing("trainings")
    shutil.rmtree(checkpoints_of(options), ignore_errors=True)


if __name__ == "__main__":
    main()
