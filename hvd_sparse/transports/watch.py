"""A watch over the peers that a rank waits for: it waits for busy ones, and gives dead ones up.

Each transport has one watch thread, which talks to those of the peers over kept connections
(`lines`). Once a rank has waited for a peer for longer than a period, it asks the peer's watch what
the peer is doing, and again each period. A period is a fifth of `timeout_s`, one second at most.

* **The peer answers.** It is alive, however busy: the wait goes on, and a warning names the peer
  every `timeout_s`. `busy_timeout_s` bounds this.
* **The peer has made the same call**, from which this rank is to receive, and for `timeout_s` no
  byte has come or gone: what the peer sent does not arrive, and this rank gives up. Where the
  medium does not tell its bytes, only `busy_timeout_s` bounds this.
* **The peer has failed**, or knows of a rank that has: this rank fails with the same cause.
* **The peer did something else in the same call**: the ranks disagree, and this rank fails with a
  `PlanError`. It does so, too, where the peer has waited for Horovod for `timeout_s`, and exchanged
  nothing meanwhile: the peer has given Horovod a tensor that not all ranks have.
* **The peer is silent for `timeout_s`.** It is stopped, or its host is gone: this rank gives up.
  The same happens where a thread of the peer keeps Python's lock that long.
* **The peer's line has ended** for `ENDED_S`: its process has ended.

A rank that fails tells the ranks at distances 1, 2, 4, … in both directions, and these pass it on:
2 log2 P short messages a rank. While nobody waits, nothing is sent. What arrives is never
unpickled.
"""

from __future__ import annotations

import selectors
import threading
import time
import weakref
from collections.abc import Mapping

from hvd_sparse.errors import (
    HvdSparseError,
    PeerLostError,
    PlanError,
    TransportError,
    TransportTimeout,
    logger,
)
from hvd_sparse.transports.framing import Context
from hvd_sparse.transports.lines import Line, Message
from hvd_sparse.transports.supervised import Awaiting, Call, SupervisedTransport
from hvd_sparse.transports.transport import start_thread

LONGEST_PERIOD_S = 1.0
PERIODS = 5
"""Questions to a peer within `timeout_s`."""

ENDED_S = 5.0
"""So long, the last message of a peer whose line has ended may still be on its way."""

REASON_S = 1.0
CAUSE_CHARACTERS = 2000


