"""The ABI: packers against struct, the C header against the packers, offsets as documented (C116)."""

import random
import shutil
import struct
import subprocess

import pytest

from rnic import abi
from rnic.abi.export import STRUCTS, c_header, markdown
from rnic.config import CONFIGS, Params, RnicConfig


def test_send_wqe_bytes():
    raw = abi.SEND_WQE.pack(
        opcode=abi.WqeOpcode.WRITE, flags=1, num_sge=1, length=0x1234, imm=0x44332211, remote_addr=0x1122334455667788,
        rkey=0xAABBCCDD, sge0=abi.SGE.pack_int(addr=0x1000, length=0x1234, lkey=0x55),
    )  # fmt: skip
    want = struct.pack("<BBBxIIIQII QII 16x", 3, 1, 1, 0x1234, 0x44332211, 0, 0x1122334455667788, 0xAABBCCDD, 0,
                       0x1000, 0x1234, 0x55)  # fmt: skip
    assert raw == want and len(raw) == 64


def test_cqe_bytes():
    raw = abi.CQE.pack(byte_len=7, imm=9, qpn=0x010203, flags=1, src_qp=0x0A0B0C, vendor_err=3, stamp=0x1122334455, wqe_counter=5,
                       opcode=0x80, status=4, phase=1)  # fmt: skip
    assert raw == struct.pack("<II3sB3sBQHBB3xB", 7, 9, b"\3\2\1", 1, b"\x0c\x0b\x0a", 3, 0x1122334455, 5, 0x80, 4, 1)


@pytest.mark.parametrize("layout", STRUCTS, ids=lambda s: s.name)
def test_pack_unpack_and_amaranth_layout_agree(layout):
    rng = random.Random(layout.name)
    values = {f.name: rng.getrandbits(f.width) for f in layout.fields.values()}
    raw = layout.pack(**values)
    assert len(raw) == layout.size and layout.unpack(raw) == values
    assert layout.unpack_words(layout.words(**values)) == values
    const = layout.layout.from_bits(int.from_bytes(raw, "little"))
    for name, value in values.items():
        assert int(const[name]) == value


def test_values_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="SendWqe.num_sge is 256, must be 0..0xff"):
        abi.SEND_WQE.pack(num_sge=256)
    with pytest.raises(ValueError, match="no field nonsense"):
        abi.SEND_WQE.pack(nonsense=1)
    with pytest.raises(ValueError, match="overlaps"):
        abi.Struct("Bad", 4, "", [("a", 0, 9, ""), ("b", 1, 8, "")])


def test_registers_do_not_overlap():
    offsets = [r.offset for r in abi.REGISTERS]
    assert len(set(offsets)) == len(offsets) and all(o % 4 == 0 and o < abi.MAILBOX_BASE for o in offsets)
    assert abi.MAILBOX_BASE + 4 * abi.MAILBOX_WORDS <= abi.COUNTER_BASE
    assert abi.COUNTER_BASE + 4 * len(abi.COUNTERS) <= abi.DB_SQ


def test_c_header_compiles_and_gives_the_packers_offsets(tmp_path):
    """A C program packs one value into every field by the header's numbers; the bytes must equal the Python packer's."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    assert compiler, "needs a C compiler (Debian package: gcc)"
    (tmp_path / "rnic_abi.h").write_text(c_header())
    rng = random.Random(1)
    body, expect = [], []
    for s in STRUCTS:
        values = {f.name: rng.getrandbits(min(f.width, 64)) for f in s.fields.values()}
        expect.append(s.pack(**values).hex())
        macro = "RNIC_" + "".join("_" + c if c.isupper() and i else c for i, c in enumerate(s.name)).upper()
        body.append(f"  memset(buf, 0, sizeof buf); /* {s.name} */")
        for f in s.fields.values():
            name = f"{macro}_{f.name.upper()}"
            body.append(f"  put({name}_BYTE, {name}_SHIFT, {name}_WIDTH, {values[f.name]}ull);")
        body.append(f"  dump({macro}_BYTES);")
    source = """
#include <stdio.h>
#include <string.h>
#include "rnic_abi.h"
static unsigned char buf[256];
static void put(int byte, int shift, int width, unsigned long long v) {
  for (int i = 0; i < width && i < 64; i++)
    if (v >> i & 1) buf[byte + (shift + i) / 8] |= 1u << (shift + i) % 8;
}
static void dump(int n) { for (int i = 0; i < n; i++) printf("%02x", buf[i]); printf("\\n"); }
int main(void) {
""" + "\n".join(body) + "\n  return 0;\n}\n"
    (tmp_path / "t.c").write_text(source)
    language = ["-x", "c"]
    subprocess.run([compiler, *language, "-Wall", "-Werror", "-o", "t", "t.c"], cwd=tmp_path, check=True)
    got = subprocess.run([str(tmp_path / "t")], check=True, capture_output=True, text=True).stdout.split()
    assert got == expect


def test_markdown_names_every_field():
    page = markdown()
    for s in STRUCTS:
        assert f"## {s.name}\n" in page
        for f in s.fields:
            assert f"| {f} |" in page


def test_transitions_follow_the_state_machine():
    """R-QP-1: spot checks of rules.md 14, written out by hand."""
    A, S, T = abi.Attr, abi.QpState, abi.QpType
    t = abi.QP_TRANSITIONS
    assert t[T.RC, S.RESET, S.INIT].required == A.PKEY_INDEX | A.PORT | A.ACCESS
    assert t[T.RC, S.INIT, S.RTR].required == (A.AV | A.PATH_MTU | A.DEST_QPN | A.RQ_PSN | A.MAX_DEST_RD_ATOMIC
                                               | A.MIN_RNR_TIMER)  # fmt: skip
    assert t[T.UD, S.INIT, S.RTR].required == A(0)
    assert t[T.RC, S.RTR, S.RTS].required == A.SQ_PSN | A.TIMEOUT | A.RETRY_CNT | A.RNR_RETRY | A.MAX_RD_ATOMIC
    assert (T.RC, S.RESET, S.ERR) not in t and (T.RC, S.RESET, S.RTR) not in t and (T.RC, S.RTS, S.RTR) not in t
    assert (T.RC, S.SQE, S.RTS) not in t and (T.UD, S.SQE, S.RTS) in t
    assert all((typ, state, S.RESET) in t for typ in T for state in S)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("data_width", 96, "data_width is 96, must be a power of two 64..512"),
        ("num_qps", 1, "num_qps is 1, must be an integer 2..16384"),
        ("rx_cells", 8, "rx_cells is 8"),
        ("desc_depth", 1, "desc_depth is 1"),
        ("read_buffer_bytes", 4096, "read_buffer_bytes is 4096"),
        ("max_sge", "four", "max_sge is 'four'"),
    ],
)
def test_wrong_config_names_field_and_limits(field, value, text):
    with pytest.raises(ValueError, match=text):
        Params(RnicConfig(**{field: value}))


@pytest.mark.parametrize("name", CONFIGS)
def test_named_configs_are_consistent(name):
    p = Params(CONFIGS[name])
    assert p.rx_cells * 256 >= 2 * 4096 and p.read_buffer_beats * p.lanes >= 2 * 4096
    assert p.tpt_entries == p.num_mrs + 2 * p.num_qps + p.num_cqs + p.num_eqs
