"""Hooks of MkDocs: pages that lie outside of docs/, and links that lead outside of the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    **{f"{n}.md": f"{n}.md" for n in ("CONTRIBUTING", "CHANGELOG", "SECURITY")},
}
"""Pages of the repository's root, and what they are called in the site."""
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root."""
    for name, called in FROM_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, called, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to pages of the site there, and all others to the repository.

    Raises:
        FileNotFoundError: A link leads nowhere.
    """
    source = next((n for n, called in FROM_ROOT.items() if called == page.file.src_uri), None)
    folder = ROOT if source else ROOT / "docs"

    def lead(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve(strict=True)
        name, anchor = path.relative_to(ROOT).as_posix(), link[2] or ""
        if name in FROM_ROOT:
            return f"]({FROM_ROOT[name]}{anchor})"
        if name.startswith("docs/"):
            return f"]({name.removeprefix('docs/')}{anchor})"
        return f"]({config.repo_url.rstrip('/')}/blob/main/{name}{anchor})"

    return LINK.sub(lead, markdown)
