"""What a user may set (`RnicConfig`) and what follows from it (`Params`).

``RnicConfig`` holds the choices; ``Params`` holds every derived number, cross-checked once, so that no block ever computes
a width of its own. A wrong value raises ``ValueError`` naming the field and its limits.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

__all__ = ["RnicConfig", "Params", "CONFIGS", "named_config"]

MAX_PMTU = 4096
CELL_BYTES = 256
COUNTER_BITS = 16  # SQ and RQ producer/consumer counters, free running
CQ_COUNTER_BITS = 24  # CQ and EQ counters, free running (a doorbell carries 30 bits, the upper ones are ignored)


def _is_pow2(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True, kw_only=True)
class RnicConfig:
    """Choices of a user. Depths count packets or descriptors unless the name says bytes.

    Parameters
    ----------
    data_width: bus width in bits of host, net and eth ports: 64, 128, 256 or 512.
    clock_hz: frequency of the one clock; software reads it to turn cycles into time.
    num_qps, num_mrs, num_cqs, num_eqs: sizes of the object tables, powers of two.
    num_gids, num_pkeys: entries of the port's address and P_Key tables, powers of two.
    sq_outstanding: send WQEs of one QP that may be sent but not yet retired, power of two.
    max_rd_atomic: READ and ATOMIC requests outstanding per QP, both directions, power of two.
    max_sge: scatter/gather elements of a send WQE.
    desc_depth: depth of descriptor FIFOs between blocks (at least 2).
    rx_cells: 256-byte cells of the receive packet store (at least two largest frames).
    read_buffer_bytes: payload bytes that may be on their way from host memory per payload client.
    tlb_entries: entries of the translation cache (power of two, at least 2).
    walks: page-table walks under way at once.
    wqe_batch: send WQEs read by one host access at most (power of two).
    rx_drop: True: ``net_rx`` never stalls, whole frames are dropped and counted when there is no room. False: ``net_rx`` waits
        for room, a wire without faults loses nothing.
    probe: True: the ``probe`` port exists.
    """

    data_width: int = 64
    clock_hz: int = 125_000_000
    num_qps: int = 16
    num_mrs: int = 16
    num_cqs: int = 16
    num_eqs: int = 2
    num_gids: int = 4
    num_pkeys: int = 4
    sq_outstanding: int = 16
    max_rd_atomic: int = 4
    max_sge: int = 4
    desc_depth: int = 4
    rx_cells: int = 48
    read_buffer_bytes: int = 8192
    tlb_entries: int = 16
    walks: int = 2
    wqe_batch: int = 4
    rx_drop: bool = False
    probe: bool = True

    def replace(self, **changes) -> RnicConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


_LIMITS: dict[str, tuple[int, int, bool]] = {  # field: (low, high, power of two)
    "data_width": (64, 512, True),
    "clock_hz": (1_000_000, 2_000_000_000, False),
    "num_qps": (2, 16384, True),
    "num_mrs": (2, 65536, True),
    "num_cqs": (2, 16384, True),
    "num_eqs": (1, 64, True),
    "num_gids": (1, 16, True),
    "num_pkeys": (1, 16, True),
    "sq_outstanding": (2, 1024, True),
    "max_rd_atomic": (1, 128, True),
    "max_sge": (1, 6, False),
    "desc_depth": (2, 256, False),
    "rx_cells": (2 * MAX_PMTU // CELL_BYTES, 65536, False),
    "read_buffer_bytes": (2 * MAX_PMTU, 1 << 20, True),
    "tlb_entries": (2, 4096, True),
    "walks": (1, 16, False),
    "wqe_batch": (1, 32, True),
}


class Params:
    """Everything that follows from an `RnicConfig`; the one object handed to every block.

    Raises ``ValueError`` naming the field and its limits.
    """

    def __init__(self, config: RnicConfig):
        for name, (low, high, pow2) in _LIMITS.items():
            value = getattr(config, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}, must be an integer {low}..{high}")
            if pow2 and not _is_pow2(value):
                raise ValueError(f"{name} is {value}, must be a power of two {low}..{high}")
        self.config = config
        self.data_width = config.data_width
        self.lanes = config.data_width // 8  # bytes of a beat
        self.lane_bits = (self.lanes - 1).bit_length()
        # Cycles of a read of the address table: a frame of at least 4 bus words leaves time to read it in two halves.
        self.address_cycles = 3 if config.data_width <= 128 else 2
        self.num_qps = config.num_qps
        self.num_mrs = config.num_mrs
        self.num_cqs = config.num_cqs
        self.num_eqs = config.num_eqs
        self.num_gids = config.num_gids
        self.num_pkeys = config.num_pkeys
        self.qpn_bits = (config.num_qps - 1).bit_length()
        self.cqn_bits = (config.num_cqs - 1).bit_length()
        self.eqn_bits = max(1, (config.num_eqs - 1).bit_length())
        self.gid_bits = max(1, (config.num_gids - 1).bit_length())
        self.pkey_bits = max(1, (config.num_pkeys - 1).bit_length())
        self.desc_depth = config.desc_depth
        self.sq_outstanding = config.sq_outstanding
        self.max_rd_atomic = config.max_rd_atomic
        self.max_sge = config.max_sge
        self.wqe_batch = config.wqe_batch
        self.wqe_batch_bits = config.wqe_batch.bit_length()
        self.rx_cells = config.rx_cells
        self.cell_bits = (config.rx_cells - 1).bit_length()
        self.read_buffer_beats = config.read_buffer_bytes // self.lanes
        self.wqe_buffer_beats = max(2 * config.wqe_batch, config.desc_depth) * 128 // self.lanes
        self.parking_slots = config.rx_cells  # a request with payload has a cell of the packet store at least
        # log2 of the translations of a block that wait for page tables
        self.cold_bits = 1 if config.walks < 3 else 2 if config.walks < 8 else 3
        self.tlb_entries = config.tlb_entries
        self.walks = config.walks
        self.counter_bits = COUNTER_BITS
        self.cq_counter_bits = CQ_COUNTER_BITS
        # The translation and protection table holds MRs first, then one entry per ring (records.XlateRequest.ring).
        self.tpt_sq_base = config.num_mrs
        self.tpt_rq_base = self.tpt_sq_base + config.num_qps
        self.tpt_cq_base = self.tpt_rq_base + config.num_qps
        self.tpt_eq_base = self.tpt_cq_base + config.num_cqs
        self.tpt_entries = self.tpt_eq_base + config.num_eqs
        self.tpt_bits = (self.tpt_entries - 1).bit_length()
        self.rx_drop = config.rx_drop
        self.probe = config.probe


CONFIGS: dict[str, RnicConfig] = {
    # 64 bit, everything as small as it may be: finds deadlocks and off-by-one errors of full queues.
    "tiny": RnicConfig(
        data_width=64, num_qps=8, num_mrs=16, num_cqs=8, num_eqs=2, num_gids=2, num_pkeys=2, sq_outstanding=2,
        max_rd_atomic=1, desc_depth=2, rx_cells=2 * MAX_PMTU // CELL_BYTES, read_buffer_bytes=2 * MAX_PMTU,
        tlb_entries=2, walks=1, wqe_batch=1,
    ),
    # ECP5 boards: 64 bit at 125 MHz is 8 Gbit/s, far above the gigabit line.
    "gigabit": RnicConfig(
        data_width=64, clock_hz=125_000_000, num_qps=128, num_mrs=128, num_cqs=128, num_eqs=2, sq_outstanding=16,
        max_rd_atomic=4, desc_depth=4, rx_cells=64, read_buffer_bytes=8192, tlb_entries=64, walks=2, wqe_batch=4,
    ),
    # 512 bit at 250 MHz is 128 Gbit/s.
    "hundred": RnicConfig(
        data_width=512, clock_hz=250_000_000, num_qps=256, num_mrs=1024, num_cqs=256, num_eqs=4, sq_outstanding=256,
        max_rd_atomic=16, desc_depth=48, rx_cells=512, read_buffer_bytes=65536, tlb_entries=1024, walks=8, wqe_batch=16,
    ),
}  # fmt: skip


def named_config(name: str) -> RnicConfig:
    """The named configuration; ``ValueError`` listing the names when there is none."""
    if name not in CONFIGS:
        raise ValueError(f"config is {name!r}, must be one of {', '.join(CONFIGS)}")
    return CONFIGS[name]
