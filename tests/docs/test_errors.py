"""docs/errors.md lists the messages that the code has: all of them, and no others."""

from __future__ import annotations

import ast

from tests.docs.messages import class_of, in_code, in_docs, normal, template_of


def shown(messages: set[tuple[str, str]]) -> str:
    places: dict[tuple[str, str], list[str]] = {}
    for message, place in in_code():
        places.setdefault(message, []).append(place)
    return "\n".join(f"{m[0]}: `{m[1]}` {' '.join(places.get(m, ()))}" for m in sorted(messages))


def test_every_message_in_the_code_is_listed() -> None:
    missing = {message for message, _ in in_code()} - set(in_docs())
    assert not missing, f"docs/errors.md lacks, under these classes:\n{shown(missing)}"


def test_every_message_that_is_listed_stands_in_the_code() -> None:
    gone = set(in_docs()) - {message for message, _ in in_code()}
    assert not gone, f"docs/errors.md lists what the code does not say:\n{shown(gone)}"


def test_a_message_is_listed_once() -> None:
    listed = in_docs()
    assert sorted(listed) == sorted(set(listed))


def test_messages_are_found_in_code() -> None:
    source = "raise ConfigError(f'{name} must be in (0, 1], ' f'got {value!r}' + more())"
    call = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    assert class_of(call, "checks.py") == "ConfigError"
    assert normal(template_of(call.args[0]) or "") == "… must be in (0, 1], got …"