class Watch:
    """Watches over the peers of one transport, which it does not keep alive, and answers them."""

    def __init__(
        self, transport: SupervisedTransport, lines: Mapping[int, Line], busy_timeout_s: float
    ) -> None:
        self._transport = weakref.ref(transport)
        self._rank, self._world_size = transport.rank, transport.world_size
        self._timeout_s, self._busy_timeout_s = transport.timeout_s, busy_timeout_s
        self._period_s = min(LONGEST_PERIOD_S, transport.timeout_s / PERIODS)
        self._lines = dict(lines)
        self._selector = selectors.DefaultSelector()
        for peer, line in lines.items():
            self._selector.register(line.connection, selectors.EVENT_READ, peer)
        self._closing = threading.Event()
        self._asked: dict[int, Awaiting] = {}  # by peer that has not answered: in which wait
        now = time.monotonic()
        self._looked_at = self._still_since = self._warned_at = now
        self._position = (0, False)
        self._bytes, self._bytes_at = transport.bytes_moved(), now
        # Of the wait under way: seconds without an answer, by peer that is asked; what each said;
        # seconds without a byte since the peer had made the same call, or None.
        self._wait_since: float | None = None
        self._silent_s: dict[int, float] = {}
        self._says: dict[int, str] = {}
        self._lost_s: float | None = None
        self._thread = start_thread("hvd_sparse watch", self._run)

    def tell(self, kind: str, cause: str) -> None:
        """Tells the peers of the first failure; never raises, and does not wait."""
        P, r = self._world_size, self._rank
        distances = [1 << j for j in range(P.bit_length()) if 1 << j < P]
        for peer in {(r + sign * distance) % P for distance in distances for sign in (1, -1)}:
            self._lines[peer].send({"tell": [kind, cause[:CAUSE_CHARACTERS]]})

    def reason_of(self, peer: int) -> str:
        """Why the connection to a peer may be gone, unless this rank has heard of a failure."""
        line, until = self._lines[peer], time.monotonic() + REASON_S
        while time.monotonic() < until and line.ended is None:
            transport = self._transport()
            if transport is None or transport.failure is not None:
                return ""
            time.sleep(0.01)
        return line.ended or f"rank {peer} lives, and tells of no failure"

    def close(self) -> None:
        """Ends the watch, and the lines to the peers."""
        self._closing.set()
        for line in self._lines.values():
            line.hang_up()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(REASON_S)

    def disown(self) -> None:
        """Closes a forked child's copies, so that the lines end with the parent."""
        for line in self._lines.values():
            line.connection.close()

    def _run(self) -> None:
        look_at = time.monotonic() + self._period_s
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(max(0.0, look_at - time.monotonic())):
                    self._listen_to(key.data)
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + self._period_s
                    transport = self._transport()
                    if transport is None:
                        return
                    self._look(transport, now)
                    del transport
        except Exception as error:  # a bug here; or the waits would never end
            transport = self._transport()
            if transport is not None and not self._closing.is_set():
                transport.fail(
                    TransportError(f"rank {self._rank}: the watch over its peers failed: {error!r}")
                )
                logger.exception("rank %d: the watch over its peers has failed", self._rank)
        finally:
            self._selector.close()
            for line in self._lines.values():
                line.close()

    def _listen_to(self, peer: int) -> None:
        line = self._lines[peer]
        for message in line.receive():
            try:
                self._take(peer, message)
            except (LookupError, TypeError, ValueError):
                line.end("it sent what no rank sends")
                logger.exception("rank %d cannot read what rank %d sent", self._rank, peer)
        if line.ended is not None:
            self._selector.unregister(line.connection)

    def _take(self, peer: int, message: Message) -> None:
        """Takes a peer's failure, its question or its answer."""
        transport = self._transport()
        if transport is None:
            return
        if "tell" in message:
            transport.told(peer, message["tell"])
        elif "ask" in message:
            self._lines[peer].send(self._answer(transport, message["ask"]))
        else:
            if message["failure"]:
                transport.told(peer, message["failure"])
            asked = self._asked.pop(peer, None)
            if peer in self._silent_s:
                self._silent_s[peer] = 0.0
            if asked is not None and self._wait_since == asked.since:
                self._judge(transport, peer, asked, message)

    def _look(self, transport: SupervisedTransport, now: float) -> None:
        """Looks at what the transport is at; asks, warns, or gives up."""
        # Not more than two periods: a rank that was stopped itself has not waited for an answer.
        elapsed_s = min(now - self._looked_at, 2 * self._period_s)
        self._looked_at = now
        for line in self._lines.values():
            line.send()  # what had no room
        awaiting = transport.awaits()
        position = (transport.calls_made(), awaiting is not None)
        if position != self._position:
            self._position, self._still_since = position, now
        if transport.failure is not None or awaiting is None:
            self._wait_since = None
            return
        waited_s = now - awaiting.since
        if awaiting.since != self._wait_since:
            self._wait_since, self._warned_at = awaiting.since, awaiting.since
            self._silent_s, self._says, self._lost_s = {}, {}, None
            elapsed_s = min(waited_s, 2 * self._period_s)
        if waited_s < self._period_s:
            return
        moved = transport.bytes_moved()
        if moved != self._bytes:
            self._bytes, self._bytes_at, self._lost_s = moved, now, None
        elif self._lost_s is not None:
            self._lost_s += elapsed_s
        for peer in awaiting.peers:
            self._silent_s[peer] = self._silent_s.get(peer, 0.0) + elapsed_s
        error = self._reason_to_give_up(awaiting, now)
        if error is not None:
            transport.fail(error)
            return
        for peer in self._silent_s.keys() - self._asked.keys():
            self._asked[peer] = awaiting
            number = None if awaiting.call is None else awaiting.call.number
            self._lines[peer].send({"ask": number})
        if now - self._warned_at >= self._timeout_s:
            self._warned_at = now
            said, awaited = "; ".join(self._says.values()), awaiting.what
            logger.warning(
                "rank %d has waited %.1f s for %s; %s", self._rank, waited_s, awaited, said
            )

    def _reason_to_give_up(self, awaiting: Awaiting, now: float) -> HvdSparseError | None:
        waited_s = now - awaiting.since
        has_waited = f"rank {self._rank} has waited {waited_s:.1f} s for {awaiting.what}"
        for peer, silent_s in self._silent_s.items():
            line = self._lines[peer]
            if line.ended is not None and now - line.ended_at >= min(ENDED_S, self._timeout_s):
                return PeerLostError(
                    f"rank {self._rank} lost rank {peer}: {line.ended}; {has_waited}"
                )
            if silent_s >= self._timeout_s:
                return TransportTimeout(
                    f"rank {self._rank}: rank {peer} did not answer within {self._timeout_s:g} s: "
                    f"it is stopped, or its host cannot be reached; {has_waited}"
                )
        said = "; ".join(self._says.values())
        if self._lost_s is not None and self._lost_s >= self._timeout_s:
            return TransportTimeout(
                f"{has_waited}, which has made that call too, and no byte has come or gone for "
                f"{self._lost_s:.1f} s: the network drops what the ranks send; {said}"
            )
        if now - max(awaiting.since, self._bytes_at) >= self._busy_timeout_s:
            return TransportTimeout(
                f"{has_waited}, longer than busy_timeout_s={self._busy_timeout_s:g}; {said}"
            )
        return None

    def _judge(
        self, transport: SupervisedTransport, peer: int, asked: Awaiting, answer: Message
    ) -> None:
        self._says[peer] = in_words(peer, answer)
        waited_s = time.monotonic() - asked.since
        if stuck_s(answer, waited_s) >= self._timeout_s:
            transport.fail(
                PlanError(
                    f"rank {self._rank} has waited {waited_s:.1f} s for {asked.what}, while rank "
                    f"{peer} has waited {answer['horovod_s']:.1f} s for Horovod and exchanges "
                    f"nothing: rank {peer} has given Horovod a tensor that not all ranks have, so "
                    "they disagree on their parameters or their assignments"
                )
            )
        elif asked.call is not None and answer["did"]:
            number, channel, context, *rest = answer["did"]
            theirs = Call(number, channel, Context(*context), *rest)
            reason = disagreement(self._rank, asked, peer, theirs)
            if reason is not None:
                transport.fail(
                    PlanError(
                        f"rank {self._rank} waits for {asked.what}, but {reason}: the ranks make "
                        "different calls"
                    )
                )
            elif asked.receives and self._lost_s is None and self._bytes is not None:
                self._lost_s = 0.0  # the rest of what is sent may have to wait for its receiver

    def _answer(self, transport: SupervisedTransport, number: int | None) -> Message:
        """What this rank is doing, and its call of the number that was asked."""
        awaiting = transport.awaits()
        since = self._still_since if awaiting is None else awaiting.since
        return {
            "failure": transport.cause(),
            "awaits": None if awaiting is None else awaiting.what,
            "for_s": time.monotonic() - since,
            "horovod_s": transport.waiting.seconds(),
            "did": None if number is None else transport.call_made(number),
        }


