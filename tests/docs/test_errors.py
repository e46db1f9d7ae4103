"""docs/errors.md covers the messages that the code has: all of them, and no others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import pytest

from tests.docs.messages import (
    Message,
    class_of,
    covers,
    in_code,
    in_docs,
    normal,
    template_of,
)


def shown(messages: Iterable[tuple[Message, str]]) -> str:
    return "\n".join(f"{kind}: `{text}` {place}" for (kind, text), place in messages)


def closest(message: Message, listed: Iterable[Message]) -> Message | None:
    """The text that says most of a message, among those that cover it."""
    covering = [each for each in listed if each[0] == message[0] and covers(each[1], message[1])]
    return max(covering, key=lambda each: len(each[1].replace("…", "")), default=None)


def test_every_message_in_the_code_is_covered() -> None:
    listed = in_docs()
    missing = [found for found in in_code() if closest(found[0], listed) is None]
    assert not missing, f"docs/errors.md lacks, under these classes:\n{shown(missing)}"


def test_every_text_that_is_listed_is_needed() -> None:
    """It is the closest one to a message of the code, in one of its heading's classes."""
    listed = in_docs()
    needed = {found[1] for message, _ in in_code() if (found := closest(message, listed))}
    gone = {text for _, text in listed} - needed
    assert not gone, f"docs/errors.md lists what the code does not say: {sorted(gone)}"


def test_a_text_is_listed_once() -> None:
    listed = in_docs()
    assert sorted(listed) == sorted(set(listed))


def test_a_text_can_be_searched_for() -> None:
    vague = [text for _, text in in_docs() if len(re.findall(r"[A-Za-z']{2,}", text)) < 2]
    assert not vague


@pytest.mark.parametrize(
    ("listed", "message", "is_covered"),
    [
        ("… must be …, got …", "… must be in (0, 1], got …", True),
        ("… must be …, got …", "must be in (0, 1], got …", False),
        ("unknown key: …", "unknown keys: …", False),
        ("unknown key", "unknown key: …", False),
        ("a (b)", "a (b)", True),
    ],
)
def test_a_text_covers_what_fits_into_it(listed: str, message: str, is_covered: bool) -> None:
    assert covers(listed, message) == is_covered


def test_messages_are_found_in_code() -> None:
    source = "raise ConfigError(f'{name} must be in (0, 1], ' f'got {value!r}' + more())"
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    assert class_of(call, "checks.py") == "ConfigError"
    assert normal(template_of(call.args[0]) or "") == "… must be in (0, 1], got …"
