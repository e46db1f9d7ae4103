"""A watch over the peers that a rank waits for: it waits for busy ones, and gives dead ones up.

Each transport has one watch thread, and a TCP port that is bound to the rank's chosen address
(127.0.0.1 on one host) while the transport is open. Once a rank has waited for a peer for longer
than a period, it asks the peer's watch what the peer is doing, and again each period. A period is a
fifth of `timeout_s`, one second at most.

* **The peer answers.** It is alive, however busy: the wait goes on, and a warning names the peer
  every `timeout_s`. `busy_timeout_s` bounds this; by default nothing does, as in Horovod.
* **The peer has failed**, or knows of a rank that has: this rank fails with the same cause.
* **The peer did something else in the same call**: the ranks disagree, and this rank fails with a
  `PlanError`. It does so, too, where the peer has waited for Horovod for `timeout_s`, and exchanged
  nothing meanwhile: the peer has given Horovod a tensor that not all ranks have.
* **The peer is silent for `timeout_s`.** It is stopped, or its host is gone: this rank gives up.
  The same happens where a thread of the peer keeps Python's lock that long; torch releases it.
* **The peer's port is closed** for `REFUSED_S`: its process has ended.

A rank that fails tells the ranks at distances 1, 2, 4, … in both directions, and these pass it on:
2 log2 P short messages a rank. While nobody waits, nothing is sent. Questions carry a token of 16
random bytes that went over Horovod; nothing else is answered. What arrives is never unpickled.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections.abc import Sequence

from hvd_sparse.errors import (
    HvdSparseError,
    PeerLostError,
    PlanError,
    TransportError,
    TransportTimeout,
)
from hvd_sparse.transports.framing import Context
from hvd_sparse.transports.horovod_handles import WAITING
from hvd_sparse.transports.questions import Address, Message, Questions, ask_at_once
from hvd_sparse.transports.supervised import Awaiting, Call, SupervisedTransport

logger = logging.getLogger("hvd_sparse")

LONGEST_PERIOD_S = 1.0
PERIODS = 5
"""Questions to a peer within `timeout_s`."""

PATIENCE_PERIODS = 2
"""An unanswered question is asked again after so many periods, then after twice as long, and so on:
the question or its answer may be lost while a network is down."""

REFUSED_S = 5.0
"""So long, a closed port may still mean that the last message is on its way."""

ASKED_AT_ONCE = 16
"""Peers that are asked at a time by a rank that waits for all."""

TELL_S = 0.5
REASON_S = 1.0
CAUSE_CHARACTERS = 2000


class Watch:
    """Watches over the peers of one transport, and answers them.

    Args:
        transport: Not kept alive.
        listener: Where the peers ask.
        addresses: Where to ask them, by rank; None for one that cannot be asked.
        token: The same on all ranks of the transport, and secret.
        busy_timeout_s: Seconds after which a wait ends though the peer answers, or None.
    """

    def __init__(
        self,
        transport: SupervisedTransport,
        listener: socket.socket,
        addresses: Sequence[Address | None],
        token: bytes,
        busy_timeout_s: float | None = None,
    ) -> None:
        self._transport = weakref.ref(transport)
        self._rank, self._world_size = transport.rank, transport.world_size
        self._timeout_s, self._busy_timeout_s = transport.timeout_s, busy_timeout_s
        self._period_s = min(LONGEST_PERIOD_S, transport.timeout_s / PERIODS)
        self._addresses, self._token = list(addresses), token
        self._questions = Questions(token, listener, self._answer)
        self._ended = threading.Event()
        now = time.monotonic()
        self._looked_at = self._still_since = self._warned_at = now
        self._position = (0, False)
        # Of the wait under way, by peer that was asked: seconds of silence, seconds since its port
        # was found closed, and what it said.
        self._wait_since: float | None = None
        self._silent_s: dict[int, float] = {}
        self._refused_s: dict[int, float] = {}
        self._says: dict[int, str] = {}
        self._asking: set[int] = set()
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="hvd_sparse watch", daemon=True)
        self._thread.start()

    def tell(self, kind: str, cause: str) -> None:
        """Tells the peers of the first failure; never raises, and takes `TELL_S` at most."""
        P, r = self._world_size, self._rank
        distances = [1 << j for j in range(P.bit_length()) if 1 << j < P]
        peers = {(r + sign * distance) % P for distance in distances for sign in (1, -1)}
        question = {"from": r, "tell": [kind, cause[:CAUSE_CHARACTERS]]}
        addresses = [address for p in peers if (address := self._addresses[p]) is not None]
        try:
            ask_at_once(self._token, addresses, question, TELL_S, answers=False)
        except OSError as error:
            logger.warning("rank %d cannot tell its peers of its failure: %s", r, error)

    def reason_of(self, peer: int) -> tuple[str, str] | str:
        """Why the connection to a peer may be gone: its failure's kind and cause, or words."""
        address = self._addresses[peer]
        if address is None:
            return ""
        question = {"from": self._rank, "ask": None}
        try:
            heard = ask_at_once(self._token, [address], question, REASON_S, answers=True)
        except OSError as error:
            return f"it cannot be asked why ({error})"
        answer, refused = heard[0] if heard else (None, False)
        if answer is not None:
            failure = answer["failure"]
            return tuple(failure) if failure else f"rank {peer} answers, and knows of no failure"
        if refused:
            time.sleep(0.1)  # what it told before it went may be on its way to the watch
            return "its process has ended, or has closed the transport"
        return f"rank {peer} does not answer"

    def close(self) -> None:
        """Ends the watch."""
        self._ended.set()
        self._questions.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(REASON_S)

    def _run(self) -> None:
        look_at = time.monotonic() + self._period_s
        try:
            while not self._ended.is_set():
                self._questions.serve(look_at - time.monotonic())
                now = time.monotonic()
                if now >= look_at:
                    look_at = now + self._period_s
                    transport = self._transport()
                    if transport is None:
                        return
                    self._look(transport, now)
                    del transport
        except Exception as error:  # or the waits would never end
            transport = self._transport()
            if transport is not None and not self._ended.is_set():
                logger.exception("rank %d: the watch over its peers has failed", self._rank)
                transport.fail(
                    TransportError(f"rank {self._rank}: the watch over its peers failed: {error!r}")
                )
        finally:
            self._questions.close()

    def _look(self, transport: SupervisedTransport, now: float) -> None:
        """Looks at what the transport is at; asks, warns, or gives up."""
        # Not more than two periods: a rank that was stopped itself has not waited for an answer.
        elapsed_s = min(now - self._looked_at, 2 * self._period_s)
        self._looked_at = now
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
            self._silent_s, self._refused_s, self._says, self._next = {}, {}, {}, 0
            elapsed_s = min(waited_s, 2 * self._period_s)
        if waited_s < self._period_s:
            return
        self._choose_whom_to_ask(awaiting)
        for peer in self._silent_s:
            self._silent_s[peer] += elapsed_s
            if peer in self._refused_s:
                self._refused_s[peer] += elapsed_s
        error = self._reason_to_give_up(awaiting, waited_s)
        if error is not None:
            transport.fail(error)
            return
        for peer in self._silent_s.keys() - self._asking:
            self._ask(peer, awaiting)
        if now - self._warned_at >= self._timeout_s:
            self._warned_at = now
            said = "; ".join(self._says.values())
            logger.warning(
                "rank %d has waited %.1f s for %s; %s", self._rank, waited_s, awaiting.what, said
            )

    def _choose_whom_to_ask(self, awaiting: Awaiting) -> None:
        """Keeps those that have not answered, and adds the next ones up to `ASKED_AT_ONCE`."""
        peers = awaiting.peers
        for _ in range(min(len(peers), ASKED_AT_ONCE) - len(self._silent_s)):
            self._silent_s.setdefault(peers[self._next % len(peers)], 0.0)
            self._next += 1

    def _reason_to_give_up(self, awaiting: Awaiting, waited_s: float) -> HvdSparseError | None:
        has_waited = f"rank {self._rank} has waited {waited_s:.1f} s for {awaiting.what}"
        for peer, silent_s in self._silent_s.items():
            late = silent_s >= self._timeout_s
            if peer in self._refused_s and (late or self._refused_s[peer] >= REFUSED_S):
                return PeerLostError(
                    f"rank {self._rank} lost rank {peer}: its process has ended, or has closed the "
                    f"transport; {has_waited}"
                )
            if late:
                return TransportTimeout(
                    f"rank {self._rank}: rank {peer} did not answer within {self._timeout_s:g} s: "
                    f"it is stopped, or its host cannot be reached; {has_waited}"
                )
        if self._busy_timeout_s is not None and waited_s >= self._busy_timeout_s:
            said = "; ".join(self._says.values())
            return TransportTimeout(
                f"{has_waited}, longer than busy_timeout_s={self._busy_timeout_s:g}; {said}"
            )
        return None

    def _ask(self, peer: int, awaiting: Awaiting) -> None:
        address = self._addresses[peer]
        if address is None:
            return
        number = None if awaiting.call is None else awaiting.call.number
        self._asking.add(peer)
        self._questions.ask(
            address,
            {"from": self._rank, "ask": number},
            lambda answer, refused: self._heard(peer, awaiting, answer, refused),
            max(PATIENCE_PERIODS * self._period_s, self._silent_s[peer]),
        )

    def _heard(self, peer: int, asked: Awaiting, answer: Message | None, refused: bool) -> None:
        """Takes an answer to what was asked during one wait."""
        self._asking.discard(peer)
        transport = self._transport()
        if transport is None:
            return
        if answer is not None and answer["failure"]:
            transport.told(peer, tuple(answer["failure"]))
        if self._wait_since != asked.since:
            return
        if answer is None:
            if refused:
                self._refused_s.setdefault(peer, 0.0)
            return
        self._silent_s.pop(peer, None)
        self._refused_s.pop(peer, None)
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

    def _answer(self, question: Message) -> Message:
        """What this rank is doing, or an acknowledgement of a peer's failure.

        An answer holds this rank's failure; what it awaits, and for how many seconds; the seconds
        that it has waited for Horovod; and its call of the number that was asked.
        """
        transport = self._transport()
        if transport is None:  # dropped without `close`: this thread ends soon, too
            return {"failure": None, "awaits": None, "for_s": 0.0, "horovod_s": 0.0, "did": None}
        if "tell" in question:
            kind, cause = question["tell"]
            transport.told(int(question["from"]), (str(kind), str(cause)))
            return {}
        awaiting = transport.awaits()
        now = time.monotonic()
        since = self._still_since if awaiting is None else awaiting.since
        number = question["ask"]
        return {
            "failure": transport.cause(),
            "awaits": None if awaiting is None else awaiting.what,
            "for_s": now - since,
            "horovod_s": WAITING.seconds(),
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
    if (theirs.channel, theirs.context) != (mine.channel, mine.context):
        return f"rank {peer} made {theirs}"
    if awaiting.receives:
        if theirs.dst != rank:
            return f"rank {peer} sent its message of that call to {_name(theirs.dst)}"
        if theirs.sends_up_to != mine.takes_up_to:
            return (
                f"rank {peer} sends up to {theirs.sends_up_to} bytes in that call, where this rank "
                f"has made room for {mine.takes_up_to}"
            )
    elif theirs.src != rank:
        return f"rank {peer} awaits a message from {_name(theirs.src)} in that call"
    elif theirs.takes_up_to != mine.sends_up_to:
        return (
            f"rank {peer} has made room for {theirs.takes_up_to} bytes in that call, where this "
            f"rank sends up to {mine.sends_up_to}"
        )
    return None


def _name(rank: int | None) -> str:
    return "no rank" if rank is None else f"rank {rank}"
