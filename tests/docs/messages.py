"""The messages that a user can meet: as the code has them, and as docs/errors.md lists them.

In both, … stands for whatever the code puts in.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import CODE, ROOT

Message = tuple[str, str]
"""The class of what is raised, or "warning"; and the text."""

OURS = {
    "CompileError",
    "ConfigError",
    "HorovodInternalError",
    "PeerLostError",
    "PlanError",
    "TransportError",
    "TransportTimeout",
    "UnsupportedError",
}
ANY_TRANSPORT_ERROR = "TransportError"
WARNINGS = {"warn", "_warn_once", "warning"}
AT_A_PLACE = {"error", "_error"}
"""Methods of a policy's document, which make a `ConfigError` that begins with a place."""
PYTHONS_OWN = {"TypeError", "ValueError", "RuntimeError"}
CALLED_BY_USERS = ("functional", "optim.py", "adapter")
"""Where errors of Python's own classes are about what a user gave; elsewhere they are about calls
that this package makes itself."""

PASSED_ON = {
    ("ConfigError", "…: …"),
    ("ConfigError", "rank …: …"),
    ("PeerLostError", "rank …: …"),
    ("warning", "hvd_sparse: …"),
}
"""Messages that hold another one, which is listed."""


def template_of(node: ast.expr) -> str | None:
    """A text with … for what is put into it; None where it is no text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [template_of(v) if isinstance(v, ast.Constant) else "…" for v in values]
            return "".join(part or "" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first = template_of(left)
            return None if first is None else first + (template_of(right) or "…")
    return None


def class_of(call: ast.Call, module: str) -> str | None:
    """What a call raises or warns of; None for any other call."""
    match call.func:
        case ast.Name(id=name) if name in OURS:
            return name
        case ast.Name(id=name) if name in PYTHONS_OWN and module.startswith(CALLED_BY_USERS):
            return name
        case ast.Name(id="kind" | "error_type") | ast.Call(func=ast.Name(id="type")):
            return ANY_TRANSPORT_ERROR
        case ast.Attribute(attr="ArgumentTypeError"):
            return "ConfigError"  # argparse shows it as hvd-sparse shows a ConfigError
        case ast.Attribute(attr=name) | ast.Name(id=name) if name in WARNINGS:
            return "warning"
        case ast.Attribute(attr=name) if name in AT_A_PLACE:
            return "ConfigError"
    return None


def in_code() -> Iterator[tuple[Message, str]]:
    """Every message with its place."""
    package = ROOT / "hvd_sparse"
    for path in sorted(package.rglob("*.py")):
        module = str(path.relative_to(package))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or (kind := class_of(node, module)) is None:
                continue
            texts = [text for a in node.args if (text := template_of(a)) is not None]
            if texts:
                message = (kind, normal(texts[-1]))
                if message not in PASSED_ON:
                    yield message, f"hvd_sparse/{module}:{node.lineno}"


def normal(text: str) -> str:
    """One … for several side by side, and single spaces; %s is one, too."""
    text = re.sub(r"%\w", "…", " ".join(text.split()))
    return re.sub("…(?:, ?…|…)+", "…", text)


def in_docs(page: Path = ROOT / "docs" / "errors.md") -> list[Message]:
    """Every message in the first column of the tables, under the heading that names its class."""
    kind, found = "", []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            name = CODE.search(line)
            kind = name[1] if name else line.removeprefix("## ").lower().removesuffix("s")
        elif kind and line.startswith("| `"):
            found += [(kind, normal(text)) for text in CODE.findall(line.split(" | ")[0])]
    return found
