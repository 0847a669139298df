"""The receive filter: is the packet for one of our QPs, from its peer, in a state that takes it? (rules.md section 5)"""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import ADDRESS_CTX, GID_ENTRY, QpState, QpType
from ..config import Params
from ..records import Probe, ProbeEvent, RequestDesc, ResponseDesc, RxDrop
from ..stream.buffer import HalfRegister, SkidBuffer
from ..stream.fifo import StreamFifo
from ..stream.packet_store import PacketHandle
from ..wire.layout import swap_bytes
from .header import RxHeader

__all__ = ["Filter"]

_DEPTH = 8  # headers between the check pipeline's ends (5 stages)

Verdict = data.StructLayout({"ok": 1, "ignore": 1, "response": 1, "cause": RxDrop})


class Filter(wiring.Component):
    """Turns accepted frames into request and response descriptors, or drops them, counted by cause.

    Order of checks (rules.md section 5): QPN in range and QP in a receiving state, own address (MAC, IP and VLAN of the QP's
    GID entry), transport of the opcode (R-OPC-1), P_Key (R-PKEY-1), Q_Key (UD, R-QKEY-1), peer's address (RC, UC). A CNP is
    neither request nor response and ends here (R-CC-3). All failures are silent.

    Ports: ``hdr`` headers of frames whose ICRC is right; ``handle`` one item for each of them that has payload, in the same
    order. The address context is read through ``addr_index``/``addr`` (``p.address_cycles``); ``gid_index``/``gid`` and
    ``pkey_index``/``pkey`` are answered in the same cycle. ``free`` frees the cells of dropped payload. ``drop`` pulses with
    ``cause`` (one cycle a frame).

    Timing: one header every 2 cycles; 5 cycles and ``p.address_cycles`` from ``hdr`` to the descriptor. A consumer that is not
    ready stalls ``hdr``.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "hdr": In(stream.Signature(RxHeader)),
            "handle": In(stream.Signature(PacketHandle(p.rx_cells))),
            "addr_index": Out(p.qpn_bits),
            "addr": In(ADDRESS_CTX.layout),
            "gid_index": Out(p.gid_bits),
            "gid": In(GID_ENTRY.layout),
            "pkey_index": Out(p.pkey_bits),
            "pkey": In(16),
            "request": Out(stream.Signature(RequestDesc(p))),
            "response": Out(stream.Signature(ResponseDesc(p))),
            "free": Out(stream.Signature(range(p.rx_cells))),
            "drop": Out(1),
            "cause": Out(RxDrop),
            "probe": Out(Probe()),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.waiting = waiting = StreamFifo(Waiting(self.p), _DEPTH, direct=True)
        m.submodules.verdicts = verdicts = StreamFifo(Verdict, _DEPTH)
        take = Signal()
        read = Signal()  # the address context of the header on `hdr` is being read: it stays one more cycle
        m.d.comb += [
            waiting.i.valid.eq(self.hdr.valid & ~read),
            take.eq(waiting.i.valid & waiting.i.ready),
            self.hdr.ready.eq(read),
        ]
        m.d.sync += read.eq(take)
        self._keep(m, waiting.i.payload)
        self._check(m, take, verdicts.i)
        self._route(m, waiting.o, verdicts.o)
        # every verdict has its header still in `waiting`, which is as deep
        with m.If(verdicts.i.valid):
            m.d.sync += Assert(verdicts.i.ready, Format("filter: no room for a verdict"))
        return m

    def _keep(self, m, item):
        """What later stages need of the header: an extended header's word once, whatever it means for the opcode."""
        hdr, flags = self.hdr.payload, self.hdr.payload.flags
        m.d.comb += [
            *(item[name].eq(hdr[name]) for name in ("opcode", "psn", "pad", "se", "ackreq", "src_qp")),
            item.qpn.eq(hdr.dest_qpn),
            item.length.eq(hdr.payload_len),  # R-PAD-3
            item.has_payload.eq(hdr.payload_len != 0),
            item.ce.eq(hdr.ecn == 3),  # R-CC-1
            item.ext[0].eq(Mux(flags.has_aeth, Cat(hdr.aeth_msn, hdr.aeth_syndrome), hdr.va[32:])),
            item.ext[1].eq(Mux(flags.has_atomicack, hdr.original[32:], hdr.va[:32])),
            item.ext[2].eq(Mux(flags.has_atomicack, hdr.original[:32], hdr.rkey)),
            item.ext[3].eq(Mux(flags.has_atomiceth, hdr.swap[32:], hdr.dma_len)),
            item.ext[4].eq(hdr.swap[:32]),
            item.ext[5].eq(hdr.compare[32:]),
            item.ext[6].eq(Mux(flags.has_atomiceth, hdr.compare[:32], hdr.imm)),
        ]

    @staticmethod
    def _split(m, item, request, response):
        """Descriptors of a kept header; a field of an extended header the opcode does not have is garbage."""
        for desc in (request, response):
            m.d.comb += [desc[name].eq(item[name]) for name in ("qpn", "opcode", "psn", "pad", "length")]
        words = item.ext
        m.d.comb += [
            request.solicited.eq(item.se),
            request.ackreq.eq(item.ackreq),
            request.va.eq(Cat(words[1], words[0])),
            request.rkey.eq(words[2]),
            request.dma_length.eq(words[3]),
            request.swap.eq(Cat(words[4], words[3])),
            request.compare.eq(Cat(words[6], words[5])),
            request.imm.eq(words[6]),
            request.src_qp.eq(item.src_qp),
            request.ce.eq(item.ce),
            response.syndrome.eq(words[0][24:]),
            response.msn.eq(words[0][:24]),
            response.original.eq(Cat(words[2], words[1])),
        ]

    def _check(self, m, take, out):
        """Five stages: index, memory (2 or 3 cycles), compare, decide."""
        p, hdr = self.p, self.hdr.payload
        slim = data.StructLayout({
            "in_range": 1, "request": 1, "response": 1, "transport": 2, "management": 1, "pkey": 16, "qkey": 32, "src_ip": 128,
            "dst_ip": 128, "dst_mac": 48, "vlan_valid": 1, "vlan_vid": 12,
        })  # fmt: skip
        now, seen = Signal(slim), Signal(slim)
        valid = Signal(5)
        m.d.sync += valid.eq(Cat(take, valid))
        m.d.comb += [
            self.addr_index.eq(hdr.dest_qpn),
            now.in_range.eq(hdr.dest_qpn[p.qpn_bits :] == 0),  # an id from the wire, checked before it means anything
            now.request.eq(hdr.flags.is_request),
            now.response.eq(hdr.flags.is_response),
            now.transport.eq(hdr.opcode[5:7]),
            now.management.eq(hdr.opcode[7]),
            now.pkey.eq(hdr.pkey),
            now.qkey.eq(hdr.qkey),
            now.src_ip.eq(swap_bytes(hdr.src_ip)),
            now.dst_ip.eq(swap_bytes(hdr.dst_ip)),
            now.dst_mac.eq(swap_bytes(hdr.dst_mac)),
            now.vlan_valid.eq(hdr.vlan_valid & (hdr.vlan_vid != 0)),  # VID 0 is a priority tag: no VLAN
            now.vlan_vid.eq(hdr.vlan_vid),
        ]
        with m.If(valid[0]):  # the header's second cycle
            m.d.sync += seen.eq(now)
        ctx, gid = self.addr, self.gid
        m.d.comb += [self.gid_index.eq(ctx.sgid_index), self.pkey_index.eq(ctx.pkey_index)]

        # stage 3: compares, 32 bits at a time
        src_diff, dst_diff = Signal(4), Signal(6)
        qkey_ok, pkey_ok, type_ok, state_ok, vlan_ok, reliable = (
            Signal(name=n) for n in ("qkey_ok", "pkey_ok", "type_ok", "state_ok", "vlan_ok", "reliable")
        )
        gid_valid, response, ignore, is_ud = Signal(), Signal(), Signal(), Signal()
        runs = Signal()
        with m.Switch(ctx.state):
            with m.Case(QpState.RTS, QpState.SQD):  # R-QP-2, R-QP-5
                m.d.comb += runs.eq(1)
            with m.Case(QpState.RTR, QpState.SQE):  # R-QP-2: answers, but has no requests out
                m.d.comb += runs.eq(seen.request)
        m.d.sync += [
            [src_diff[i].eq(seen.src_ip.word_select(i, 32) != ctx.dip.word_select(i, 32)) for i in range(4)],
            [dst_diff[i].eq(seen.dst_ip.word_select(i, 32) != gid.ip.word_select(i, 32)) for i in range(4)],
            dst_diff[4].eq(seen.dst_mac[:24] != gid.mac[:24]),
            dst_diff[5].eq(seen.dst_mac[24:] != gid.mac[24:]),
            gid_valid.eq(gid.valid),
            vlan_ok.eq(Mux(gid.vlan, seen.vlan_valid & (seen.vlan_vid == gid.vlan_vid), ~seen.vlan_valid)),
            qkey_ok.eq(seen.qkey == ctx.qkey),  # R-QKEY-1
            pkey_ok.eq((seen.pkey[:15] == self.pkey[:15]) & (seen.pkey[15] | self.pkey[15])),  # R-PKEY-1
            type_ok.eq((seen.transport == ctx.type) & ~seen.management),  # R-OPC-1
            state_ok.eq(runs & seen.in_range),
            response.eq(seen.response),
            ignore.eq(~seen.request & ~seen.response),  # CNP (R-CC-3)
            is_ud.eq(ctx.type == QpType.UD),
            reliable.eq(ctx.type != QpType.UD),
        ]

        # stage 4: decide
        verdict = Signal(Verdict)
        m.d.comb += [verdict.ok.eq(0), verdict.response.eq(response), verdict.ignore.eq(ignore)]
        with m.If(~state_ok & ~ignore):
            m.d.comb += verdict.cause.eq(RxDrop.NO_QP)
        with m.Elif(~gid_valid | dst_diff.any() | ~vlan_ok):  # R-ADR-1
            m.d.comb += verdict.cause.eq(RxDrop.NOT_FOR_US)
        with m.Elif(~type_ok):
            m.d.comb += verdict.cause.eq(RxDrop.BAD_TYPE)
        with m.Elif(~pkey_ok):
            m.d.comb += verdict.cause.eq(RxDrop.BAD_PKEY)
        with m.Elif(is_ud & ~qkey_ok):  # R-QKEY-1
            m.d.comb += verdict.cause.eq(RxDrop.BAD_QKEY)
        with m.Elif(reliable & src_diff.any()):
            m.d.comb += verdict.cause.eq(RxDrop.BAD_ADDRESS)
        with m.Else():
            m.d.comb += verdict.ok.eq(~ignore)  # R-CC-3
        m.d.sync += [out.payload.eq(verdict), out.valid.eq(valid[p.address_cycles])]

    def _route(self, m, waiting, verdict):
        """Join header, verdict and, where there is payload, the store's handle; send it where it belongs."""
        item, handle = waiting.payload, self.handle.payload
        # The choice below ends here: the takers' ready is not in it.
        m.submodules.request_out = request = HalfRegister(RequestDesc(self.p))
        m.submodules.response_out = response = SkidBuffer(ResponseDesc(self.p))  # the next ACK shows at once: it is absorbed
        m.submodules.free_out = free = HalfRegister(range(self.p.rx_cells))
        wiring.connect(m, request.o, wiring.flipped(self.request))
        wiring.connect(m, response.o, wiring.flipped(self.response))
        wiring.connect(m, free.o, wiring.flipped(self.free))
        both, ready, lost, good, done = Signal(), Signal(), Signal(), Signal(), Signal()
        self._split(m, item, request.i.payload, response.i.payload)
        m.d.comb += [
            both.eq(waiting.valid & verdict.valid & (self.handle.valid | ~item.has_payload)),
            lost.eq(item.has_payload & handle.dropped),
            good.eq(verdict.payload.ok & ~lost),
            request.i.payload.head.eq(handle.head),
            response.i.payload.head.eq(handle.head),
            free.i.payload.eq(handle.head),
            request.i.valid.eq(done & good & ~verdict.payload.response),
            response.i.valid.eq(done & good & verdict.payload.response),
            free.i.valid.eq(done & ~good & item.has_payload & ~handle.dropped),
            # One that has no room stops all: the order of requests and responses is not lost, and the path is short.
            ready.eq(request.i.ready & response.i.ready & free.i.ready),
        ]
        m.d.comb += [
            done.eq(both & ready),
            waiting.ready.eq(done),
            verdict.ready.eq(done),
            self.handle.ready.eq(done & item.has_payload),
            self.drop.eq(done & ~good & ~(verdict.payload.ignore & ~lost)),
            self.cause.eq(Mux(lost, RxDrop.NO_SPACE, verdict.payload.cause)),
            self.probe.valid.eq(done),
            self.probe.event.eq(Mux(good, ProbeEvent.FRAME_IN, ProbeEvent.FRAME_DROPPED)),
            self.probe.qpn.eq(item.qpn),
            self.probe.psn.eq(item.psn),
            self.probe.opcode.eq(Mux(good, item.opcode, self.cause)),
            self.probe.length.eq(item.length),
        ]
        with m.If(done & item.has_payload & ~handle.dropped):
            m.d.sync += Assert(handle.length == item.length, Format("store has {} bytes, header says {}",
                                                                            handle.length, item.length))  # fmt: skip


def Waiting(p: Params):  # noqa: N802 (a layout)
    """What both descriptors need of a header; ``ext``: the words of its extended headers as numbers, the immediate data of
    anything but an ATOMIC in the last one."""
    return data.StructLayout({
        "qpn": p.qpn_bits, "opcode": 8, "psn": 24, "pad": 2, "length": 13, "se": 1, "ackreq": 1, "ce": 1, "src_qp": 24,
        "has_payload": 1, "ext": data.ArrayLayout(32, 7),
    })  # fmt: skip
