"""The top: connects the layers, no logic of its own (counters' pulse wiring apart)."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from .abi import COUNTERS, CSR_ADDR_BITS, WATCHED
from .completion.cqe import CqeWriter
from .completion.eq import EqWriter
from .config import Params
from .debug.counters import Counters
from .debug.watchdog import Watchdog
from .host.csr import Csr
from .host.reset import DeviceReset, FrameDrop, FrameGate, HostGate
from .memory.axi import AxiChecker, AxiLiteSignature, AxiSignature, connect_host
from .memory.dma_read import DmaRead, ReadClient
from .memory.dma_write import DmaWrite
from .memory.translate import Translate
from .nic_watch import NicWatch
from .qp.address import AddressTable
from .qp.broadcast import CtxBroadcast
from .qp.command import CommandEngine
from .qp.port import PortTable
from .records import CqeRequest, EventRequest, Probe, QpError, QpEvent, SendFailure
from .requester.complete import Completer
from .requester.schedule import Scheduler
from .requester.segment import Segmenter
from .requester.wqe_fetch import WqeFetch
from .responder.responder import Responder
from .rx.eth_fifo import EthFifo
from .rx.filter import Filter
from .rx.intake import Intake
from .rx.parse import Parser
from .stream.arbiter import StreamArbiter
from .stream.packet_store import PacketStore
from .tx.ack import AckSender
from .tx.arbiter import TxArbiter
from .tx.build import Builder
from .tx.eth_merge import EthMerge
from .tx.gather import Gather
from .tx.turn import FrameTurn

__all__ = ["AxiStreamSignature", "Nic"]


class AxiStreamSignature(wiring.Signature):
    """AXI4-Stream of Ethernet frames without FCS: tdata, tkeep, tlast, tuser (error, with tlast), tvalid, tready."""

    def __init__(self, data_width: int):
        super().__init__({
            "tdata": Out(data_width), "tkeep": Out(data_width // 8), "tlast": Out(1), "tuser": Out(1), "tvalid": Out(1),
            "tready": In(1),
        })  # fmt: skip


class Nic(NicWatch):
    """The RNIC.

    Ports (Verilog names join with one underscore): ``m_axi`` AXI4 manager for all DMA; ``s_axil`` AXI4-Lite subordinate;
    ``net_tx``, ``net_rx`` Ethernet frames without FCS; ``eth_tx``, ``eth_rx`` frames that are not RoCEv2, from and to the host
    side; ``irq`` one level per event queue; ``probe`` one `records.Probe` per block of ``probe_names`` (first lowest), absent
    when the configuration leaves it out.
    """

    def __init__(self, p: Params):
        self.p = p
        width = p.data_width
        self._read_clients = [
            ReadClient(name="sq", buffer_beats=p.wqe_buffer_beats),
            ReadClient(name="rq", buffer_beats=max(4, 64 // p.lanes * 2 * p.desc_depth)),
            ReadClient(name="gather", buffer_beats=p.read_buffer_beats),
            ReadClient(name="response", buffer_beats=p.read_buffer_beats),
            ReadClient(name="atomic", buffer_beats=2),
            ReadClient(name="walk", buffer_beats=max(2, p.walks)),
        ]
        self._write_clients = ["place", "atomic", "cqe", "eqe"]
        self.id_width = max(1, (max(len(self._read_clients), len(self._write_clients)) - 1).bit_length())
        self._blocks = self._make_blocks()
        self.probe_names = sorted(
            f"{name}_{member}".removesuffix("_probe").replace("_probe_", "_")
            for name, block in self._blocks.items() for member in block.signature.members if member.startswith("probe")
        ) if p.probe else []  # fmt: skip
        ports = {
            "m_axi": Out(AxiSignature(width, self.id_width)),
            "s_axil": In(AxiLiteSignature(CSR_ADDR_BITS)),
            "net_tx": Out(AxiStreamSignature(width)),
            "net_rx": In(AxiStreamSignature(width)),
            "eth_tx": In(AxiStreamSignature(width)),
            "eth_rx": Out(AxiStreamSignature(width)),
            "irq": Out(p.num_eqs),
        }
        if self.probe_names:
            ports["probe"] = Out(Probe().size * len(self.probe_names))
        super().__init__(ports)

    def _make_blocks(self) -> dict[str, wiring.Component]:
        """One instance of each block, by its name in the design and in the waves."""
        p = self.p
        wqe_fetch, gather, responder = WqeFetch(p), Gather(p), Responder(p)
        return {
            # software's side
            "csr": Csr(p),
            "command": CommandEngine(p),
            "port_table": PortTable(p),
            "address_table": AddressTable(p),
            "counters": Counters(len(COUNTERS)),
            "watchdog": Watchdog([name for name, _doc in WATCHED]),
            # transmit street
            "scheduler": Scheduler(p),
            "wqe_fetch": wqe_fetch,
            "segmenter": Segmenter(p),
            "gather": gather,
            "ack_sender": AckSender(p),
            "tx_arbiter": TxArbiter(p, 3),
            "builder": Builder(p),
            "eth_merge": EthMerge(p),
            # receive street
            "parser": Parser(p.data_width),
            "packet_store": PacketStore(p.data_width, p.rx_cells, stall=not p.rx_drop),
            "filter": Filter(p),
            "responder": responder,
            "completer": Completer(p),
            # memory and completion
            "cqe_writer": CqeWriter(p),
            "eq_writer": EqWriter(p),
            "translate": Translate(p, [
                ("sq", wqe_fetch.tag_bits), ("rq", responder.ring_tag_bits), ("gather", gather.tag_bits, gather.window.entries),
                ("place", responder.place_tag_bits), ("response", responder.response_tag_bits, gather.window.entries),
                ("cqe", CqeWriter.tag_bits), ("eqe", EqWriter.tag_bits),
            ]),
            "dma_read": DmaRead(p.data_width, self._read_clients),
            "dma_write": DmaWrite(p.data_width, self._write_clients),
        }

    def elaborate(self, platform):
        m = Module()  # the core: all that a device reset resets
        for name, block in self._blocks.items():
            if name != "csr":
                m.submodules[name] = block
        self._core = {name: AxiStreamSignature(self.p.data_width).create(path=("core", name))
                      for name in ("net_tx", "net_rx", "eth_tx", "eth_rx")}  # fmt: skip
        self._core_host = AxiSignature(self.p.data_width, self.id_width).create(path=("core", "host"))
        self._software_side(m)
        self._transmit(m)
        self._receive(m)
        self._memory(m)
        self._count(m)
        self._watch(m)
        self._fence(m)
        if self.probe_names:
            probes = {
                f"{name}_{member}".removesuffix("_probe").replace("_probe_", "_"): getattr(block, member)
                for name, block in self._blocks.items() for member in block.signature.members if member.startswith("probe")
            }  # fmt: skip
            m.d.comb += self.probe.eq(Cat(probes[name].as_value() for name in self.probe_names))
        return self._resettable(m)

    def _resettable(self, core):
        """The core between its gates, beside the registers and the device reset, which go on during a reset."""
        m = Module()
        csr = m.submodules.csr = self._blocks["csr"]
        m.submodules.device_reset = reset = DeviceReset()
        m.submodules.core = ResetInserter(reset.reset)(core)
        m.submodules.host_gate = host = HostGate(self.p.data_width, self.id_width)
        wiring.connect(m, self._core_host, host.i)
        wiring.connect(m, host.o, wiring.flipped(self.m_axi))
        quiet = []
        for name in ("net_tx", "eth_rx"):
            port, inner = getattr(self, name), self._core[name]
            gate = m.submodules[f"{name}_gate"] = FrameGate()
            m.d.comb += [
                port.tdata.eq(inner.tdata), port.tkeep.eq(inner.tkeep), port.tlast.eq(inner.tlast), port.tuser.eq(inner.tuser),
                gate.i_valid.eq(inner.tvalid), gate.i_last.eq(inner.tlast), inner.tready.eq(gate.i_ready),
                port.tvalid.eq(gate.o_valid), gate.o_ready.eq(port.tready), gate.stop.eq(reset.stop_frames),
            ]  # fmt: skip
            quiet.append(gate.quiet)
        for name in ("net_rx", "eth_tx"):
            port, inner = getattr(self, name), self._core[name]
            drop = m.submodules[f"{name}_drop"] = FrameDrop()
            m.d.comb += [
                inner.tdata.eq(port.tdata), inner.tkeep.eq(port.tkeep), inner.tlast.eq(port.tlast), inner.tuser.eq(port.tuser),
                drop.i_valid.eq(port.tvalid), drop.i_last.eq(port.tlast), port.tready.eq(drop.i_ready),
                inner.tvalid.eq(drop.o_valid), drop.o_ready.eq(inner.tready), drop.reset.eq(reset.reset),
            ]  # fmt: skip
        m.d.comb += [
            reset.request.eq(csr.reset_request),
            reset.frames_quiet.eq(Cat(quiet).all()),
            host.stop.eq(reset.stop_host),
            reset.host_quiet.eq(host.quiet),
            reset.sweeping.eq(self._blocks["command"].sweeping),
            csr.reset_busy.eq(reset.busy),
        ]
        return m

    def _software_side(self, m):
        b, p = self._blocks, self.p
        csr, command, port, address = b["csr"], b["command"], b["port_table"], b["address_table"]
        wiring.connect(m, wiring.flipped(self.s_axil), csr.axil)
        tables = ["port_table", "address_table", "scheduler", "segmenter", "gather", "responder", "completer", "cqe_writer",
                  "eq_writer", "translate"]  # fmt: skip
        m.submodules.contexts = contexts = CtxBroadcast(p, len(tables))
        wiring.connect(m, command.ctx, contexts.i)
        for port_of, name in zip(contexts.o, tables, strict=True):
            wiring.connect(m, port_of, b[name].ctx)
        wiring.connect(m, csr.command, command.command)
        wiring.connect(m, command.result, csr.result)
        m.d.comb += [
            command.mailbox_value.eq(csr.mailbox_value),
            csr.mailbox_index.eq(command.mailbox_index),
            csr.mailbox_write.eq(command.mailbox_write),
            csr.mailbox_data.eq(command.mailbox_data),
            csr.counter_value.eq(b["counters"].value),
            b["counters"].index.eq(csr.counter_index),
            b["cqe_writer"].cycle.eq(csr.cycle),
            b["eq_writer"].cycle.eq(csr.cycle),
            csr.eq_event.eq(b["eq_writer"].eq_event),
            csr.fatal.eq(b["eq_writer"].fatal),
            self.irq.eq(csr.irq),
        ]
        wiring.connect(m, csr.doorbell_sq, b["scheduler"].doorbell)
        wiring.connect(m, csr.doorbell_rq, b["responder"].doorbell)
        wiring.connect(m, csr.doorbell_cq, b["cqe_writer"].doorbell)
        wiring.connect(m, csr.doorbell_eq, b["eq_writer"].doorbell)
        wiring.connect(m, b["cqe_writer"].cq_error, command.cq_error)
        m.submodules.events = events = StreamArbiter(EventRequest(p), 2)
        wiring.connect(m, command.event, events.i[0])
        wiring.connect(m, b["cqe_writer"].event, events.i[1])
        wiring.connect(m, events.o, b["eq_writer"].event)
        wiring.connect(m, command.sq_kick, b["scheduler"].kick)
        m.submodules.qp_errors = qp_errors = StreamArbiter(QpError(p), 2, skid=True)
        wiring.connect(m, b["completer"].qp_error, qp_errors.i[0])
        wiring.connect(m, b["responder"].qp_error, qp_errors.i[1])
        wiring.connect(m, qp_errors.o, command.qp_error)

        # the two readers of the address table: builder and filter
        for i, name in enumerate(("builder", "filter")):
            block = b[name]
            index, record = address.read(i)
            m.d.comb += [
                index.eq(block.addr_index),
                block.addr.eq(record),
                getattr(port, f"gid_index_{i}").eq(block.gid_index),
                block.gid.eq(getattr(port, f"gid_{i}")),
                block.pkey.eq(port.pkeys[block.pkey_index]),
            ]

    def _transmit(self, m):
        b, p = self._blocks, self.p
        scheduler, segmenter, gather, completer = b["scheduler"], b["segmenter"], b["gather"], b["completer"]
        arbiter, builder = b["tx_arbiter"], b["builder"]
        wiring.connect(m, b["wqe_fetch"].wqe, segmenter.wqe)
        wiring.connect(m, segmenter.rewind, scheduler.rewind)
        wiring.connect(m, segmenter.job, gather.job)
        wiring.connect(m, segmenter.segment, gather.segment)
        wiring.connect(m, segmenter.inline, gather.inline)
        m.d.comb += [
            completer.remember_en.eq(segmenter.remember_en),
            completer.remember_index.eq(segmenter.remember_index),
            completer.remember_data.eq(segmenter.remember_data),
            completer.done_index_addr.eq(scheduler.done_index_addr),
            scheduler.done_index.eq(completer.done_index),
            completer.read_en.eq(segmenter.read_en),
            completer.read_index.eq(segmenter.read_index),
            completer.read_data.eq(segmenter.read_data),
            completer.una_addr.eq(segmenter.una_addr),
            segmenter.una.eq(completer.una),
            segmenter.landed.eq(completer.landed_count),
            segmenter.hot_addr.eq(completer.hot_addr),
            completer.hot_psn.eq(segmenter.hot_psn),
            completer.hot_send_index.eq(segmenter.hot_send_index),
            completer.hot_reads.eq(segmenter.hot_reads),
        ]
        m.submodules.failures = failures = StreamArbiter(SendFailure(p), 2, skid=True)
        wiring.connect(m, segmenter.failure, failures.i[0])
        wiring.connect(m, gather.failure, failures.i[1])
        wiring.connect(m, failures.o, completer.failure)
        wiring.connect(m, scheduler.flush, completer.flush)
        m.submodules.wakes = wakes = StreamArbiter(QpEvent(p), 2)
        wiring.connect(m, completer.wake, wakes.i[0])
        wiring.connect(m, gather.wake, wakes.i[1])
        wiring.connect(m, wakes.o, scheduler.wake)
        m.d.comb += [
            segmenter.alone.eq(b["wqe_fetch"].alone),
            segmenter.alone_qpn.eq(b["wqe_fetch"].alone_qpn),
            gather.share_qpn.eq(segmenter.share_qpn),
            segmenter.share_none.eq(gather.share_none),
            segmenter.share_one.eq(gather.share_one),
            segmenter.slow.eq(gather.slow),
            gather.note.eq(segmenter.note),
            segmenter.noted.eq(gather.noted),
        ]

        wiring.connect(m, b["responder"].ack, b["ack_sender"].job)
        wiring.connect(m, b["ack_sender"].header, arbiter.header_i[0])
        wiring.connect(m, gather.header, arbiter.header_i[1])
        wiring.connect(m, gather.payload, arbiter.payload_i[1])
        wiring.connect(m, b["responder"].response_header, arbiter.header_i[2])
        wiring.connect(m, b["responder"].response_payload, arbiter.payload_i[2])
        wiring.connect(m, arbiter.header, builder.header)
        wiring.connect(m, arbiter.payload, builder.payload)
        # frames to the own address come back to the receive street
        m.submodules.turn = turn = self._turn = FrameTurn(p.data_width, b["parser"].eth_depth)
        wiring.connect(m, builder.frame, turn.frame)
        m.d.comb += turn.own.eq(builder.own)
        wiring.connect(m, turn.wire, b["eth_merge"].roce)
        _from_axis(m, self._core["eth_tx"], b["eth_merge"].eth)
        _to_axis(m, b["eth_merge"].o, self._core["net_tx"])

    def _receive(self, m):
        b, p = self._blocks, self.p
        parser, store, filt, responder = b["parser"], b["packet_store"], b["filter"], b["responder"]
        m.submodules.intake = intake = Intake(p.data_width)
        wiring.connect(m, self._turn.loop, intake.loop)
        wiring.connect(m, intake.o, parser.i)
        if p.rx_drop:
            # two largest frames ahead of the parser, which stalls only for as long as the street behind it is full
            m.submodules.rx_fifo = fifo = EthFifo(p.data_width, parser.eth_depth)
            axis, beat = self._core["net_rx"], fifo.beat
            m.d.comb += [
                axis.tready.eq(1), fifo.valid.eq(axis.tvalid), beat.data.eq(axis.tdata), beat.keep.eq(axis.tkeep),
                beat.last.eq(axis.tlast), beat.err.eq(axis.tlast & axis.tuser), fifo.commit.eq(1),
            ]  # fmt: skip
            self._intake_overflow = fifo.overflow & axis.tvalid & axis.tlast
            wiring.connect(m, fifo.o, intake.wire)
        else:
            self._intake_overflow = Const(0)
            _from_axis(m, self._core["net_rx"], intake.wire)
        wiring.connect(m, parser.hdr, filt.hdr)
        wiring.connect(m, parser.payload, store.i)
        wiring.connect(m, store.handle, filt.handle)
        _to_axis(m, parser.eth, self._core["eth_rx"])
        wiring.connect(m, filt.request, responder.request)
        wiring.connect(m, filt.response, b["completer"].response)
        wiring.connect(m, b["completer"].land, responder.land)
        wiring.connect(m, responder.landed, b["completer"].landed)
        wiring.connect(m, responder.store_read, store.read)
        wiring.connect(m, store.o, responder.store_data)
        m.submodules.frees = frees = StreamArbiter(range(p.rx_cells), 3, skid=True)
        for i, block in enumerate((filt, responder, b["completer"])):
            wiring.connect(m, block.free, frees.i[i])
        wiring.connect(m, frees.o, store.free)
        m.submodules.cqes = cqes = StreamArbiter(CqeRequest(p), 2, skid=True)
        wiring.connect(m, responder.cqe, cqes.i[0])
        wiring.connect(m, b["completer"].cqe, cqes.i[1])
        wiring.connect(m, cqes.o, b["cqe_writer"].cqe)

    def _memory(self, m):
        b = self._blocks
        translate, read, write = b["translate"], b["dma_read"], b["dma_write"]
        wiring.connect(m, b["wqe_fetch"].xlate, translate.sq)
        wiring.connect(m, b["responder"].xlate_ring, translate.rq)
        wiring.connect(m, b["gather"].xlate, translate.gather)
        wiring.connect(m, b["responder"].xlate_place, translate.place)
        wiring.connect(m, b["responder"].xlate_response, translate.response)
        wiring.connect(m, b["cqe_writer"].xlate, translate.cqe)
        wiring.connect(m, b["eq_writer"].xlate, translate.eqe)
        wiring.connect(m, b["wqe_fetch"].read, read.sq)
        wiring.connect(m, b["responder"].read, read.rq)
        wiring.connect(m, b["responder"].read_response, read.response)
        wiring.connect(m, b["responder"].read_atomic, read.atomic)
        wiring.connect(m, b["gather"].read, read.gather)
        wiring.connect(m, translate.walk, read.walk)
        wiring.connect(m, b["responder"].write, write.place)
        wiring.connect(m, b["responder"].write_atomic, write.atomic)
        wiring.connect(m, b["cqe_writer"].write, write.cqe)
        wiring.connect(m, b["eq_writer"].write, write.eqe)
        connect_host(m, self._core_host, read.axi, write.axi)
        m.submodules.host_check = check = AxiChecker(self.p.data_width, self.id_width)
        for name in self.m_axi.signature.members:
            m.d.comb += getattr(check, name).eq(getattr(self.m_axi, name))


def _from_axis(m: Module, axis, sink) -> None:
    """AXI4-Stream (input of the top) to a beat stream."""
    m.d.comb += [
        sink.valid.eq(axis.tvalid), axis.tready.eq(sink.ready), sink.payload.data.eq(axis.tdata),
        sink.payload.keep.eq(axis.tkeep), sink.payload.last.eq(axis.tlast), sink.payload.err.eq(axis.tlast & axis.tuser),
    ]  # fmt: skip


def _to_axis(m: Module, source, axis) -> None:
    """A beat stream to an AXI4-Stream (output of the top)."""
    m.d.comb += [
        axis.tvalid.eq(source.valid), source.ready.eq(axis.tready), axis.tdata.eq(source.payload.data),
        axis.tkeep.eq(source.payload.keep), axis.tlast.eq(source.payload.last),
        axis.tuser.eq(source.payload.last & source.payload.err),
    ]  # fmt: skip
