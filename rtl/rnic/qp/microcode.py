"""The commands as micro-programs, generated from the declarations of `rnic.abi`.

Every command first looks at everything it could refuse (``FAIL_IF``) and only then writes, so a command that fails has changed
nothing (R-QP-1). Each micro-operation takes one 32-bit word from a source, rotates it and takes a field of it; the field is
checked, or written, rotated into place, under a byte mask, into a context table, the QP image or the mailbox.
"""

from .. import abi
from ..abi import Access, Attr, CmdStatus, Command, CtxTable, QpState, QpType
from ..abi.fields import Struct
from ..config import Params
from .micro_op import ATTR_BITS, Action, Event, Guard, Kind, MicroOp, Op, Register, Source, Test

__all__ = ["BAD_COMMAND_ENTRY", "BROKEN_CQ_ENTRY", "ERROR_ENTRY", "RESET_MTU", "SEARCH_ENTRY", "programs", "transition_rom"]

IMAGE_SEND_CQ = 24  # words of the QP image behind those of CmdModifyQp
IMAGE_RECV_CQ = 25
STATE_WORD = 2  # CmdModifyQp: new_state (in the image: the present state), cur_state, type
ERROR_ENTRY = 31  # where the program of an engine's QpError starts; the commands start at their codes
BAD_COMMAND_ENTRY = 32  # codes that are no command start here
BROKEN_CQ_ENTRY = 33  # a CQ is in error
SEARCH_ENTRY = 34  # one step of the search for the QPs of such a CQ
RESET_MTU = 5  # path MTU code of the port until SET_PORT


# Which attribute brings which fields of CmdModifyQp.
_ATTR_FIELDS: dict[Attr, list[str]] = {
    Attr.PKEY_INDEX: ["pkey_index"], Attr.ACCESS: ["access"], Attr.QKEY: ["qkey"],
    Attr.AV: ["sgid_index", "dmac", "vlan_tci", "sport", "hop_limit", "traffic_class", "flow_label", "vlan", "ipv6", "dip"],
    Attr.PATH_MTU: ["path_mtu"], Attr.DEST_QPN: ["dest_qpn"], Attr.RQ_PSN: ["rq_psn"], Attr.SQ_PSN: ["sq_psn"],
    Attr.MAX_DEST_RD_ATOMIC: ["max_dest_rd_atomic"], Attr.MIN_RNR_TIMER: ["min_rnr_timer"], Attr.TIMEOUT: ["timeout"],
    Attr.RETRY_CNT: ["retry_cnt"], Attr.RNR_RETRY: ["rnr_retry"], Attr.MAX_RD_ATOMIC: ["max_rd_atomic"],
}  # fmt: skip

_CFG: dict[CtxTable, Struct] = {  # tables with the state, in the order in which a QP is started
    CtxTable.REQUESTER_CFG: abi.REQUESTER_CFG, CtxTable.COMPLETER_CFG: abi.COMPLETER_CFG,
    CtxTable.RESPONDER_CFG: abi.RESPONDER_CFG, CtxTable.ADDRESS: abi.ADDRESS_CTX,
}  # fmt: skip
_HOT: dict[CtxTable, Struct] = {
    CtxTable.REQUESTER_HOT: abi.REQUESTER_HOT, CtxTable.COMPLETER_HOT: abi.COMPLETER_HOT,
    CtxTable.RESPONDER_HOT: abi.RESPONDER_HOT, CtxTable.SQ_FETCH: abi.SQ_FETCH, CtxTable.SQ_PRODUCER: abi.COUNTER,
    CtxTable.RQ_PRODUCER: abi.COUNTER,
}  # fmt: skip


def attr_guard(attr: Attr) -> int:
    """Guard of one attribute."""
    return int(attr).bit_length() - 1


