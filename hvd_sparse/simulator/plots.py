"""Curves over the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_sparse.errors import ConfigError
from hvd_sparse.files import replacing
from hvd_sparse.simulator.simulation import Outcome

CURVES: tuple[tuple[str, bool, Callable[[Outcome], float | None]], ...] = (
    ("seconds of an exchange", True, lambda o: o.exchange_s),
    ("words received by the worst rank", True, lambda o: o.received_words.worst),
    ("parallel efficiency, weak scaling", False, lambda o: o.efficiency),
)


def load_pyplot(path: Path | str | None = None) -> Any:
    """Matplotlib's pyplot, drawing to files.

    Args:
        path: Where a plot is to go; its suffix says in which format, none: PNG.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format, or there is no such
            folder.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'hvd-sparse[examples]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path is not None and (Path(path).suffix[1:].lower() or "png") not in formats:
        raise ConfigError(f"{path}: a plot ends in one of .{', .'.join(sorted(formats))}")
    if path is not None and not Path(path).parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
    return pyplot


def plot_outcomes(outcomes: Sequence[Outcome], title: str, path: Path | str) -> None:
    """Draw time, volume and efficiency against the number of ranks, a curve per algorithm.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the path's format.
    """
    pyplot = load_pyplot(path)
    figure, every = pyplot.subplots(1, len(CURVES), figsize=(5 * len(CURVES), 4))
    ranks = sorted({o.world_size for o in outcomes})
    for axes, (label, is_log, figure_of) in zip(every, CURVES, strict=True):
        for algorithm in dict.fromkeys(o.label for o in outcomes):
            points = [(o.world_size, figure_of(o)) for o in outcomes if o.label == algorithm]
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=algorithm)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(r) for r in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if is_log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.05)
    curves, names = every[0].get_legend_handles_labels()
    figure.legend(curves, names, loc="lower center", ncols=len(names), fontsize="small")
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=120, format=partial.suffix[1:] or "png")
    pyplot.close(figure)
