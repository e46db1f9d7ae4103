"""The messages that a user can meet: as the code has them, and as docs/errors.md covers them.

In both, … stands for a variable part. A text of the page covers every message that fits into it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from hvd_sparse import errors
from tests.docs.pages import CODE, ROOT

Message = tuple[str, str]
"""The class of what is raised, or "warning"; and the text."""

OURS = {"CompileError", "HorovodInternalError"} | {
    name for name, kind in vars(errors).items() if isinstance(kind, type)
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
    ("CheckpointError", "… …: …"),
    ("ConfigError", "…, got …"),
    ("ConfigError", "…: …"),
    ("ConfigError", "rank …: …"),
    ("HorovodInternalError", "hvd_sparse: …"),
    ("PeerLostError", "rank …: …"),
    ("warning", "hvd_sparse: …"),
}
"""Messages that only hold another one, whose words say what is wrong."""


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
    text = re.sub(r"%(?:\.\d)?\w", "…", " ".join(text.split()))
    return re.sub("…(?:, ?…|…)+", "…", text)


def in_docs(page: Path = ROOT / "docs" / "errors.md") -> list[Message]:
    """Every text in the first column of a table, once for each class that its heading names."""
    kinds, found = [], []
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            kinds = CODE.findall(line) or [line.removeprefix("## ").lower().removesuffix("s")]
        elif line.startswith("| `"):
            texts = CODE.findall(line.split(" | ")[0])
            found += [(kind, normal(text)) for text in texts for kind in kinds]
    return found


def covers(listed: str, message: str) -> bool:
    """Whether a text of the page stands for a message of the code."""
    return re.fullmatch(".*".join(map(re.escape, listed.split("…"))), message) is not None
