"""The watchdog in the whole RNIC: silent while all goes on, by name when the host does not answer."""

import pytest
from tests.system.test_slice import Region, write_wr

from rnic.abi import WATCHDOG_CYCLES, register
from rnic_sim.enums import WCStatus
from rnic_sim.lab import Lab
from rnic_sim.native import AssertionFailed


def test_names_the_host_that_does_not_answer():
    with Lab("tiny", seed=1, host_latency=700) as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 100), Region(b.pd, 100)

        def write():
            a.post_send(write_wr(1, [source.sge()], target.mr.rkey, target.addr))
            return lab.wait_wc(a.scq, 1, 20_000)[0].status

        csr = lab.machines[0]
        assert csr.csr_read(register("WATCHDOG_LIMIT")) == WATCHDOG_CYCLES
        assert write() == WCStatus.SUCCESS
        assert csr.csr_read(register("WATCHDOG")) == 0
        csr.csr_write(register("WATCHDOG_LIMIT"), 100)  # the host takes 700
        with pytest.raises(AssertionFailed, match="watchdog: host_read has waited 100 cycles"):
            write()
