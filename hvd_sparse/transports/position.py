"""Where a rank is: in which bucket and step, in which call of its transport, and what it waits for.

Messages carry a short form of it (`framing`), errors say it, and ranks that wait long ask their
peers for it (`watch`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Context(NamedTuple):
    """What the caller of a transport is at, the same on all ranks.

    Attributes:
        bucket: A name of the bucket that is exchanged; empty where there is none.
        step: Its step, from 0.
    """

    bucket: str = ""
    step: int = 0

    def __str__(self) -> str:
        """As messages say it."""
        return f"bucket {self.bucket!r}, step {self.step}" if self.bucket else "no bucket"


NO_CONTEXT = Context()

NUMBER_BITS = 40
"""Bits of a call's number that count; those above tell the kind of a group (`group`)."""


class Call(NamedTuple):
    """One call of `exchange`, as a rank made it.

    Attributes:
        number: Its place in the sequence of calls, which is the same on all ranks.
        channel: The purpose of its messages.
        context: What the caller was at.
        dst: The rank that it sends to, or None.
        src: The rank that it receives from, or None.
        sends_up_to: Bytes that its first message may have; both ends must think the same.
        takes_up_to: The same of the message that it receives.
    """

    number: int
    channel: str
    context: Context
    dst: int | None
    src: int | None
    sends_up_to: int = 0
    takes_up_to: int = 0

    def __str__(self) -> str:
        """As messages say it."""
        return (
            f"call {self.number % (1 << NUMBER_BITS)} on channel {self.channel!r} ({self.context})"
        )


@dataclass(frozen=True)
class Awaiting:
    """What a rank waits for.

    Attributes:
        peers: The ranks that it waits for.
        since: When it began to, a value of `time.monotonic()`.
        what: The same in words.
        call: The call that waits, or None where the medium has no calls of its own.
        receives: Whether it waits for a message; else for room for its own.
    """

    peers: tuple[int, ...]
    since: float
    what: str
    call: Call | None = None
    receives: bool = True


def disagreement(rank: int, awaiting: Awaiting, peer: int, theirs: Call) -> str | None:
    """Why a peer's call of the same number will never end a wait, or None where it will.

    Args:
        rank: The rank that waits.
        awaiting: What it waits for.
        peer: The rank that it waits for.
        theirs: The peer's call of the same number.
    """
    mine = awaiting.call
    assert mine is not None
    if (theirs.channel, theirs.context) != (mine.channel, mine.context):
        reason = f"rank {peer} made {theirs}"
    elif awaiting.receives and theirs.dst != rank:
        reason = f"rank {peer} sent its message of that call to {_name(theirs.dst)}"
    elif not awaiting.receives and theirs.src != rank:
        reason = f"rank {peer} awaits a message from {_name(theirs.src)} in that call"
    elif awaiting.receives and theirs.sends_up_to != mine.takes_up_to:
        reason = (
            f"rank {peer} sends up to {theirs.sends_up_to} bytes in that call, where this rank has "
            f"made room for {mine.takes_up_to}"
        )
    elif not awaiting.receives and theirs.takes_up_to != mine.sends_up_to:
        reason = (
            f"rank {peer} has made room for {theirs.takes_up_to} bytes in that call, where this "
            f"rank sends up to {mine.sends_up_to}"
        )
    else:
        return None
    return reason


def _name(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"


Answer = dict[str, Any]
"""What a rank tells a peer that asks: its failure, what it awaits and for how many seconds it has
been at that, the seconds it has waited for Horovod, and its call of the number that was asked."""

NOTHING: Answer = {"failure": None, "awaits": None, "for_s": 0.0, "horovod_s": 0.0, "did": None}


def stuck_s(answer: Answer, waited_s: float) -> float:
    """How long a rank has waited for one that itself waits for Horovod, and exchanges nothing.

    Who waits for Horovod has begun every exchange that its peers have begun: they came past the
    same operations of Horovod's. So this one does not wait for what the others wait for.
    """
    if answer["awaits"] is not None:
        return 0.0
    return min(waited_s, float(answer["for_s"]), float(answer["horovod_s"]))


def in_words(peer: int, answer: Answer) -> str:
    """What a peer is at."""
    if answer["awaits"] is not None:
        return f"rank {peer} waits itself, {answer['for_s']:.1f} s for {answer['awaits']}"
    if answer["horovod_s"] > 0:
        return f"rank {peer} waits for Horovod, {answer['horovod_s']:.1f} s"
    return f"rank {peer} is alive, and busy elsewhere for {answer['for_s']:.1f} s"
