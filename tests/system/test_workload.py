"""Workloads of `rnic sim` on a model: what they report, and that wrong memory or a wrong completion is noticed."""

import io
import json
import re

import pytest
from rich.console import Console
from tests.system.fst import hierarchy

from rnic_sim.demo import run_demo
from rnic_sim.files import Files
from rnic_sim.lab import Lab
from rnic_sim.script import parse_script
from rnic_sim.workload import _OPCODES, Options, Workload, WorkloadError, _Layout, plan_for, run_workload

KEYS = {
    "config", "op", "bytes", "count", "qps", "mtu", "seed", "cycles", "payload_bytes", "bytes_per_cycle", "frames", "wire_bytes",
    "beats", "latency_cycles", "completions", "data_ok", "sim",
}  # fmt: skip

#: Register of a state machine, below the NIC, to some of its states.
STATES = {
    "core.segmenter.segment": ["IDLE", "PACKET", "COMMIT", "SLEEP"], "core.completer.complete": ["IDLE", "DECIDE", "RETIRE"],
    "core.responder.place.place": ["Pieces", "Verdict"], "core.responder.complete.complete": ["Jobs", "Flush"],
    "core.command.command": ["Idle", "Fetch", "Decode"], "csr.write": ["Collect", "Respond"],
}  # fmt: skip


def test_write_report(tmp_path):
    """The numbers of the report against counts made by hand: 6 messages of 700 bytes, PMTU 512, so two packets each."""
    files = Files(trace=tmp_path / "t.json", pcap=tmp_path / "f.pcap", json=tmp_path / "r.json")
    options = Options(bytes=700, count=6, qps=2, mtu=512, sge=3, seed=5)
    report = run_workload("write", options, files=files)
    assert report.error == "" and report.data_ok
    assert (report.payload_bytes, report.completions) == (4200, {"SUCCESS": 6})
    first, last, ack = 14 + 20 + 8 + 12 + 16 + 512 + 4, 14 + 20 + 8 + 12 + 188 + 4, 14 + 20 + 8 + 12 + 4 + 4
    acks = report.frames - 12
    assert 6 <= acks <= 12 and report.wire_bytes == 6 * (first + last) + acks * ack
    assert report.beats == 6 * (-(-first // 8) + -(-last // 8)) + acks * -(-ack // 8)
    assert 64 + 64 < report.latency_cycles["p50"] <= report.latency_cycles["max"] <= report.cycles
    assert report.bytes_per_cycle == pytest.approx(4200 / report.cycles, abs=1e-4)
    document = json.loads((tmp_path / "r.json").read_text())
    assert document.keys() >= KEYS and set(document["latency_cycles"]) == {"p50", "p99", "max"}
    rows = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["name"] == "thread_name"]
    assert len(rows) == 6
    assert (tmp_path / "f.pcap").stat().st_size == 24 + 16 * report.frames + report.wire_bytes
    again = run_workload("write", options)
    for name in ("cycles", "frames", "latency_cycles", "wire_bytes"):
        assert getattr(again, name) == getattr(report, name)


def test_script_from_both_hosts():
    """SENDs and WRITEs with and without immediate, inline and gathered, from both machines, with waits."""
    plan = parse_script("""
        write qp=0 bytes=1500 count=3 sge=2
        send qp=1 bytes=64 inline
        send_imm host=b qp=1 bytes=33 imm=0x1234 solicited
        wait
        pause 300
        write_imm qp=0 bytes=100 host=b imm=7
        write bytes=0
    """)
    report = run_workload("mix", Options(ipv6=True, seed=2), plan)
    assert report.error == "" and report.data_ok
    assert report.completions == {"SUCCESS": 7 + 3}  # three of them make a completion at the receiver


@pytest.mark.parametrize("side, where", [(1, 0), (1, -1), (1, 100), (0, 5)])
def test_a_wrong_byte_is_found(side, where):
    """One byte changed behind the RNIC's back, in the data, before it, behind it, at the source: each is reported."""
    plan = plan_for("write", options := Options(bytes=100, count=2))
    with Lab("tiny") as lab:
        workload = Workload(lab, plan, options, _Layout.of(plan, options))

        def poke(done, _total):
            if len(workload.ripe) == 1 and not poked:  # completed, not compared
                poked.append(done)
                region = (workload.sides[side].local, workload.sides[side].target)[side]
                at = workload.lanes[0, 0].offset(0) + where
                region.write(bytes([region.read(1, at)[0] ^ 1]), at)

        poked = []
        with pytest.raises(WorkloadError, match=f"byte {where} of 100 at host {'ab'[side]}"):
            workload.run(poke)


def test_a_failed_completion_is_an_error(monkeypatch):
    """A WRITE the RNIC refuses (the SEND opcode is taken away: no receive WQE is ever posted for it) ends the run."""
    monkeypatch.setitem(_OPCODES, "write", _OPCODES["send"])
    with pytest.raises(WorkloadError, match="completed"):
        plan = plan_for("write", options := Options(count=1))
        with Lab("tiny") as lab:
            lab_connect = lab.connect
            monkeypatch.setattr(lab, "connect", lambda *a, **k: lab_connect(*a, **k, rnr_retry=0))
            Workload(lab, plan, options, _Layout.of(plan, options)).run()


def test_waves_hold_the_names(tmp_path):
    """Opcodes, events and states are enums in the FST file itself; every trace of the view is in it."""
    waves = tmp_path / "w.fst"
    report = run_workload("write", Options(count=1), files=Files(waves=waves))
    assert report.error == ""
    variables, types = hierarchy(waves)
    event = variables["a.rnic_shell.probes.builder.probe_event[5:0]"]
    opcode = variables["b.rnic_shell.probes.filter.opcode[7:0]"]
    assert "FRAME_OUT" in types[event] and "RC_WRITE_ONLY" in types[opcode]
    for path, some in STATES.items():
        (state,) = [kind for name, kind in variables.items() if name.startswith(f"a.rnic_shell.nic.{path}_state[")]
        assert set(some) <= set(types[state]), path
    view = waves.with_suffix(".gtkw").read_text()
    shown = re.findall(r"^(?:\+\{[^}]*\} )?([ab]\.\S+)$", view, re.M)
    assert len(shown) > 100 and not set(shown) - set(variables)
    assert str(tmp_path) not in view
    names = {re.sub(r"\[.*", "", name) for name in variables}
    surfer = {path.name: path.read_text() for path in tmp_path.glob("*.sucl")}
    assert set(surfer) == {"w.write.sucl", "w.send.sucl", "w.read_atomic.sucl"}
    for text in surfer.values():
        added = re.findall(r"^variable_add (\S+)$", text, re.M)
        assert len(added) > 30 and not set(added) - names


def test_demo_tells_every_step_in_80_columns():
    """Every step with its cycles, in order where one causes the next; the text fits a terminal of 80 columns."""
    out = io.StringIO()
    result = run_demo(payload=3000, ipv6=True, console=Console(file=out, width=80))
    assert result.data_ok and result.completions["SUCCESS"] == 3 + len(result.operations) - 2
    send, write = result.operations[:2]
    assert [s["step"] for s in send["steps"]] == list(range(1, 12)) and len(write["steps"]) == 8
    firsts = [s["first"] for s in write["steps"]]
    assert firsts == sorted(firsts) and firsts[0] == 0
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("RDMA WRITE: A writes 3000 bytes" in line for line in lines)
