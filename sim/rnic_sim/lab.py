"""A lab: hosts with one RNIC each, cabled, addressed and opened, ready for verbs.

    with Lab("tiny") as lab:
        a, b = lab.contexts
"""

from __future__ import annotations

import functools
from pathlib import Path

from amaranth.hdl import Fragment

import rnic
from rnic.clash import ClashPlatform
from rnic.config import CONFIGS, Params, RnicConfig, named_config
from rnic.nic import Nic
from rnic.records import Probe
from rnic.verilog import to_verilog

from . import world as sim_world
from .build import build_known
from .enums import MTU, AccessFlags, QPType
from .names import fsm_states, probe_taps
from .qp import QP, AHAttr, QPAttr, QPCap, QPInitAttr
from .shell import TOP
from .verbs import CQ, PD, WC, Context, gid_bytes, mac_bytes

__all__ = ["Lab", "Machine", "build_nic"]

_POLL_CYCLES = 16  # cycles between two looks of a polling loop


def _make(config: RnicConfig) -> tuple[str, dict]:
    """Verilog and manifest of a configuration."""
    nic = Nic(Params(config))
    fragment = Fragment.get(nic, ClashPlatform())
    manifest = {
        "data_width": config.data_width, "clock_hz": config.clock_hz, "probe_slots": len(nic.probe_names),
        "probe_width": Probe().size if nic.probe_names else 0, "probe_names": nic.probe_names,
        "probe_taps": probe_taps(nic.probe_names), "states": fsm_states(fragment, TOP),
    }  # fmt: skip
    return to_verilog(nic, fragment=fragment), manifest


@functools.cache
def build_nic(config: RnicConfig) -> Path:
    """The Verilated model of a configuration (cached by content, and by its sources: elaboration alone takes seconds)."""
    return build_known([Path(rnic.__file__).parent], repr(config), lambda: _make(config))


class Machine:
    """The driver seam (`rnic_sim.seam.Host`) on one simulated host. Register accesses and `relax` move the world's time."""

    def __init__(self, world: sim_world.World, index: int):
        self.world, self.host = world, world.nic[index]
        self.csr_read, self.csr_write = self.host.csr_read, self.host.csr_write
        self.mem_read, self.mem_write = self.host.mem_read, self.host.mem_write
        self.alloc_pages, self.free_pages = self.host.alloc_pages, self.host.free_pages

    def relax(self, cycles: int) -> None:
        """Simulate ``cycles``."""
        self.world.step(cycles)

    def now(self) -> int:
        """The present cycle."""
        return self.world.cycle


class Lab:
    """``nics`` machines with one RNIC each; the first two are joined by a link.

    Parameters: ``config`` a name or an `RnicConfig`; ``seed`` sets page placement and every random choice of the models;
    ``host_latency`` cycles from AR to the first R beat, ``write_latency`` from the last W beat to B, ``link_latency`` one way.
    Machine i has the address 192.0.2.(i+1), 2001:db8::(i+1) and MAC 02:00:00:00:00:0(i+1); GID 0 is the IPv4 one, GID 1 the
    IPv6 one where the configuration has two. Every context knows the MACs of all.
    """

    def __init__(self, config: str | RnicConfig = "tiny", *, nics: int = 2, seed: int = 0, host_latency: int = 64,
                 write_latency: int = 16, link_latency: int = 1, mtu: int = 4096):  # fmt: skip
        self.config_name = config if isinstance(config, str) else next((n for n, c in CONFIGS.items() if c == config), "custom")
        self.config = named_config(config) if isinstance(config, str) else config
        model = build_nic(self.config)
        self.world = sim_world.World(
            model, nics, seed, host_latency=host_latency, write_latency=write_latency, link_latency=link_latency
        )
        self.world.step(self.config.num_qps + 64)  # tables and free lists settle after reset
        self.machines = [Machine(self.world, i) for i in range(nics)]
        self.contexts = [Context(machine) for machine in self.machines]
        for i, context in enumerate(self.contexts):
            context.set_port(MTU.of(mtu))
            context.set_pkey(0, 0xFFFF)
            for index, address in enumerate(self.addresses(i)):
                context.set_gid(index, address, self.mac(i))
            for j in range(nics):
                for address in self.addresses(j):
                    context.neighbors[gid_bytes(address)] = mac_bytes(self.mac(j))

    def addresses(self, index: int) -> list[str]:
        """Own addresses of a machine, GID 0 first."""
        return [f"192.0.2.{index + 1}", f"2001:db8::{index + 1}"][: self.config.num_gids]

    @staticmethod
    def mac(index: int) -> str:
        """MAC of a machine."""
        return f"02:00:00:00:00:{index + 1:02x}"

    def close(self) -> None:
        """End the simulation."""
        self.world.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def relax(self, cycles: int) -> None:
        """Simulate ``cycles``."""
        self.world.step(cycles)

    def wait_wc(self, cq: CQ, count: int = 1, max_cycles: int = 20_000) -> list[WC]:
        """Poll until ``count`` completions are there; ``TimeoutError`` naming how many came after ``max_cycles``."""
        found: list[WC] = []
        end = self.world.cycle + max_cycles
        while len(found) < count:
            found += cq.poll(count - len(found))[1]
            if len(found) < count:
                if self.world.cycle >= end:
                    raise TimeoutError(f"{len(found)} of {count} completions after {max_cycles} cycles")
                self.relax(_POLL_CYCLES)
        return found

    def connect(self, first: QP, second: QP, *, mtu: int = 1024, psns: tuple[int, int] = (0x111000, 0x222000), gid: int = 0,
                access: AccessFlags | int = 15, **attributes) -> None:  # fmt: skip
        """Bring two QPs (of two machines or of one) to RTS, each other's peer. ``attributes`` go to both `QPAttr`s.

        Attributes of the address vector (``traffic_class``, ``flow_label``, ``hop_limit``) are taken out of them.
        """
        av = {k: attributes.pop(k) for k in ("traffic_class", "flow_label", "hop_limit", "vlan") if k in attributes}
        for i, (qp, peer) in enumerate(((first, second), (second, first))):
            attr = QPAttr(
                ah_attr=AHAttr(dgid=self.addresses(self.contexts.index(peer.context))[gid], sgid_index=gid, **av),
                path_mtu=MTU.of(mtu), dest_qp_num=peer.qp_num, rq_psn=psns[1 - i], sq_psn=psns[i], qp_access_flags=access,
                **attributes,
            )  # fmt: skip
            qp.to_rts(attr)

    def rc_pair(self, *, cap: QPCap | None = None, cqe: int = 64, mtu: int = 1024, sq_sig_all: bool = False,
                hosts: tuple[int, int] = (0, 1), **kwargs) -> tuple[QP, QP]:  # fmt: skip
        """Two connected RC QPs on the machines ``hosts``, each with a PD and one CQ for both queues of its own."""
        pair = []
        for context in (self.contexts[host] for host in hosts):
            cq = CQ(context, cqe)
            pair.append(QP(PD(context), QPInitAttr(cq, cq, QPType.RC, cap or QPCap(), sq_sig_all)))
        self.connect(pair[0], pair[1], mtu=mtu, **kwargs)
        return pair[0], pair[1]
