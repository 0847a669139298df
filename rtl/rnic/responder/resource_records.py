"""What the responder keeps of a QP's READs and ATOMICs."""

from amaranth.lib import data

from .read_response import COUNT_BITS
from .records import AtomicOp

__all__ = ["NUMBER_BITS", "Ack", "Entry", "State"]

NUMBER_BITS = 8  # of the numbers of requests, free running; p.max_rd_atomic is at most 128


class Ack(data.StructLayout):
    """An ACK or NAK that waits for the requests before it."""

    def __init__(self):
        super().__init__({"valid": 1, "psn": 24, "syndrome": 8, "msn": 24})


class Entry(data.StructLayout):
    """A READ or ATOMIC as it came, kept until its place is needed (R-DUP-3 to R-DUP-6). ``before``: goes out before its answer
    (R-ACK-4)."""

    def __init__(self):
        super().__init__({"psn": 24, "va": 64, "rkey": 32, "length": 32, "msn": 24, "op": AtomicOp, "before": Ack()})


class State(data.StructLayout):
    """Of a QP. Requests have numbers: ``registered`` of the next to come, ``next`` to answer, ``released`` the first that may
    not be answered yet, ``finished`` the first never answered; ``next`` goes back for a duplicate. ``replay``: request ``next``
    is answered for ``length`` bytes from PSN ``psn`` on; ``streaming``: it is being answered, from there on. ``tail``: the
    ACK or NAK behind all requests; ``opened``: what goes out before the answer of request ``next`` has gone."""

    def __init__(self):
        super().__init__({
            "registered": NUMBER_BITS,
            "released": NUMBER_BITS,
            "next": NUMBER_BITS,
            "finished": NUMBER_BITS,
            "wrapped": 1,  # all places of the store are in use
            "listed": 1,
            "dead": 1,  # nothing is answered any more
            "draining": 1,
            "replay": 1,
            "streaming": 1,
            "first": 1,  # no packet of the stream has been made
            "opened": 1,
            "psn": 24,
            "left": 32,
            "va": 64,
            "tail": Ack(),
            "issued": COUNT_BITS,  # packets given to the READ response sender since power-up
        })  # fmt: skip
