"""What looks on in the top: counters, watchdog, and the fence of commands that end something."""

from amaranth import *
from amaranth.lib import wiring

from .abi import COUNTERS, WATCHED
from .completion.eq import EqWriter
from .debug.watchdog import OpenJobs
from .qp.fence import Access, Fence, Watch
from .records import RxDrop
from .requester.complete import Completer

__all__ = ["NicWatch"]


class NicWatch(wiring.Component):
    """The part of `Nic` that only looks at its streams; `Nic` sets the attributes and the ports."""

    def _count(self, m):
        """One pulse per counter of `abi.COUNTERS`."""
        b = self._blocks
        parser, filt, responder, axi = b["parser"], b["filter"], b["responder"], self.m_axi
        pulses: dict[str, Value] = {}
        for cause in RxDrop:
            if cause is RxDrop.ACCEPTED:
                continue
            name = COUNTERS[cause.value][0]
            pulses[name] = (parser.drop.valid & (parser.drop.cause == cause)) | (filt.drop & (filt.cause == cause))
        accepted = parser.hdr.valid & parser.hdr.ready
        frame, eth = b["builder"].frame, parser.eth
        nak = b["ack_sender"].job
        pulses |= {
            "rx_frames": accepted,
            "rx_eth_frames": eth.valid & eth.ready & eth.payload.last,
            "rx_no_space": pulses["rx_no_space"] | self._intake_overflow | self._turn.overflow,
            "rx_duplicate": responder.duplicate,
            "rx_out_of_sequence": responder.out_of_sequence,
            "rx_bad_response": b["completer"].bad_response,
            "tx_frames": frame.valid & frame.ready & frame.payload.last,
            "tx_naks": nak.valid & nak.ready & nak.payload.syndrome[5],
            "db_bad_id": b["csr"].bad_id,
            "dma_read_errors": axi.rvalid & axi.rready & axi.rlast & axi.rresp[1],
            "dma_write_errors": axi.bvalid & axi.bready & axi.bresp[1],
            "cq_overflows": b["cqe_writer"].overflow,
            "rx_qp_error_drop": responder.error_drop,
            "tlb_hits": b["translate"].hit,
            "tlb_misses": b["translate"].miss,
        }
        for i, (name, _doc) in enumerate(COUNTERS):
            m.d.comb += b["counters"].pulses[i].eq(pulses[name])

    def _watch(self, m):
        """What the watchdog looks at, `abi.WATCHED`."""
        b, axi = self._blocks, self.m_axi
        csr, watchdog = b["csr"], b["watchdog"]
        streams = {
            "context_write": b["command"].ctx, "doorbell_sq": csr.doorbell_sq, "doorbell_rq": csr.doorbell_rq,
            "doorbell_cq": csr.doorbell_cq, "wqe": b["wqe_fetch"].wqe, "tx_job": b["segmenter"].job,
            "tx_segment": b["segmenter"].segment, "tx_header": b["gather"].header, "ack_header": b["ack_sender"].header,
            "response_header": b["responder"].response_header, "frame": b["builder"].frame, "rx_header": b["parser"].hdr,
            "rx_payload": b["parser"].payload, "request": b["filter"].request, "response": b["filter"].response,
            "land": b["completer"].land, "ack": b["responder"].ack, "free": b["responder"].free,
            "send_failure": b["completer"].failure, "sq_flush": b["scheduler"].flush, "rq_flush": b["responder"].flush,
            "cqe": b["cqe_writer"].cqe, "event": b["eq_writer"].event, "qp_error": b["command"].qp_error,
            "walk": b["translate"].walk.command,
        }  # fmt: skip
        jobs: dict[str, Value] = {name: port.valid & ~port.ready for name, port in streams.items()}
        for name in ("net_tx", "net_rx"):
            jobs[name] = self._core[name].tvalid & ~self._core[name].tready
        for name, begin, end in (
            ("host_read", axi.arvalid & axi.arready, axi.rvalid & axi.rready & axi.rlast),
            ("host_write", axi.awvalid & axi.awready, axi.bvalid & axi.bready),
        ):
            m.submodules[f"open_{name}"] = bursts = OpenJobs(name)
            m.d.comb += [bursts.begin.eq(begin), bursts.end.eq(end)]
            jobs[name] = bursts.waiting
        jobs["command"] = csr.busy & ~csr.result.valid
        m.d.comb += [
            *(watchdog.waiting[i].eq(jobs[name]) for i, (name, _doc) in enumerate(WATCHED)),
            watchdog.limit.eq(csr.watchdog_limit),
            watchdog.clear.eq(csr.watchdog_clear),
            csr.watchdog.eq(Cat(watchdog.index, Const(0, 23), watchdog.tripped)),
        ]

    def _fence(self, m):
        """What a command that ends something waits for (`qp.fence`): phase, items that can be in front of the stream, stream."""
        b, p = self._blocks, self.p
        scheduler, responder, completer, gather = b["scheduler"], b["responder"], b["completer"], b["gather"]
        queue = 2 * p.desc_depth + 8
        streams = {
            "fetch": (0, 4, scheduler.fetch), "sq_flush": (0, 4, scheduler.flush), "request": (0, queue, b["filter"].request),
            "response": (0, queue, b["filter"].response),
            "land": (1, queue, completer.land),
            # 2, 3: markers and flush events
            "failure": (4, 8, completer.failure), "ack": (4, queue, responder.ack), "header": (4, 4, gather.header),
            "response_header": (4, 4, responder.response_header), "landed": (4, completer.results_depth, responder.landed),
            "send_cqe": (5, 4 * Completer.TURN, completer.cqe), "recv_cqe": (5, queue, responder.cqe),
            "send_error": (5, p.num_qps, completer.qp_error), "recv_error": (5, queue, responder.qp_error),
            "build": (5, queue, b["builder"].header), "cqe": (6, 4, b["cqe_writer"].cqe),
        }  # fmt: skip
        reads, writes = [c.name for c in self._read_clients], self._write_clients
        m.submodules.fence = fence = Fence(
            p,
            [Watch(name=name, phase=phase, holds=holds) for name, (phase, holds, _) in streams.items()]
            + [Watch(name="eqe", phase=7, holds=EqWriter.holds)],
            [*(Access(name=f"{name}_read") for name in reads), *(Access(name=f"{name}_write") for name in writes)],
        )
        for name, (_, _, port) in streams.items():
            m.d.comb += [getattr(fence, f"valid_{name}").eq(port.valid), getattr(fence, f"ready_{name}").eq(port.ready)]
        m.d.comb += [fence.valid_eqe.eq(b["eq_writer"].busy), fence.ready_eqe.eq(b["eq_writer"].ended)]
        for name in reads:
            port = getattr(b["dma_read"], name)
            m.d.comb += [
                getattr(fence, f"begin_{name}_read").eq(port.command.valid & port.command.ready),
                getattr(fence, f"end_{name}_read").eq(port.word.valid & port.word.ready & port.word.payload.last),
            ]
        for name in writes:
            port = getattr(b["dma_write"], name)
            m.d.comb += [
                getattr(fence, f"begin_{name}_write").eq(port.command.valid & port.command.ready),
                getattr(fence, f"end_{name}_write").eq(port.done.valid & port.done.ready),
            ]
        wiring.connect(m, b["command"].rq_flush, fence.flush_i)
        wiring.connect(m, fence.flush_o, responder.flush)
        wiring.connect(m, scheduler.fetch, fence.fetch_i)
        wiring.connect(m, fence.fetch_o, b["wqe_fetch"].job)
        m.d.comb += [
            fence.start.eq(b["command"].fence_start),
            fence.marker_out.eq(gather.marker_out),
            fence.qpn.eq(b["command"].fence_qpn),
            responder.mark.eq(fence.mark),
            fence.marked.eq(responder.marked),
            fence.drained.eq(responder.drained),
            fence.drained_qpn.eq(responder.drained_qpn),
            # At last the CQEs of all that.
            b["cqe_writer"].mark.eq(fence.done),
            b["command"].fence_done.eq(b["cqe_writer"].marked),
        ]
