"""Registers, mailbox and command engine together: a command from AXI4-Lite to the context bus and back."""

from amaranth import Module
from amaranth.lib import wiring

from rnic import abi
from rnic.abi import CmdStatus, Command, register
from rnic.config import CONFIGS, Params
from rnic.host.csr import Csr
from rnic.qp.command import CommandEngine
from rnic.qp.port import PortTable
from tests.unit.streams import seeded, simulate
from tests.unit.test_host_csr import Host


class Path(wiring.Component):
    def __init__(self, p):
        self.csr, self.engine, self.port = Csr(p), CommandEngine(p), PortTable(p)
        super().__init__({})

    def elaborate(self, platform):
        m = Module()
        m.submodules.csr, m.submodules.engine, m.submodules.port = csr, engine, port = self.csr, self.engine, self.port
        wiring.connect(m, csr.command, engine.command)
        wiring.connect(m, engine.result, csr.result)
        wiring.connect(m, engine.ctx, port.ctx)
        m.d.comb += [
            csr.mailbox_index.eq(engine.mailbox_index), engine.mailbox_value.eq(csr.mailbox_value),
            csr.mailbox_write.eq(engine.mailbox_write), csr.mailbox_data.eq(engine.mailbox_data),
        ]
        return m


def test_commands_from_software():
    p = Params(CONFIGS["tiny"])
    dut = Path(p)
    host = Host(dut.csr, seeded(1))
    gid = {"ip": 0x0F0E0D0C0B0A09080706050403020100, "mac": 0x060504030201, "valid": 1}

    async def command(ctx, code, words):
        for i, word in enumerate(words):
            await host.write(ctx, abi.MAILBOX_BASE + 4 * i, word)
        await host.write(ctx, register("CMD_OP"), int(code))
        while (status := await host.read(ctx, register("CMD_STATUS"))) >> 31:
            pass
        return CmdStatus(status)

    async def run(ctx):
        words = abi.CMD_SET_GID.words(index=1, entry=abi.GID_ENTRY.pack_int(**gid))
        assert await command(ctx, Command.SET_GID, words) == CmdStatus.OK
        ctx.set(dut.port.gid_index_0, 1)
        found = abi.GID_ENTRY.unpack(ctx.get(dut.port.gid_0.as_value()))
        assert found == abi.GID_ENTRY.unpack(0) | gid
        assert await command(ctx, Command.SET_GID, abi.CMD_SET_GID.words(index=9)) == CmdStatus.BAD_INDEX
        assert await command(ctx, Command.SET_PORT, abi.CMD_SET_PORT.words(mtu=2)) == CmdStatus.OK
        assert await command(ctx, Command.QUERY_PORT, [0, 0]) == CmdStatus.OK
        assert await host.read(ctx, abi.MAILBOX_BASE + 4) == 2
        assert ctx.get(dut.port.mtu) == 2
        assert await command(ctx, 0x40, []) == CmdStatus.BAD_COMMAND

    simulate(dut, run, limit=8000)
