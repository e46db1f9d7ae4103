"""What reductions cost in one world, as straight lines, and where that was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvd_sparse.checks import check_above_zero, check_count, check_not_negative, check_share
from hvd_sparse.collectives.registry import BY_NAME, cost
from hvd_sparse.cost_model import PLAIN_BYTES, WireBytes
from hvd_sparse.engine.bucketing import MethodId
from hvd_sparse.errors import ConfigError, one_line
from hvd_sparse.files import write_text

VERSION = 4
REFERENCE_NUMEL = 1 << 20
"""Elements at which costs of two worlds are compared."""


@dataclass(frozen=True)
class Line:
    """Seconds as a fixed part and a part per element."""

    fixed_s: float
    per_element_s: float

    def at(self, numel: float) -> float:
        """The seconds for so many elements."""
        return self.fixed_s + self.per_element_s * numel

    def times(self, fixed: float, per_element: float) -> Line:
        """Both parts, each by a factor."""
        return Line(self.fixed_s * fixed, self.per_element_s * per_element)


def fit_line(numels: Sequence[int], seconds: Sequence[float]) -> Line:
    """The line with the least squared relative error, no part of it negative.

    Only noise can make larger vectors take less time than smaller ones. The line is then a cautious
    one: its fixed part is the first time, and its slope is the last time over the last size.
    """
    x, y = np.asarray(numels, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    (fixed_s, per_element_s), *_ = np.linalg.lstsq(
        np.stack([1 / y, x / y], axis=1), np.ones(len(y)), rcond=None
    )
    if fixed_s < 0:
        return Line(0.0, float((x / y).sum() / ((x / y) ** 2).sum()))
    if per_element_s < 0:
        return Line(float(y[0]), float(y[-1] / x[-1]))
    return Line(float(fixed_s), float(per_element_s))


@dataclass(frozen=True)
class MethodCosts:
    """One method's costs for a bucket, at its density.

    Attributes:
        collective: What it exchanges by, by its name in the registry; "" where it is not there.
        encode: Accumulating and selecting.
        wire: What its entries are expected to take.
    """

    collective: str
    density: float
    encode: Line
    exchange: Line
    decode: Line
    wire: WireBytes = PLAIN_BYTES

    def seconds(self, numel: float) -> float:
        """All of a bucket's step."""
        return self.encode.at(numel) + self.exchange.at(numel) + self.decode.at(numel)


@dataclass(frozen=True)
class Place:
    """Where costs hold.

    Attributes:
        host_class: Processor and number of cores, and how many hosts there are.
        device: Where the gradients are: "cpu", or the name of rank 0's device.
    """

    host_class: str
    world_size: int
    transport: str
    torch: str
    device: str = "cpu"

    @staticmethod
    def from_json(data: Any) -> Place:
        """Read a place's plain form; anything else raises TypeError or ConfigError."""
        place = Place(**data)
        check_count("world_size", place.world_size, 1)
        return place


