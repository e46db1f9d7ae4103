"""Pieces of an HTML page; whatever is put into them is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .2rem; }
p { margin: .2rem 0 .6rem; color: #4b5563; overflow-wrap: anywhere; }
svg { width: 100%; max-width: 42rem; height: auto; display: block; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: .6rem; margin: 1.2rem 0; }
@media (max-width: 40rem) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tiles div { border: 1px solid #e5e7eb; border-radius: 8px; padding: .5rem .8rem; }
.tiles b { display: block; font-size: 1.25rem; } .tiles span { color: #6b7280; font-size: .85rem; }
.warn { background: #fef3c7; border-radius: 6px; padding: .4rem .8rem; color: #78350f; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .8rem; width: 100%; }
th, td { padding: .25rem .35rem; text-align: right; border-bottom: 1px solid #e5e7eb;
         white-space: nowrap; vertical-align: top; }
th { color: #6b7280; font-weight: 600; } td.text, th.text { text-align: left; }
td.text { white-space: normal; }
td.names { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A page of finished parts, which needs nothing from elsewhere."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        '</title><meta name="viewport" content="width=device-width">'
        f"<style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def section(title: str, text: str, body: str) -> str:
    """A heading, a sentence and a picture or table."""
    return f"<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n{body}"


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
