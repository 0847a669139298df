"""The instruction set of the command engine: micro-operations, their sources, guards and tests."""

from dataclasses import dataclass

from amaranth.lib import data, enum

from ..abi import CmdStatus, CtxTable

__all__ = [
    "ATTR_BITS", "IMAGE_WORDS", "NO_EQ", "Action", "Event", "Guard", "Kind", "MicroOp", "Op", "Register", "Source", "Test",
    "micro_op_layout",
]  # fmt: skip

ATTR_BITS = 17
IMAGE_WORDS = 32  # words of a QP in the image (microcode: CmdModifyQp and a few more)
NO_EQ = 255  # event queue number of a CQ without one


class Op(enum.IntEnum, shape=4):
    """What a micro-operation does."""

    FAIL_IF = 0  # end with `status` when `test` holds
    LOAD = 1  # register `select` := field
    LOOK = 2  # read object `field` of kind `select`
    OBJECT = 3  # change object `field` of kind `select` as `place` (Action) says
    CTX = 4  # context table `table`, word `place`, `bytes` := rotated word; the index counts from base `select`
    IMAGE = 5  # QP image, word `place`, `bytes`
    MAIL = 6  # mailbox word `place`
    EVENT = 7  # send event `select`
    JUMP = 8  # to `high`
    WAIT = 9  # `high` cycles
    DONE = 10  # end with OK
    FENCE = 11  # wait until nothing begun before is left in the streets (qp.fence); `select`: Kind.QP when a QP ends


class Guard(enum.IntEnum, shape=5):
    """When a micro-operation is done at all. Values below ATTR_BITS: when that attribute is given."""

    UD = 20
    NOT_UD = 21
    TO_RESET = 22
    TO_ERR = 23
    TO_RTS = 24
    NOT_RUNNING = 25  # present state RESET or ERR
    HAS_LINK = 26  # the link register is not NO_EQ
    GONE = 27  # the object looked at does not exist
    BROKEN = 28  # the CQ looked at is in error
    HAS_EVENT = 29  # the error has an async event
    IN_RESET = 30  # present state RESET
    ALWAYS = 31


class Source(enum.IntEnum, shape=3):
    """Where the word comes from."""

    CONST = 0  # `high`
    MAILBOX = 1  # mailbox word `word`
    IMAGE = 2  # word `word` of the QP image
    LINK = 3  # link of the object looked at
    ERROR = 4  # QPN or CQN of the engine's error, or QPN the search is at
    MTU = 5  # the port's
    MINUS_ONE = 6  # mailbox word - 1


class Test(enum.IntEnum, shape=4):
    """Conditions of FAIL_IF."""

    ALWAYS = 0
    OUTSIDE = 1  # field < low or field > high
    OVER_MTU = 2  # field > the port's path MTU
    RIGHTS = 3  # remote write or atomic without local write (R-MR-3)
    STATE_DIFFERS = 4  # field is not the present state
    ABSENT = 5  # the object looked at does not exist
    PRESENT = 6
    USED = 7  # the object looked at is used by others
    LINK_DIFFERS = 8  # field is not the link of the object looked at
    NO_TRANSITION = 9  # (type, state, new state) is none
    EXTRA = 10  # an attribute that the transition does not allow
    MISSING = 11  # an attribute that it requires
    BAD_TYPE = 12
    BROKEN = 13  # the CQ looked at is in error


class Register(enum.IntEnum, shape=3):
    """Registers of the engine."""

    INDEX = 0  # object of the command
    ATTRS = 1
    NEW_STATE = 2
    STATE = 3  # state and type, from the image's STATE_WORD
    TYPE = 4
    LINK = 5
    MTU = 6
    SEARCH = 7  # begin the search for QPs whose CQ is in error


class Kind(enum.IntEnum, shape=3):
    """Objects. MR, CQ, EQ, QP are kinds of the object table; the others are bases of an index of the translation table."""

    MR = 0  # base 0
    CQ = 1
    EQ = 2
    QP = 3
    SQ_RING = 4
    RQ_RING = 5
    CQ_RING = 6
    EQ_RING = 7


class Action(enum.IntEnum, shape=3):
    """Changes of an object."""

    CREATE = 0  # exists, no users, link from the register
    DESTROY = 1
    USE = 2  # one user more
    UNUSE = 3
    BREAK = 4  # a CQ is in error


class Event(enum.IntEnum, shape=2):
    """Events to the engines."""

    SQ_KICK = 0
    RQ_FLUSH = 1
    ASYNC = 2  # the async event of the error, to event queue 0


def micro_op_layout() -> data.StructLayout:
    """The ROM's word."""
    return data.StructLayout({
        "op": Op, "guard": 5, "source": Source, "word": 5, "rotate": 5, "width": 6, "test": Test, "low": 5, "high": 24,
        "status": 4, "table": CtxTable, "place": 5, "bytes": 4, "select": 3,
    })  # fmt: skip


@dataclass
class MicroOp:
    """One micro-operation; ``rotate`` is to the right, in bits; ``high`` may be a label until `programs` resolves it."""

    op: Op
    guard: int = Guard.ALWAYS
    source: Source = Source.CONST
    word: int = 0
    rotate: int = 0
    width: int = 32
    test: Test = Test.ALWAYS
    low: int = 0
    high: int | str = 0
    status: CmdStatus = CmdStatus.OK
    table: CtxTable = CtxTable.TPT
    place: int = 0
    bytes: int = 15
    select: int = 0

    def const(self):
        """The ROM word."""
        return micro_op_layout().const({**vars(self), "guard": int(self.guard), "status": int(self.status)})