def _field(struct: Struct, name: str) -> dict:
    """Source of a field: word, rotation, width. The whole last byte counts, so that stray bits are refused, unless other
    fields share it."""
    field = struct.fields[name]
    word, bit = divmod(field.offset, 32)
    shared = any(f is not field and f.offset // 8 == (field.offset + field.width - 1) // 8 for f in struct.fields.values())
    width = field.width if shared or bit % 8 else -(-field.width // 8) * 8
    return {"source": Source.MAILBOX, "word": word, "rotate": bit, "width": min(32, width)}


class _Program:
    """Collects micro-operations."""

    def __init__(self, p: Params):
        self.p = p
        self.ops: list[MicroOp] = []
        self.labels: dict[str, int] = {}

    def op(self, op: Op, **fields) -> None:
        self.ops.append(MicroOp(op, **fields))

    def label(self, name: str) -> None:
        self.labels[name] = len(self.ops)

    def fail_if(self, test: Test, status: CmdStatus, **fields) -> None:
        self.op(Op.FAIL_IF, test=test, status=status, **fields)

    def limit(self, struct: Struct, name: str, low: int, high: int, status=CmdStatus.BAD_PARAM, **fields) -> None:
        """The field lies within low..high."""
        self.fail_if(Test.OUTSIDE, status, low=low, high=high, **_field(struct, name), **fields)

    def copies(self, source: Struct, dest: Struct, names: dict[str, str], to: dict, **fields) -> None:
        """Copy fields (source name: destination name), byte by byte, as few words as possible."""
        moves: dict[tuple[int, int, int], int] = {}
        for source_name, dest_name in names.items():
            src, dst = source.fields[source_name], dest.fields[dest_name]
            if src.offset % 8 != dst.offset % 8:
                raise ValueError(f"{source.name}.{source_name} and {dest.name}.{dest_name} differ within the byte")
            for i in range((src.offset % 8 + src.width + 7) // 8):
                s, d = src.offset // 8 + i, dst.offset // 8 + i
                key = s // 4, d // 4, 8 * (s % 4 - d % 4) % 32
                moves[key] = moves.get(key, 0) | 1 << d % 4
        for (word, place, rotate), mask in sorted(moves.items(), key=lambda move: move[0][1]):
            self.op(source=Source.MAILBOX, word=word, rotate=rotate, place=place, bytes=mask, **to, **fields)

    def store(self, table: CtxTable, word: int, value: int = 0, mask: int = 15, **fields) -> None:
        """Constant into a context table."""
        self.op(Op.CTX, table=table, place=word, bytes=mask, high=value, **fields)

    def states(self, **source) -> None:
        """The state byte of all tables: the receive filter's table last, or first when the QP is stopped."""
        for table in _CFG if source.get("source", Source.CONST) == Source.MAILBOX else reversed(_CFG):
            self.op(Op.CTX, table=table, place=0, bytes=1, **source)
        self.op(Op.IMAGE, place=STATE_WORD, bytes=1, **source)

    def clear(self, tables: dict[CtxTable, Struct]) -> None:
        """All words of tables := 0."""
        for table, struct in tables.items():
            for word in range(struct.size // 4):
                self.store(table, word)

    def find(self, kind: Kind, struct: Struct, name: str, count: int) -> None:
        """Object number in range, then look at it."""
        self.limit(struct, name, 0, count - 1, CmdStatus.BAD_INDEX)
        self.op(Op.LOOK, select=kind, **_field(struct, name))

    def index(self, kind: Kind, struct: Struct, name: str, count: int) -> None:
        """The object of the command."""
        self.find(kind, struct, name, count)
        self.op(Op.LOAD, select=Register.INDEX, **_field(struct, name))

    def ring_checks(self, first: int, *, ring: bool) -> None:
        """A translation entry in the mailbox from word ``first`` on."""
        entry = Struct("Entry", 4 * first + 32, "", [
            (f.name, (4 * first + f.offset // 8, f.offset % 8), f.width, "") for f in abi.TPT_ENTRY.fields.values()
        ])  # fmt: skip
        self.limit(entry, "valid", 1, 1)
        self.limit(entry, "levels", 0, 2)
        self.limit(entry, "log_page", 12, 30)
        if ring:
            for half in range(2):
                word = entry.fields["base"].offset // 32 + half
                self.fail_if(Test.OUTSIDE, CmdStatus.BAD_PARAM, source=Source.MAILBOX, word=word)
        else:
            self.fail_if(Test.RIGHTS, CmdStatus.BAD_PARAM, **_field(entry, "rights"))  # R-MR-3

    def entry(self, first: int, kind: Kind, own_byte: int, **own) -> None:
        """Write the translation entry; byte ``own_byte`` of word 0 is not the mailbox's. The valid bit comes last."""
        for word in range(1, 8):
            self.op(Op.CTX, table=CtxTable.TPT, select=kind, place=word, source=Source.MAILBOX, word=first + word)
        self.op(Op.CTX, table=CtxTable.TPT, select=kind, place=0, bytes=1 << own_byte, **own)
        self.op(Op.CTX, table=CtxTable.TPT, select=kind, place=0, bytes=15 & ~(1 << own_byte), source=Source.MAILBOX, word=first)

    def ring(self, first: int, kind: Kind) -> None:
        """A ring's entry: rights are LOCAL_WRITE."""
        self.entry(first, kind, 2, high=int(Access.LOCAL_WRITE) << 16)


def _word(struct: Struct, name: str) -> int:
    return struct.fields[name].offset // 32


def _port(b: _Program) -> None:
    p = b.p
    b.label("SET_PORT")
    b.limit(abi.CMD_SET_PORT, "mtu", 1, 5)
    b.op(Op.LOAD, select=Register.INDEX)  # in the PORT table the index counts words
    b.copies(abi.CMD_SET_PORT, abi.PORT_CFG, {"mtu": "mtu"}, {"op": Op.CTX, "table": CtxTable.PORT})
    b.op(Op.LOAD, select=Register.MTU, **_field(abi.CMD_SET_PORT, "mtu"))
    b.op(Op.DONE)

    b.label("QUERY_PORT")
    b.op(Op.MAIL, place=_word(abi.CMD_SET_PORT, "mtu"), source=Source.MTU)
    b.op(Op.DONE)

    b.label("SET_GID")
    b.limit(abi.CMD_SET_GID, "index", 0, p.num_gids - 1, CmdStatus.BAD_INDEX)
    b.op(Op.LOAD, select=Register.INDEX, **_field(abi.CMD_SET_GID, "index"))
    valid = _word(abi.GID_ENTRY, "valid")
    b.store(CtxTable.GID, valid)  # an entry is never valid half written
    for word in [*(w for w in range(abi.GID_ENTRY.size // 4) if w != valid), valid]:
        b.op(Op.CTX, table=CtxTable.GID, place=word, source=Source.MAILBOX, word=1 + word)
    b.op(Op.DONE)

    b.label("SET_PKEY")
    b.limit(abi.CMD_SET_PKEY, "index", 0, p.num_pkeys - 1, CmdStatus.BAD_INDEX)
    b.op(Op.LOAD, select=Register.INDEX, **_field(abi.CMD_SET_PKEY, "index"))
    b.op(Op.CTX, table=CtxTable.PORT, place=_word(abi.PORT_CFG, "pkey0"), bytes=3, source=Source.MAILBOX,
         word=_word(abi.CMD_SET_PKEY, "pkey"))  # fmt: skip
    b.op(Op.DONE)


def _regions(b: _Program) -> None:
    key = {"source": Source.MAILBOX, "word": 0}
    index = key | {"rotate": 8, "width": 24}

    b.label("CREATE_MR")
    b.fail_if(Test.OUTSIDE, CmdStatus.BAD_INDEX, high=b.p.num_mrs - 1, **index)
    b.op(Op.LOOK, select=Kind.MR, **index)
    b.fail_if(Test.PRESENT, CmdStatus.IN_USE)
    b.ring_checks(1, ring=False)
    b.op(Op.LOAD, select=Register.INDEX, **index)
    b.op(Op.LOAD, select=Register.LINK, **key)  # the variant (R-MR-1)
    b.op(Op.OBJECT, select=Kind.MR, place=Action.CREATE, **index)
    b.entry(1, Kind.MR, 1, rotate=24, **key)
    b.op(Op.DONE)

    b.label("DESTROY_MR")
    b.fail_if(Test.OUTSIDE, CmdStatus.BAD_INDEX, high=b.p.num_mrs - 1, **index)
    b.op(Op.LOOK, select=Kind.MR, **index)
    b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
    b.fail_if(Test.LINK_DIFFERS, CmdStatus.NOT_FOUND, width=8, **key)  # R-MR-1
    b.op(Op.LOAD, select=Register.INDEX, **index)
    b.store(CtxTable.TPT, 0)
    b.op(Op.FENCE)
    b.op(Op.OBJECT, select=Kind.MR, place=Action.DESTROY, **index)
    b.op(Op.DONE)


def _completion(b: _Program) -> None:
    p = b.p
    link = {"guard": Guard.HAS_LINK, "source": Source.LINK}
    for kind, struct, count, ring, table in (
        (Kind.EQ, abi.CMD_CREATE_EQ, p.num_eqs, Kind.EQ_RING, CtxTable.EQ),
        (Kind.CQ, abi.CMD_CREATE_CQ, p.num_cqs, Kind.CQ_RING, CtxTable.CQ),
    ):
        cq = kind == Kind.CQ
        number = "cqn" if cq else "eqn"
        b.label(f"CREATE_{kind.name}")
        b.find(kind, struct, number, count)
        b.fail_if(Test.PRESENT, CmdStatus.IN_USE)
        b.limit(struct, "valid", 1, 1)
        b.limit(struct, "log_size", 1, 16)
        b.ring_checks(_word(struct, "ring"), ring=True)
        if cq:
            b.op(Op.LOAD, select=Register.LINK, **_field(struct, "eqn"))
            b.limit(struct, "eqn", 0, p.num_eqs - 1, CmdStatus.BAD_INDEX, guard=Guard.HAS_LINK)
            b.op(Op.LOOK, select=Kind.EQ, guard=Guard.HAS_LINK, **_field(struct, "eqn"))
            # Looking at the EQ replaced the link by the EQ's own, which is never NO_EQ: the guard still holds.
            b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND, guard=Guard.HAS_LINK)
            b.op(Op.LOAD, select=Register.LINK, **_field(struct, "eqn"))
        else:
            b.op(Op.LOAD, select=Register.LINK)
        b.op(Op.LOAD, select=Register.INDEX, **_field(struct, number))
        b.op(Op.OBJECT, select=kind, place=Action.CREATE, **_field(struct, number))
        if cq:
            b.op(Op.OBJECT, select=Kind.EQ, place=Action.USE, **link)
            b.clear({CtxTable.CQ_CONSUMER: abi.CQ_CONSUMER})
        for word in range(1, (abi.CQ_CTX if cq else abi.EQ_CTX).size // 4):  # counters
            b.store(table, word)
        b.ring(_word(struct, "ring"), ring)
        b.op(Op.CTX, table=table, place=0, bytes=7 if cq else 3, source=Source.MAILBOX, word=_word(struct, "valid"))
        b.op(Op.DONE)

        b.label(f"DESTROY_{kind.name}")
        b.index(kind, abi.CMD_OBJECT, "id", count)
        b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
        b.fail_if(Test.USED, CmdStatus.IN_USE)  # R-CQ-8
        b.store(table, 0)
        b.op(Op.FENCE)
        b.store(CtxTable.TPT, 0, select=ring)
        if cq:
            b.op(Op.OBJECT, select=Kind.EQ, place=Action.UNUSE, **link)
        b.op(Op.OBJECT, select=kind, place=Action.DESTROY, **_field(abi.CMD_OBJECT, "id"))
        b.op(Op.DONE)


def _queue_pairs(b: _Program) -> None:
    p = b.p
    struct = abi.CMD_CREATE_QP
    b.label("CREATE_QP")
    b.find(Kind.QP, struct, "qpn", p.num_qps)
    b.fail_if(Test.PRESENT, CmdStatus.IN_USE)
    b.fail_if(Test.BAD_TYPE, CmdStatus.BAD_PARAM, **_field(struct, "type"))
    b.op(Op.LOAD, select=Register.TYPE, **_field(struct, "type"))
    b.limit(struct, "qpn", 2, p.num_qps - 1, CmdStatus.BAD_INDEX, guard=Guard.NOT_UD)  # 0 and 1 are management QPs
    b.limit(struct, "log_sq", 0, 15)  # R-WQ-3
    b.limit(struct, "log_rq", 0, 15)
    b.limit(struct, "log_stride", abi.MIN_LOG_STRIDE, abi.MAX_LOG_STRIDE)
    b.limit(struct, "sig_all", 0, 1)
    b.limit(struct, "has_srq", 0, 0)  # there are no SRQs
    for name in ("send_cqn", "recv_cqn"):
        b.find(Kind.CQ, struct, name, p.num_cqs)
        b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
        b.fail_if(Test.BROKEN, CmdStatus.BAD_STATE)  # R-CQ-6
    b.ring_checks(_word(struct, "sq_ring"), ring=True)
    b.ring_checks(_word(struct, "rq_ring"), ring=True)
    b.op(Op.LOAD, select=Register.INDEX, **_field(struct, "qpn"))
    b.op(Op.LOAD, select=Register.LINK)
    b.op(Op.OBJECT, select=Kind.QP, place=Action.CREATE, **_field(struct, "qpn"))
    for name, word in (("send_cqn", IMAGE_SEND_CQ), ("recv_cqn", IMAGE_RECV_CQ)):
        b.op(Op.OBJECT, select=Kind.CQ, place=Action.USE, **_field(struct, name))
        b.op(Op.IMAGE, place=word, source=Source.MAILBOX, word=_word(struct, name))
    for word in range(abi.CMD_MODIFY_QP.size // 4):
        b.op(Op.IMAGE, place=word)
    b.copies(struct, abi.CMD_MODIFY_QP, {"type": "type"}, {"op": Op.IMAGE})
    b.clear(_CFG | _HOT)  # R-QP-8
    for table, dest in _CFG.items():
        names = {name: name for name in dest.fields if name in struct.fields}
        cqs = {CtxTable.COMPLETER_CFG: {"send_cqn": "cqn"}, CtxTable.RESPONDER_CFG: {"recv_cqn": "cqn"}}
        b.copies(struct, dest, names | cqs.get(table, {}), {"op": Op.CTX, "table": table})
    b.ring(_word(struct, "sq_ring"), Kind.SQ_RING)
    b.ring(_word(struct, "rq_ring"), Kind.RQ_RING)
    b.op(Op.DONE)

    b.label("DESTROY_QP")  # legal in any state (R-QP-7)
    b.index(Kind.QP, abi.CMD_OBJECT, "id", p.num_qps)
    b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
    _reset(b)
    for ring in (Kind.SQ_RING, Kind.RQ_RING):
        b.store(CtxTable.TPT, 0, select=ring)
    for word in (IMAGE_SEND_CQ, IMAGE_RECV_CQ):
        b.op(Op.OBJECT, select=Kind.CQ, place=Action.UNUSE, source=Source.IMAGE, word=word, width=24)
    b.op(Op.OBJECT, select=Kind.QP, place=Action.DESTROY, **_field(abi.CMD_OBJECT, "id"))
    b.op(Op.DONE)

    b.label("QUERY_QP")  # R-QP-6
    b.index(Kind.QP, abi.CMD_OBJECT, "id", p.num_qps)
    b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
    for word in range(1, abi.CMD_MODIFY_QP.size // 4):
        b.op(Op.MAIL, place=word, source=Source.IMAGE, word=word)
    b.op(Op.DONE)


def _reset(b: _Program) -> None:
    """R-QP-4, R-QP-7: the engines see the state first; when nothing of the QP is left in them, what they wrote is cleared."""
    b.states(high=int(QpState.RESET))
    b.op(Op.FENCE, select=Kind.QP)  # R-QP-7
    b.clear(_HOT)  # R-QP-4


def _error(b: _Program) -> None:
    """R-QP-5: stop, then flush both sides."""
    b.states(high=int(QpState.ERR))
    b.op(Op.EVENT, select=Event.SQ_KICK)  # R-QP-5
    b.op(Op.EVENT, select=Event.RQ_FLUSH)  # R-QP-5


def _modify(b: _Program) -> None:
    p = b.p
    struct = abi.CMD_MODIFY_QP
    new_state = _field(struct, "new_state")
    b.label("MODIFY_QP")
    b.index(Kind.QP, struct, "qpn", p.num_qps)
    b.fail_if(Test.ABSENT, CmdStatus.NOT_FOUND)
    b.op(Op.LOAD, select=Register.STATE, source=Source.IMAGE, word=STATE_WORD)
    b.op(Op.LOAD, select=Register.ATTRS, **_field(struct, "attr_mask"))
    b.limit(struct, "new_state", 0, max(QpState), CmdStatus.BAD_STATE)
    b.op(Op.LOAD, select=Register.NEW_STATE, **new_state)
    b.fail_if(Test.NO_TRANSITION, CmdStatus.BAD_STATE)  # R-QP-1
    b.fail_if(Test.EXTRA, CmdStatus.EXTRA_ATTR)  # R-QP-1
    b.fail_if(Test.MISSING, CmdStatus.MISSING_ATTR)  # R-QP-1
    b.fail_if(Test.STATE_DIFFERS, CmdStatus.BAD_STATE, guard=attr_guard(Attr.CUR_STATE), **_field(struct, "cur_state"))
    for attr, name, low, high in (
        (Attr.PKEY_INDEX, "pkey_index", 0, p.num_pkeys - 1),
        (Attr.AV, "sgid_index", 0, p.num_gids - 1),
        (Attr.AV, "hop_limit", 1, 255),  # R-ADR-3
        (Attr.ACCESS, "access", 0, int(Access.MW_BIND) * 2 - 1),
        (Attr.MIN_RNR_TIMER, "min_rnr_timer", 0, 31),
        (Attr.PATH_MTU, "path_mtu", 1, 5),
        (Attr.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", 0, p.max_rd_atomic),
        (Attr.MAX_RD_ATOMIC, "max_rd_atomic", 0, p.max_rd_atomic),
        (Attr.TIMEOUT, "timeout", 0, 31),
        (Attr.RETRY_CNT, "retry_cnt", 0, 7),
        (Attr.RNR_RETRY, "rnr_retry", 0, 7),
    ):
        b.limit(struct, name, low, high, guard=attr_guard(attr))
    # R-MTU-1
    b.fail_if(Test.OVER_MTU, CmdStatus.BAD_PARAM, guard=attr_guard(Attr.PATH_MTU), **_field(struct, "path_mtu"))
    b.op(Op.JUMP, guard=Guard.TO_RESET, high="modify_reset")
    b.op(Op.JUMP, guard=Guard.TO_ERR, high="modify_error")
    for attr, names in _ATTR_FIELDS.items():
        guard = attr_guard(attr)
        b.copies(struct, struct, {n: n for n in names}, {"op": Op.IMAGE}, guard=guard)
        for table, dest in _CFG.items():
            both = {n: n for n in names if n in dest.fields}
            b.copies(struct, dest, both, {"op": Op.CTX, "table": table}, guard=guard)
    # A UD packet may be as long as the port allows (R-UD-1); path_mtu is no attribute of UD.
    for table, dest in _CFG.items():
        byte = dest.fields["path_mtu"].offset // 8
        b.op(Op.CTX, guard=Guard.UD, table=table, place=byte // 4, bytes=1 << byte % 4, source=Source.MTU,
             rotate=-8 * (byte % 4) % 32)  # fmt: skip
    # The PSNs start the hot tables: RTR the responder's, RTS the requester's and the completer's.
    psn = {"bytes": 7, "rotate": 0}
    rq, sq = _word(struct, "rq_psn"), _word(struct, "sq_psn")  # R-PSN-5
    guard = attr_guard(Attr.RQ_PSN)
    hot = CtxTable.RESPONDER_HOT
    b.op(Op.CTX, guard=guard, table=hot, place=_word(abi.RESPONDER_HOT, "epsn"), source=Source.MAILBOX, word=rq, **psn)
    b.op(Op.CTX, guard=guard, table=hot, place=_word(abi.RESPONDER_HOT, "msn"), **psn)  # R-MSN-1
    b.op(Op.CTX, guard=guard, table=hot, place=_word(abi.RESPONDER_HOT, "ack_psn"), source=Source.MINUS_ONE, word=rq, **psn)
    guard = attr_guard(Attr.SQ_PSN)
    for table, name in ((CtxTable.REQUESTER_HOT, "psn"), (CtxTable.COMPLETER_HOT, "una")):  # R-PSN-5
        b.op(Op.CTX, guard=guard, table=table, place=_word(_HOT[table], name), source=Source.MAILBOX, word=sq, **psn)
    b.states(source=Source.MAILBOX, word=STATE_WORD)
    b.op(Op.EVENT, guard=Guard.TO_RTS, select=Event.SQ_KICK)
    b.op(Op.DONE)

    b.label("modify_reset")
    _reset(b)
    b.op(Op.DONE)

    b.label("modify_error")
    _error(b)
    b.op(Op.DONE)

    # An engine's error: only a QP that runs goes to ERR, so a second report changes nothing.
    b.label("qp_error")
    b.op(Op.LOAD, select=Register.INDEX, source=Source.ERROR)
    b.op(Op.LOAD, select=Register.STATE, source=Source.IMAGE, word=STATE_WORD)
    b.op(Op.JUMP, guard=Guard.NOT_RUNNING, high="error_report")  # R-EVT-1
    _error(b)
    b.label("error_report")
    b.op(Op.JUMP, guard=Guard.IN_RESET, high="error_done")
    b.op(Op.EVENT, guard=Guard.HAS_EVENT, select=Event.ASYNC)  # R-EVT-1
    b.label("error_done")
    b.op(Op.DONE)


def _broken_cq(b: _Program) -> None:
    """R-CQ-6: mark the CQ, then look at every QP in steps between which commands may come."""
    b.label("broken_cq")
    b.op(Op.LOOK, select=Kind.CQ, source=Source.ERROR)
    b.op(Op.JUMP, guard=Guard.GONE, high="broken_done")
    b.op(Op.OBJECT, select=Kind.CQ, place=Action.BREAK, source=Source.ERROR)
    b.op(Op.EVENT, select=Event.ASYNC)
    b.op(Op.LOAD, select=Register.SEARCH)
    b.label("broken_done")
    b.op(Op.DONE)

    b.label("search")
    b.op(Op.LOAD, select=Register.INDEX, source=Source.ERROR)
    b.op(Op.LOOK, select=Kind.QP, source=Source.ERROR)
    b.op(Op.JUMP, guard=Guard.GONE, high="search_done")
    b.op(Op.LOAD, select=Register.STATE, source=Source.IMAGE, word=STATE_WORD)
    b.op(Op.JUMP, guard=Guard.NOT_RUNNING, high="search_done")
    for word in (IMAGE_SEND_CQ, IMAGE_RECV_CQ):
        b.op(Op.LOOK, select=Kind.CQ, source=Source.IMAGE, word=word, width=24)
        b.op(Op.JUMP, guard=Guard.BROKEN, high="search_found")
    b.label("search_done")
    b.op(Op.DONE)
    b.label("search_found")
    _error(b)
    b.op(Op.DONE)


def programs(p: Params) -> list[MicroOp]:
    """The ROM: an entry for each command code below ERROR_ENTRY, then the programs."""
    b = _Program(p)
    for code in range(ERROR_ENTRY):
        names = [c.name for c in Command if c == code]
        if names:
            b.op(Op.JUMP, high=names[0])
        else:
            b.fail_if(Test.ALWAYS, CmdStatus.BAD_COMMAND)
    b.op(Op.JUMP, high="qp_error")
    b.fail_if(Test.ALWAYS, CmdStatus.BAD_COMMAND)
    b.op(Op.JUMP, high="broken_cq")
    b.op(Op.JUMP, high="search")
    b.label("NOP")
    b.op(Op.DONE)
    for part in (_port, _regions, _completion, _queue_pairs, _modify, _broken_cq):
        part(b)
    for op in b.ops:
        if isinstance(op.high, str):
            op.high = b.labels[op.high]
    return b.ops


def transition_rom() -> list[int]:
    """Index: type << 6 | state << 3 | new state. Word: allowed << 18 | required << 1 | transition exists."""
    rom = [0] * 256
    for (typ, old, new), rule in abi.QP_TRANSITIONS.items():
        allowed = int(rule.required | rule.optional)
        rom[int(typ) << 6 | int(old) << 3 | int(new)] = allowed << ATTR_BITS + 1 | int(rule.required) << 1 | 1
    return rom


assert max(Command) < ERROR_ENTRY and max(QpType) < 4 and max(Attr).bit_length() == ATTR_BITS
