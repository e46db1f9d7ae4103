"""Where a tensor lies: in one bucket, or in parts in several."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hvd_sparse import ops
from hvd_sparse.engine.bucket import Bucket
from hvd_sparse.engine.plan import TensorSpec


class Location:
    """The places of one tensor of a plan.

    Attributes:
        spec: The tensor.
        places: Each bucket that has rows of it, and which of the bucket's tensors they are; in the
            order of the rows.
        bucket: The first of them.
        place: The tensor's, there.
        whole: The decoded gradient of a tensor that is cut; None: the bucket has it.
    """

    def __init__(
        self, spec: TensorSpec, places: Sequence[tuple[Bucket, int]], whole: Tensor | None
    ) -> None:
        self.spec = spec
        self.places = tuple(places)
        self.bucket, self.place = self.places[0]
        self.whole = whole

    def parts(self, tensor: Tensor) -> Iterator[tuple[Bucket, int, Tensor]]:
        """A tensor's rows for each bucket: views."""
        for bucket, place in self.places:
            yield bucket, place, bucket.specs[place].of(tensor)

    def cut(self) -> dict[str, Tensor]:
        """Take what the buckets hold of the tensor out of them: by kind, in the tensor's shape."""
        found = [bucket.take_out(place) for bucket, place in self.places]
        return {
            kind: torch.cat([parts[kind].view(-1) for parts in found]).view(self.spec.shape)
            for kind in found[0]
        }

    def put_in(self, held: Mapping[str, Tensor]) -> None:
        """Put back what `cut` returned."""
        for bucket, place in self.places:
            spec = bucket.specs[place]
            bucket.put_in(place, {kind: spec.of(tensor) for kind, tensor in held.items()})


class Wholes:
    """What tensors that are cut are decoded to, each its buckets' vectors side by side."""

    def __init__(self) -> None:
        self._gradients: dict[str, Tensor] = {}

    def vector_for(self, specs: Sequence[TensorSpec], device: torch.device) -> Tensor | None:
        """What a bucket of these is to decode to; None: a vector of its own."""
        [part, *_] = specs
        if part.whole is None:
            return None
        if part.name not in self._gradients:
            dtype = getattr(torch, part.dtype.removeprefix("torch."))
            vector = ops.zero_vector(part.tensor.numel, dtype, device)
            self._gradients[part.name] = vector.view(part.tensor.shape)
        return part.of(self._gradients[part.name]).view(-1)

    def locate(self, buckets: Iterable[Bucket]) -> dict[str, Location]:
        """Where each tensor of the buckets lies, by its name."""
        specs: dict[str, TensorSpec] = {}
        places: dict[str, list[tuple[Bucket, int]]] = {}
        for bucket in buckets:
            for place, spec in enumerate(bucket.specs):
                specs[spec.name] = spec.tensor
                places.setdefault(spec.name, []).append((bucket, place))
        wholes = self._gradients
        return {name: Location(specs[name], places[name], wholes.get(name)) for name in places}
