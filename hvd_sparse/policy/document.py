"""YAML as plain containers, with the line of each value.

The reader takes YAML's core: mappings with text keys, lists, text, numbers, booleans and null. It
refuses tags, anchors, aliases, several documents and deep nesting, for which policies have no use.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml

from hvd_sparse.errors import ConfigError

Path = tuple[str | int, ...]
"""Where a value stands: keys and places in lists, from the outside in."""

DEEPEST = 12
LONGEST_SHOWN = 60
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast
PLAIN_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))


class Document:
    """Plain data, and where each part of it comes from.

    Args:
        source: Name that begins every error.
        data: The whole of it.
        lines: Line number by path; empty where the data was no file.
    """

    def __init__(self, source: str, data: Any, lines: Mapping[Path, int] | None = None) -> None:
        self.source = source
        self.data = data
        self._lines = lines or {}

    def place(self, path: Path) -> str:
        """Source, and line where there is one, of a path or of the nearest thing around it."""
        while path and path not in self._lines:
            path = path[:-1]
        line = self._lines.get(path)
        return self.source if line is None else f"{self.source}:{line}"

    def error(self, path: Path, message: str) -> ConfigError:
        """An error that says where, what, and why, in one line."""
        words = f"{dotted(path)}: {message}" if path else message
        return ConfigError(f"{self.place(path)}: {' '.join(words.split())}")


def dotted(path: Path) -> str:
    """`("rules", 2, "density")` as `rules[2].density`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """A value for an error message, not longer than a line should be."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 1] + "…"


SYNONYMS = {"pattern": "name", "glob": "name", "parameter": "name", "regex": "name_regex"}


def suggestion(name: str, known: Collection[str]) -> str:
    """The known names, after the one that was probably meant."""
    close = [SYNONYMS[name]] if SYNONYMS.get(name) in known else []
    close = close or difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"known are {', '.join(sorted(known))}"


def read_file(path: str) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: It cannot be read, or is no plain data; the message names the file.
    """
    try:
        content = FilePath(path).read_bytes()
    except (OSError, ValueError) as error:  # a path with a NUL
        why = getattr(error, "strerror", error)
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    if not content.strip():
        raise ConfigError(f"{path}: the file is empty")
    try:
        return read_yaml(content.decode("utf-8-sig"), path)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02x}"
        raise ConfigError(f"{path}:{line}: not UTF-8 ({byte}): save it as UTF-8") from None


def read_yaml(text: str, source: str) -> Document:
    """Read a YAML text.

    Raises:
        ConfigError: It is none, or more than plain data; the message names the line.
    """
    lines: dict[Path, int] = {}
    try:
        _refuse_references(text, source)
        loader = LOADER(text)
        node = loader.get_single_node()
        data = None if node is None else _Builder(loader, source, lines).build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join(str(error.problem or error.context).split())
        if mark and "token" in problem and "\t" in text.splitlines()[mark.line]:
            problem = "a tab, where YAML needs spaces"
        raise ConfigError(f"{place}: not YAML: {problem}") from None
    except yaml.reader.ReaderError as error:  # a character that YAML does not have
        line = text.partition(chr(error.character))[0].count("\n") + 1
        raise ConfigError(f"{source}:{line}: not YAML: {' '.join(str(error).split())}") from None
    return Document(source, data, lines)


def _refuse_references(text: str, source: str) -> None:
    """Tags, aliases and deep nesting, found before anything is built of them."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        place = f"{source}:{event.start_mark.line + 1}"  # type: ignore[union-attr]
        if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
            raise ConfigError(f"{place}: tags, anchors and aliases are not for policies")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ConfigError(f"{place}: nested deeper than {DEEPEST} levels")


class _Builder:
    """Makes data of nodes, and notes their lines."""

    def __init__(self, loader: Any, source: str, lines: dict[Path, int]) -> None:
        self._loader, self._source, self._lines = loader, source, lines

    def build(self, node: yaml.Node, path: Path) -> Any:
        self._lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, place)) for place, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.build(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self._error(key_node, path, "a key must be text")
            if key in data:
                raise self._error(key_node, (*path, key), "the key is there twice")
            self._lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self.build(value_node, (*path, key))
        return data

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        if node.tag not in PLAIN_TAGS:  # dates and the like are text, too
            return text if node.style else as_number(text)
        try:
            return self._loader.construct_object(node)
        except (ValueError, OverflowError):
            raise self._error(node, path, f"not a number: {shown(text)}") from None

    def _error(self, node: yaml.Node, path: Path, message: str) -> ConfigError:
        here = Document(self._source, None, {path: node.start_mark.line + 1})
        return here.error(path, message)


def as_number(text: str) -> str | float:
    """`1e-3` is a number to its reader, though text to YAML 1.1, which wants `1.0e-3`."""
    if "e" not in text.lower() or not text.lstrip("+-")[:1].isdigit():
        return text
    try:
        return float(text)
    except ValueError:
        return text