@dataclass(frozen=True)
class Profile:
    """The costs of one world.

    Attributes:
        dense: Horovod's allreduce, per float32 element.
        source: Where they come from, in words.
    """

    place: Place
    dense: Line
    methods: Mapping[MethodId, MethodCosts]
    source: str = "measured"

    def costs_of(self, method: MethodId) -> MethodCosts:
        """A method's costs.

        Raises:
            ConfigError: The profile does not have them.
        """
        if method not in self.methods:
            known = ", ".join(map(str, self.methods))
            raise ConfigError(f"the profile has no costs of {str(method)!r}, only of {known}")
        return self.methods[method]

    def calibrated(self, dense: float, methods: float) -> Profile:
        """The same with all dense and all sparse costs multiplied by factors."""
        scaled = {
            name: replace(
                c,
                encode=c.encode.times(methods, methods),
                exchange=c.exchange.times(methods, methods),
                decode=c.decode.times(methods, methods),
            )
            for name, c in self.methods.items()
        }
        return Profile(self.place, self.dense.times(dense, dense), scaled, self.source)

    def carried_over(self, place: Place) -> Profile:
        """This profile for another number of ranks, by the ratios of the cost model.

        Raises:
            ConfigError: More than the number of ranks differs, or a method has no formula.
        """
        mine, other = asdict(self.place), asdict(place)
        differing = [key for key in mine if key != "world_size" and mine[key] != other[key]]
        if differing:
            words = "; ".join(f"{key} {mine[key]!r}, here {other[key]!r}" for key in differing)
            raise ConfigError(f"the profile was taken elsewhere: {words}")
        old, new = self.place.world_size, place.world_size
        if old == new:
            return self
        if old == 1:
            raise ConfigError("a profile of one rank says nothing of exchanges between several")
        methods = {}
        for name, c in self.methods.items():
            if c.collective not in BY_NAME:
                raise ConfigError(
                    f"the profile is of {old} ranks, here are {new}, and the cost model has no "
                    f"formula for {str(name)!r}"
                )
            k = max(1, round(c.density * REFERENCE_NUMEL))
            ratios = cost_ratios(c.collective, old, new, REFERENCE_NUMEL, k, c.wire)
            methods[name] = replace(c, exchange=c.exchange.times(*ratios))
        dense = self.dense.times(*cost_ratios("dense", old, new, REFERENCE_NUMEL, 1))
        return Profile(place, dense, methods, f"measured on {old} ranks, carried over to {new}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        write_text(path, json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> dict[str, Any]:
        """As plain containers."""
        methods = [{"method": m.to_json(), **asdict(c)} for m, c in self.methods.items()]
        data = {"place": asdict(self.place), "dense": asdict(self.dense), "source": self.source}
        return {"version": VERSION, **data, "methods": methods}

    @staticmethod
    def from_json(data: Any) -> Profile:
        """Read what `to_json` made.

        Raises:
            ConfigError: It is not that.
        """
        try:
            if data["version"] != VERSION:
                raise ConfigError(f"version must be {VERSION}, got {data['version']!r}")
            methods = {MethodId.from_json(m["method"]): _method_costs(m) for m in data["methods"]}
            place = Place.from_json(data["place"])
            return Profile(place, _line(data["dense"]), methods, str(data["source"]))
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"not a profile: {one_line(error)}") from None

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a file that `save` has written.

        Raises:
            ConfigError: It is no profile.
            OSError: It cannot be read.
        """
        try:
            return Profile.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # ConfigError is one
            raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _line(data: Mapping[str, Any]) -> Line:
    return Line(**{name: check_not_negative(name, value) for name, value in data.items()})


def _method_costs(data: Mapping[str, Any]) -> MethodCosts:
    lines = {name: _line(data[name]) for name in ("encode", "exchange", "decode")}
    wire = WireBytes(**{name: check_above_zero(name, v) for name, v in data["wire"].items()})
    density = check_share("density", data["density"])
    return MethodCosts(str(data["collective"]), density, **lines, wire=wire)


def cost_ratios(
    algorithm: str, old: int, new: int, numel: int, k: int, wire: WireBytes = PLAIN_BYTES
) -> tuple[float, float]:
    """How much more messages, and bytes, an allreduce costs in a world of another size."""
    before, after = (cost(algorithm, P, numel, k, wire).expected for P in (old, new))
    return after.messages / before.messages, after.nbytes(wire) / before.nbytes(wire)


def host_class(hosts: int) -> str:
    """What kind of hosts this one is of, and how many there are."""
    return f"{processor()}, {os.cpu_count()} cores, {hosts} host{'s' * (hosts != 1)}"


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def place_of(transport_name: str, world_size: int, hosts: int, device: str = "cpu") -> Place:
    """The place of this process."""
    return Place(host_class(hosts), world_size, transport_name, str(torch.__version__), device)
