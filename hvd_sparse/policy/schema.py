"""What a policy may say: pydantic models.

The keys of a rule are those below and the options of the methods: a new method, or a new option,
can be named in policies without a change here. A method checks its own options' ranges.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from hvd_sparse.methods import METHODS
from hvd_sparse.transports.connect import TRANSPORT_NAMES

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)

AtLeast0 = Annotated[int, Field(ge=0)]


def _key(words: str) -> Any:
    """A key that may be left out."""
    return Field(default=None, description=words)


class Match(BaseModel):
    """Conditions on a tensor; all that are given must hold, and none are met by every tensor."""

    model_config = STRICT

    name: str = _key("Glob on the parameter's name, as layers.*.weight")
    name_regex: str = _key("Regular expression that the whole name must match")
    min_numel: AtLeast0 = _key("Least elements")
    max_numel: AtLeast0 = _key("Most elements")
    ndim: AtLeast0 = _key("Number of dimensions")
    dtype: Literal["float32", "float16", "bfloat16"] = _key("Type of the gradient")
    module: str = _key("Class of the module that owns the parameter, as Linear")


@cache
def policy_model() -> type[BaseModel]:
    """The model of a whole policy. Making it takes milliseconds, checking with it microseconds."""
    settings: dict[str, Any] = {
        "compressor": (
            Literal[tuple(METHODS)] | None,
            _key("Constructor of hvd_sparse.Compression"),
        ),
        "bucket": (str | None, _key("Tensors of one bucket name are exchanged as one vector")),
    }
    types: dict[str, Any] = {}
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, options in METHODS.items():
        types |= get_type_hints(options)
        for item in fields(options):
            methods = meanings.setdefault(item.name, {}).setdefault(item.metadata["meaning"], [])
            methods.append(name)
    for key, texts in meanings.items():
        said = (f"{', '.join(methods)}: {text}" for text, methods in texts.items())
        words = next(iter(texts)) if [*texts.values()] == [[*METHODS]] else " ".join(said)
        settings[key] = (types[key] | None, _key(words))
    of_rule: dict[str, Any] = {
        "match": (Match, Field(default=Match(), description="Tensors that the rule is for")),
        "compress": (
            Literal["auto", "always", "never"],
            Field(
                default="always",
                description="never: Horovod reduces these tensors densely; auto: the planner "
                "decides, by measured costs",
            ),
        ),
        **settings,
    }
    rule = create_model("Rule", __config__=STRICT, **of_rule)
    defaults = create_model("Defaults", __config__=STRICT, **settings)
    of_policy: dict[str, Any] = {
        "version": (Literal[1], Field(description="Version of the format")),
        "transport": (
            Literal[TRANSPORT_NAMES],
            Field(default="auto", description="What carries the messages"),
        ),
        "hierarchical": (
            bool | Literal["auto"],
            Field(
                default=False,
                description="Whether workers of a host sum their gradients densely, before hosts "
                "exchange sparsely; auto: where all hosts have the same number of them, above one",
            ),
        ),
        "profile": (
            str | None,
            _key("File of hvd-sparse profile; without it, the planner measures at the start"),
        ),
        "plan_cache": (
            str | None,
            _key(
                "File in which the planner keeps its plans for the next run; none: no file; "
                "without it: hvd_sparse/plans.json in the user's folder of caches"
            ),
        ),
        "timeout_s": (
            float,
            Field(
                default=600.0,
                description="Seconds until a peer that is stopped or cannot be reached is given up",
            ),
        ),
        "busy_timeout_s": (
            float | None,
            _key("Seconds until a busy peer is given up, too; by default ten times timeout_s"),
        ),
        "defaults": (
            defaults,
            Field(default=defaults(), description="Keys for rules that do not say them"),
        ),
        "rules": (
            list[rule],  # type: ignore[valid-type]
            Field(description="The first one that matches a tensor decides; none: it is dense"),
        ),
    }
    return create_model("Policy", __config__=STRICT, **of_policy)
