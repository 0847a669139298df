"""The `rnic` command without a model: wrong command lines, scripts, plans, traces."""

import json

import pytest

from rnic_sim import cli
from rnic_sim.bench import Measurement
from rnic_sim.journal import Entry
from rnic_sim.script import Pause, Post, ScriptError, Wait, parse_script
from rnic_sim.trace import trace_events, work_requests, write_trace
from rnic_sim.workload import Options, plan_for


def run(monkeypatch, capsys, *words):
    """(exit code, stdout, stderr) of the command."""
    monkeypatch.setattr("sys.argv", ["rnic", *words])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", [
    "sim send --nonsense", "sim send --bytes many", "sim nothing", "nothing", "sim send --config enormous",
    "sim write --count 0", "sim write --qps 7", "sim write --qps 0", "sim read --mtu 1000", "sim send --sge 9",
    "sim write --inline --bytes 97", "sim read --inline", "sim send --bytes -1", "sim send --outstanding 0",
    "sim send --script no_such_file", "sim demo --bytes 0", "sim demo --mtu 7", "abi", "bench --config enormous",
])  # fmt: skip
def test_wrong_command_line_is_one_line_and_exit_2(monkeypatch, capsys, words):
    code, out, err = run(monkeypatch, capsys, *words.split())
    assert (code, out.replace("Building the tiny model (cached after the first time) ...\n", "")) == (2, "")
    assert err.startswith("rnic: ") and err.count("\n") == 1 and "Traceback" not in err


def test_no_words_show_the_help(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "sim")
    assert code == 2 and all(word in out for word in ("demo", "send", "write", "read", "atomic", "mix"))


def test_waves_without_a_viewer_names_the_package(monkeypatch, capsys, tmp_path):
    view = tmp_path / "demo.gtkw"
    view.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(monkeypatch, capsys, "waves", str(view))
    assert code == 1 and err.count("\n") == 1 and "gtkwave" in err and "surfer" in err
    code, _, err = run(monkeypatch, capsys, "waves", str(tmp_path / "none.gtkw"))
    assert code == 1 and err.count("\n") == 1 and "none.gtkw" in err


def test_waves_runs_the_viewer_on_path(monkeypatch, capsys, tmp_path):
    view, proof = tmp_path / "demo.gtkw", tmp_path / "proof"
    view.write_text("content")
    viewer = tmp_path / "gtkwave"
    viewer.write_text(f"#!/bin/sh\necho \"$@\" > {proof}; cat \"$1\" >> {proof}\n")
    viewer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert run(monkeypatch, capsys, "waves", str(view))[0] == 0
    assert proof.read_text().split() == ["demo.gtkw", "content"]  # run in its directory


