"""Enum types for the waves: which vectors of a Verilog text become variables of an enum type."""

import os
import time

from amaranth.hdl import Fragment, Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from rnic.records import Probe, ProbeEvent
from rnic_sim import build
from rnic_sim.enum_names import name_enums
from rnic_sim.names import fsm_states, probe_taps
from rnic_sim.shell import Manifest, Port, make_shell

VERILOG = """\
module \\rnic.box (clk, cause);
  input clk;
  wire clk;
  (* enum_base_type = "Drop" *)
  (* enum_value_00 = "NONE" *)
  (* enum_value_10 = "LATE" *)
  output [1:0] cause;
  (* enum_base_type = "Drop" *)
  (* enum_value_00 = "NONE" *)
  (* enum_value_10 = "LATE" *)
  reg [1:0] cause = 2'h0;
  (* enum_base_type = "Drop" *)
  (* enum_value_00 = "NONE" *)
  (* enum_value_10 = "LATE" *)
  wire [1:0] \\p.cause ;
  (* enum_base_type = "Twice" *)
  (* enum_value_0 = "SAME" *)
  (* enum_value_1 = "SAME" *)
  wire twice;
  reg [1:0] turn_state = 2'h0;
  wire [3:0] other;
endmodule
"""


def test_vectors_with_names_become_enums():
    text = name_enums(VERILOG, {"rnic.box.turn_state": {"0": "IDLE", "1": "GO", "2": "END"}, "rnic.cup.turn_state": {0: "A"}})
    packages, body = text.split("module ", 1)
    assert "typedef enum logic [1:0] {NONE = 2'd0, LATE = 2'd2} Drop;" in packages
    assert "typedef enum logic [1:0] {IDLE = 2'd0, GO = 2'd1, END = 2'd2} turn_state;" in packages
    assert packages.count("package ") == 2  # not the enum with two equal names, not a register of another module
    assert "wire rnic_Drop_0::Drop \\p.cause ;" in body
    assert "  rnic_turn_state_1::turn_state turn_state = 2'h0;" in body
    assert "reg [1:0] cause = 2'h0;" in body and "wire twice;" in body and "wire [3:0] other;" in body  # ports stay vectors


class Walker(wiring.Component):
    def __init__(self):
        super().__init__({"o": Out(1)})

    def elaborate(self, platform):
        m = Module()
        with m.FSM(name="walk") as fsm:
            with m.State("IDLE"):
                m.next = "RUN"
            with m.State("RUN"):
                m.d.comb += self.o.eq(fsm.ongoing("RUN"))
        return m


def test_states_of_every_fsm_by_path():
    m = Module()
    m.submodules.first = Walker()
    m.submodules.second = Walker()
    inner = Module()
    inner.submodules.third = Walker()
    m.submodules.core = ResetInserter(Signal(name="stop"))(inner)
    m.d.sync += Signal(name="x").eq(1)
    assert fsm_states(Fragment.get(m, None), "top") == {
        "top.first.walk_state": {0: "IDLE", 1: "RUN"}, "top.second.walk_state": {0: "IDLE", 1: "RUN"},
        "top.core.third.walk_state": {0: "IDLE", 1: "RUN"},
    }  # fmt: skip


def test_probe_slots_stand_in_the_shell_by_field():
    """Each field where `records.Probe` has it, the event NONE without valid."""
    width = Probe().size
    shell = make_shell([Port("clk", True, 1), Port("probe", False, 2 * width)],
                       Manifest(data_width=64, probe_slots=2, probe_width=width), ["builder", "other"],
                       probe_taps(["builder", "other"]))  # fmt: skip
    event = Probe()["event"]
    low = width + event.offset
    assert f"probe_event = shell_ProbeEvent_0::ProbeEvent'(probe[{width}] ? probe[{low + event.width - 1}:{low}]" in shell
    assert f"FRAME_OUT = {event.width}'d{ProbeEvent.FRAME_OUT.value}" in shell
    assert shell.count("shell_Opcode_1::Opcode opcode") == 1  # the builder's
    psn = Probe()["psn"]
    assert f"wire [23:0] psn = probe[{psn.offset + 23}:{psn.offset}];" in shell


def test_a_known_model_is_not_made_again(monkeypatch, tmp_path):
    """Made once for the same sources and facts; made when either differs; never taken or noted while a source is fresh."""
    made = []

    def build_model(text, _manifest):
        home = tmp_path / "sim" / f"model{len(made)}"
        home.mkdir(parents=True)
        (home / "librnic.so").touch()
        made.append(text)
        return home

    source = tmp_path / "sources" / "block.py"
    source.parent.mkdir()

    def write(text, age):
        source.write_text(text)
        os.utime(source, (time.time() - age,) * 2)

    monkeypatch.setenv("RNIC_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(build, "build_model", build_model)
    monkeypatch.setattr(build, "_MAKERS", ())
    write("a", 3600)
    for facts, expected in (("x", "model0"), ("x", "model0"), ("y", "model1"), ("x", "model0")):
        assert build.build_known([source.parent], facts, lambda: ("text", {})).name == expected
    write("b", 3600)
    assert build.build_known([source.parent], "x", lambda: ("text", {})).name == "model2"
    write("a", 0)
    assert build.build_known([source.parent], "x", lambda: ("text", {})).name == "model3"
    write("a", 3600)
    assert build.build_known([source.parent], "x", lambda: ("text", {})).name == "model0"
    assert len(made) == 4