def stuck_s(answer: Message, waited_s: float) -> float:
    """How long a rank has waited for one that waits for Horovod, and exchanges nothing.

    A rank waiting for Horovod has started every exchange its peers have, since they came past the
    same operations of Horovod's. So it does not wait for what the others wait for.
    """
    if answer["awaits"] is not None:
        return 0.0
    return min(waited_s, float(answer["for_s"]), float(answer["horovod_s"]))


def in_words(peer: int, answer: Message) -> str:
    """What a peer is doing."""
    if answer["awaits"] is not None:
        return f"rank {peer} waits itself, {answer['for_s']:.1f} s for {answer['awaits']}"
    if answer["horovod_s"] > 0:
        return f"rank {peer} waits for Horovod, {answer['horovod_s']:.1f} s"
    return f"rank {peer} is alive, and busy elsewhere for {answer['for_s']:.1f} s"


def disagreement(rank: int, awaiting: Awaiting, peer: int, theirs: Call) -> str | None:
    """Why a peer's call of the same number will never end a wait; None where it will."""
    mine = awaiting.call
    assert mine is not None
    if awaiting.receives:
        way, other, has, expected = "to", theirs.dst, theirs.sends_up_to, mine.takes_up_to
    else:
        way, other, has, expected = "from", theirs.src, theirs.takes_up_to, mine.sends_up_to
    same = (theirs.channel, theirs.context) == (mine.channel, mine.context)
    if same and other == rank and has == expected:
        return None
    whom = "no rank" if other is None else f"rank {other}"
    return (
        f"rank {peer} made {theirs}, with a message {way} {whom} of up to {has} bytes, where this "
        f"rank expects {expected}"
    )