def test_waves_of_one_operation_open_in_surfer(monkeypatch, capsys, tmp_path):
    view, proof, viewer = tmp_path / "demo.read_atomic.sucl", tmp_path / "proof", tmp_path / "surfer"
    view.write_text("zoom_fit\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(monkeypatch, capsys, "waves", str(view))
    assert code == 1 and err.count("\n") == 1 and "Surfer" in err
    viewer.write_text(f"#!/bin/sh\nprintf '%s ' \"$@\" > {proof}\n")
    viewer.chmod(0o755)
    code, _, err = run(monkeypatch, capsys, "waves", str(view))
    assert code == 0 and proof.read_text().split() == ["--command-file", "demo.read_atomic.sucl", "demo.fst"]


def test_script():
    """Defaults, flags, numbers in hex, comments, repetition."""
    text = """
    write qp=2 bytes=0x40 count=2 sge=3   # a comment
    send host=b inline
    wait
    pause 7
    fetch_add fence
    """
    assert parse_script(text, default_bytes=5) == [
        Post("write", 64, qp=2, sge=3), Post("write", 64, qp=2, sge=3), Post("send", 5, host=1, inline=True), Wait(), Pause(7),
        Post("fetch_add", 8, fence=True),
    ]  # fmt: skip


@pytest.mark.parametrize("line, word", [
    ("jump", "jump"), ("write bytes", "bytes"), ("write bytes=x", "bytes"), ("write qp=-1", "qp"), ("write host=c", "host"),
    ("read inline", "inline"), ("cmp_swap bytes=4", "8 bytes"), ("pause", "pause"), ("pause 0", "pause"), ("wait 3", "wait"),
    ("write count=0", "count"),
])  # fmt: skip
def test_wrong_script_names_the_line(line, word):
    with pytest.raises(ScriptError, match=f"line 3.*{word}"):
        parse_script(f"send\n\n{line}\n")
    with pytest.raises(ScriptError, match="nothing is posted"):
        parse_script("wait\n")


def test_plan_is_dealt_to_the_qps_and_repeats_with_its_seed():
    plan = plan_for("write", Options(count=7, qps=3, bytes=10, sge=2))
    assert [p.qp for p in plan] == [0, 1, 2, 0, 1, 2, 0] and {(p.op, p.bytes, p.sge) for p in plan} == {("write", 10, 2)}
    mix = plan_for("mix", Options(count=200, bytes=100, seed=3))
    assert mix == plan_for("mix", Options(count=200, bytes=100, seed=3)) != plan_for("mix", Options(count=200, bytes=100, seed=4))
    assert {p.op for p in mix} == {"send", "send_imm", "write", "write_imm", "read", "fetch_add", "cmp_swap"}
    assert max(p.bytes for p in mix) <= 100


def entries_of_two_writes():
    """Two WRITEs on one QP; the second has two packets, the PSN wraps between them."""
    made = [(0, 0xFFFFFE), (1, 0xFFFFFF), (1, 0)]
    out = []
    for index in (0, 1):
        out.append(Entry(1, 0, "software", "post_send", 2, index, opcode="RDMA_WRITE", length=9, details={"wr_id": 70 + index}))
    out.append(Entry(1, 0, "software", "sq_doorbell", 2))
    cycle = 10
    for n, (index, psn) in enumerate(made):
        if n < 2:
            out.append(Entry(cycle, 0, "segmenter", "wqe_parsed", 2, index))
        out.append(Entry(cycle + 1, 0, "segmenter", "packet_made", 2, psn=psn, opcode="RC_WRITE_ONLY"))
        cycle += 10
    for n, (_, psn) in enumerate(made):
        out.append(Entry(100 + n, 0, "builder", "frame_out", 2, psn=psn, opcode="RC_WRITE_ONLY"))
        out.append(Entry(110 + n, 1, "filter", "frame_in", 3, psn=psn, opcode="RC_WRITE_ONLY"))
        out.append(Entry(120 + n, 1, "placer", "data_placed", 3, psn=psn))
        out.append(Entry(130 + n, 1, "builder", "frame_out", 3, psn=psn, opcode="RC_ACK"))
    for index in (0, 1):
        out.append(Entry(140 + index, 0, "CQE writer", "cqe_written", 2, index, opcode="RDMA_WRITE"))
    return sorted(out, key=lambda e: e.cycle)


def test_trace_gives_every_packet_to_its_work_request(tmp_path):
    first, second = work_requests(entries_of_two_writes(), [(2, 3)])
    assert (first.wr_id, second.wr_id) == (70, 71)
    assert (first.steps["on the wire"], second.steps["on the wire"]) == (100, 101)
    assert (first.steps["data placed"], second.steps["data placed"]) == (120, 122)  # the last packet's
    assert (first.steps["answered"], second.steps["CQE written"]) == (130, 141)
    events = trace_events(entries_of_two_writes(), [(2, 3)], 100_000_000)
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {"QP 0x2 WR 70: RDMA_WRITE, 9 B", "QP 0x2 WR 71: RDMA_WRITE, 9 B"}
    whole = next(e for e in events if e["ph"] == "X" and e["tid"] == 1)
    assert (whole["ts"], whole["dur"]) == (pytest.approx(0.01), pytest.approx(1.39))  # 100 MHz: a cycle is 10 ns
    write_trace(tmp_path / "deep" / "t.json", entries_of_two_writes(), [(2, 3)], 100_000_000)
    assert len(json.loads((tmp_path / "deep" / "t.json").read_text())["traceEvents"]) == len(events)


def test_verdicts():
    assert Measurement("1", "", "", 4, 4).verdict == "ok" and Measurement("1", "", "", 4, 4.1).verdict == "over"
    assert Measurement("4", "", "", 0.95, 0.94, at_least=True).verdict == "under"
    assert Measurement("4", "", "", 0.95, None, at_least=True).verdict == "not built yet"
