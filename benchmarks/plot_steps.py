"""Draws the figure of docs/results.md from the planner's results: what a step takes, by network.

    python -m benchmarks.plot_steps --plot docs/steps.png

Measures nothing: it reads benchmarks/results/planner.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from hvd_sparse.lab.plots import load_pyplot

RESULTS = Path(__file__).parent / "results" / "planner.json"
WORLDS = {
    "P=2, 100mbit": "100 Mb/s",
    "P=2, 1gbit": "1 Gb/s",
    "P=2, 10gbit": "10 Gb/s",
    "P=2, loopback": "one host",
}
"""Ends of the cases' names: two workers, with a core each."""
MODELS = {
    "cnn": "CNN with a large linear layer",
    "transformer": "small transformer",
    "single": "one layer of 7.9 M",
}
BARS = {
    "dense": ("plain Horovod", "#8c8c8c"),
    "uncompressed": ("this package, nothing compressed", "#9ecae1"),
    "planned": ("planned, density 0.01", "#2171b5"),
}
BAR_WIDTH = 0.27
DENSE = re.compile(r"plain Horovod, dense: ([\d.]+) ms")


def steps_of(world: str) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, by model and by the names in `BARS`."""
    found: dict[str, dict[str, float]] = {model: {} for model in MODELS}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]:
        model, _, place = row["case"].partition(", ")
        if place != world:
            continue
        dense = DENSE.fullmatch(row["baseline"])
        if row["metric"].startswith("planned step,") and dense is not None:
            found[model] |= {"dense": float(dense[1]), "planned": row["value"]}
        elif row["metric"] == "step, uncompressed":
            found[model]["uncompressed"] = row["value"]
    return found


def draw(path: Path) -> None:
    """One panel for each model, one group of bars for each network."""
    pyplot = load_pyplot()
    figure, panels = pyplot.subplots(1, len(MODELS), figsize=(11, 3.2), sharey=True)
    worlds = [steps_of(name) for name in WORLDS]
    for axes, (model, title) in zip(panels, MODELS.items(), strict=True):
        for shift, (kind, (label, colour)) in enumerate(BARS.items()):
            places = [place + BAR_WIDTH * (shift - 1) for place in range(len(worlds))]
            heights = [world[model][kind] for world in worlds]
            bars = axes.bar(places, heights, BAR_WIDTH, label=label, color=colour)
            axes.bar_label(bars, fmt="%.0f", fontsize=6, padding=1)
        axes.set(title=title, yscale="log", ylim=(20, 9000))
        axes.set_xticks(range(len(worlds)), list(WORLDS.values()), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("ms per training step")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(BARS), frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    draw(parser.parse_args().plot)


if __name__ == "__main__":
    main()
