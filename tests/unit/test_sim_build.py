"""Build of the running model: its own headers, its generated shell, its refusals, its captures."""

import enum
import random
import struct
import subprocess
import zlib

import pytest

from rnic_sim import build, toolchain
from rnic_sim.hostmem import PageAllocator
from rnic_sim.link import Frame
from rnic_sim.native import Port
from rnic_sim.pcap import write_pcap
from rnic_sim.shell import Manifest, ManifestError, check_ports, find_ports, make_shell
from rnic_sim.toolchain import MissingTool, need_tool
from rnic_sim.waves import Trace, signal_path, write_gtkw

SHIM_PROGRAM = r"""
#include <cstdio>
#include <vector>
#include <lz4.h>
#include <zlib.h>
int main(int, char** argv) {
    std::vector<unsigned char> in, out;
    for (int c; (c = getchar()) != EOF;) in.push_back(static_cast<unsigned char>(c));
    in.push_back(0);  // so that data() is never null
    const size_t size = in.size() - 1;
    if (argv[1][0] == 'l') {
        out.resize(LZ4_compressBound(static_cast<int>(size)));
        out.resize(LZ4_compress_default(reinterpret_cast<char*>(in.data()), reinterpret_cast<char*>(out.data()),
                                        static_cast<int>(size), static_cast<int>(out.size())));
    } else {
        uLongf bound = compressBound(size);
        out.resize(bound);
        if (compress2(out.data(), &bound, in.data(), size, 9) != Z_OK) return 1;
        out.resize(bound);
    }
    return fwrite(out.data(), 1, out.size(), stdout) != out.size();
}
"""


def lz4_decode(block: bytes) -> bytes:
    """LZ4 block format, written from its description: the independent reader of what the shim writes."""
    out, at = bytearray(), 0

    def long_count(start: int) -> int:
        nonlocal at
        count = start
        if start == 15:
            while True:
                count += block[at]
                at += 1
                if block[at - 1] != 255:
                    break
        return count

    while True:
        token = block[at]
        at += 1
        literals = long_count(token >> 4)
        out += block[at:at + literals]
        at += literals
        if at == len(block):
            return bytes(out)
        offset = int.from_bytes(block[at:at + 2], "little")
        at += 2
        assert 0 < offset <= len(out)
        for _ in range(long_count(token & 15) + 4):
            out.append(out[-offset])


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """Runs the shim compressors; only the harness's own lz4.h and zlib.h can be found first."""
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.cpp").write_text(SHIM_PROGRAM)
    subprocess.run(["g++", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{build._HARNESS / 'shim'}", "-o", folder / "shim",
                    folder / "shim.cpp"], check=True)
    return lambda kind, data: subprocess.run([folder / "shim", kind], input=data, stdout=subprocess.PIPE, check=True).stdout


SAMPLES = [b"", b"a", bytes(12), bytes(13), bytes(100_000), bytes(range(256)) * 300, random.Random(1).randbytes(70_000),
           b"".join(b"signal_%d scope " % (number % 97) for number in range(9000)), b"abcabcabcabcabcabcabcabc" * 11]


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_shims_write_what_everybody_reads(shim, number):
    data = SAMPLES[number]
    assert lz4_decode(shim("l", data)) == data
    assert zlib.decompress(shim("z", data)) == data


def test_lz4_shim_compresses(shim):
    assert len(shim("l", SAMPLES[7])) < len(SAMPLES[7]) / 3


def test_wave_writer_needs_no_system_header_but_those_of_cpp():
    verilator = toolchain.find_verilator()
    flags = build._include_flags(verilator, trace=True)
    source = verilator.include / "verilated_fst_c.cpp"
    rule = subprocess.run(["g++", *flags, "-M", source], capture_output=True, text=True, check=True).stdout
    used = [path for path in rule.split() if path.endswith(("/zlib.h", "/lz4.h"))]
    assert used and all(path.startswith(str(build._HARNESS / "shim")) for path in used)
    assert "zconf.h" not in rule


VERILOG = """
module other(x);
  input x;
endmodule

module rnic(clk, rst, m_axi_wdata, probe, net_tx_tdata);
  reg \\$1 ;
  input clk;
  wire clk;
  input rst;
  input [63:0] net_tx_tdata;
  output [63:0] m_axi_wdata;
  output [149:0] probe;
endmodule
"""


def test_shell_registers_every_input():
    ports = find_ports(VERILOG)
    assert [(p.name, p.is_input, p.bits) for p in ports] == [
        ("clk", True, 1), ("rst", True, 1), ("net_tx_tdata", True, 64), ("m_axi_wdata", False, 64), ("probe", False, 150)]
    shell = make_shell(ports, Manifest(data_width=64, probe_slots=2, probe_width=75))
    assert "net_tx_tdata_q <= net_tx_tdata;" in shell and ".net_tx_tdata(net_tx_tdata_q)" in shell
    assert "clk_q" not in shell and "reg rst_q = 1'b1;" in shell
    assert "assign probe_valid[1] = probe[75];" in shell


