"""Memory rows that are read in the cycle in which they are written."""

from amaranth import *
from amaranth.hdl import MemoryInstance
from amaranth.lib import memory

__all__ = ["NO_CLASH", "ClashPlatform"]

# Attributes of a `Memory` whose reader has no use for what a clocked port gives for a row written in the same cycle. A block
# memory gives anything then; without this promise synthesis builds the old value from registers and muxes around it.
NO_CLASH = {"no_rw_check": 1}


class ClashPlatform:
    """Platform of all that is simulated: holds every `NO_CLASH` memory to its promise.

    A clocked read port that meets a write of its row gives the complement of the row until it is read again, so that whoever
    uses the value fails. Timing and everything else is as without.
    """

    def get_memory(self, mem: memory.Memory) -> Elaboratable | MemoryInstance:
        """What Amaranth takes instead of a memory's own elaboration."""
        instance = MemoryInstance(data=mem.data, attrs=mem.attrs, src_loc=mem.src_loc)
        writes = {port: instance.write_port(domain=port.domain, addr=port.addr, data=port.data, en=port.en)
                  for port in mem.write_ports}  # fmt: skip
        m = Module() if NO_CLASH.items() <= mem.attrs.items() else None
        for number, port in enumerate(mem.read_ports):
            after = tuple(writes[write] for write in port.transparent_for)
            if m is None or port.domain == "comb" or not writes:
                instance.read_port(domain=port.domain, data=port.data, addr=port.addr, en=port.en, transparent_for=after)
                continue
            row = Signal(Shape.cast(mem.shape), name=f"row_{number}")
            clash = Signal(name=f"clash_{number}")
            instance.read_port(domain=port.domain, data=row, addr=port.addr, en=port.en, transparent_for=after)
            with m.If(port.en):
                m.d[port.domain] += clash.eq(Cat(write.en.any() & (write.addr == port.addr) for write in writes).any())
            m.d.comb += Value.cast(port.data).eq(row ^ clash.replicate(len(row)))
        if m is None:
            return instance
        m.submodules.rows = instance
        return m