@pytest.mark.parametrize(("facts", "message"), [
    ({"data_width": 128}, "port net_tx_tdata has 64 bits|port m_axi_wdata has 64 bits"),
    ({"data_width": 64}, "port probe has 150 bits, the manifest says 0 slots of 0"),
    ({}, "no data_width"),
])
def test_manifest_that_does_not_fit_is_refused(facts, message):
    with pytest.raises(ManifestError, match=message):
        check_ports(find_ports(VERILOG), Manifest.of(facts))
    with pytest.raises(ManifestError, match="no module rnic"):
        find_ports("module nic(); endmodule")


def test_missing_tool_names_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for tool in ("g++", "make", "perl"):
        with pytest.raises(MissingTool, match=rf"^{tool.replace('+', '[+]')} is not on PATH: apt-get install \S+$") as caught:
            need_tool(tool)
        assert "\n" not in str(caught.value)


def test_verilator_is_found_without_a_path(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    toolchain.find_verilator.cache_clear()
    found = toolchain.find_verilator()
    toolchain.find_verilator.cache_clear()
    assert found.bundled_fst and toolchain._numbers(found.version) >= (5, 36)


def test_broken_verilog_is_a_build_error(monkeypatch, tmp_path):
    monkeypatch.setenv("RNIC_BUILD_DIR", str(tmp_path))
    broken = VERILOG.replace("output [149:0] probe;", "output [149:0] probe; assign probe = nothing_here;")
    with pytest.raises(build.BuildError, match="(?s)verilator failed.*nothing_here"):
        build.build_model(broken, {"data_width": 64, "probe_slots": 2, "probe_width": 75})
    assert [path.suffix for path in (tmp_path / "sim").iterdir()] == [".lock"]


def test_pages_are_scattered_apart_and_repeatable():
    first, again, other = PageAllocator(4), PageAllocator(4), PageAllocator(5)
    pages = [first.take(4096, 4096) for _ in range(300)]
    assert pages == [again.take(4096, 4096) for _ in range(300)] and pages[0] != other.take(4096, 4096)
    assert len(set(pages)) == 300 and all(page % 4096 == 0 and page for page in pages)
    assert sum(page >> 32 != 0 for page in pages) > 290
    assert not any(page + 4096 in set(pages) for page in pages)
    large = first.take(1 << 30, 1 << 30)
    assert large % (1 << 30) == 0 and not any(large <= page < large + (1 << 30) for page in pages)
    first.release(pages[0])
    with pytest.raises(KeyError):
        first.release(pages[0])
    with pytest.raises(ValueError, match="cannot allocate"):
        first.take(4096, 3000)


def test_ranges_never_overlap():
    allocator = PageAllocator(1)
    taken = [(allocator.take(1 << 40, 4096), 1 << 40) for _ in range(12)]  # large parts of the whole space
    for base, length in taken:
        assert sum(base < b + n and b < base + length for b, n in taken) == 1


def test_pcap_has_nanoseconds_and_both_directions(tmp_path):
    frames = [Frame(1, Port.NET_TX, 500_000_010, 500_000_012, b"late" * 20), Frame(0, Port.NET_TX, 7, 9, b"early" * 15),
              Frame(1, Port.NET_RX, 9, 11, b"early" * 15), Frame(0, Port.ETH_RX, 1, 2, b"host")]
    path = tmp_path / "run.pcap"
    assert write_pcap(path, frames, 250_000_000) == 2
    raw = path.read_bytes()
    assert struct.unpack_from("<IHH", raw) == (0xA1B23C4D, 2, 4) and struct.unpack_from("<I", raw, 20) == (1,)
    assert struct.unpack_from("<IIII", raw, 24) == (0, 28, 75, 75)
    assert struct.unpack_from("<IIII", raw, 24 + 16 + 75) == (2, 40, 80, 80)
    scapy = pytest.importorskip("scapy.utils")
    packets = list(scapy.RawPcapReader(str(path)))
    assert [data for data, _ in packets] == [b"early" * 15, b"late" * 20]


class Colour(enum.Enum):
    RED = 1
    BLUE = 18


def test_gtkwave_file_names_the_values(tmp_path):
    path = write_gtkw(tmp_path / "view.gtkw", tmp_path / "run.fst", [
        Trace("a.rnic_shell.nic.colour", 5, Colour, "nic a"), Trace("a.rnic_shell.nic.state", 2, {0: "IDLE", 1: "GO"}, "nic a"),
        Trace(signal_path(0, "valid"))])
    text = path.read_text()
    assert (tmp_path / "view.Colour_5.flt").read_text() == "01 RED\n12 BLUE\n"
    assert (tmp_path / "view.a_rnic_shell_nic_state.flt").read_text() == "0 IDLE\n1 GO\n"
    assert "a.rnic_shell.nic.colour[4:0]" in text and "\na.rnic_shell.nic.valid\n" in text
    assert "view.Colour_5.flt" in text and "-nic a" in text
    assert '[dumpfile] "run.fst"' in text and str(tmp_path) not in text  # the directory may be moved
