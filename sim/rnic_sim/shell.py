"""The SystemVerilog shell around the NIC and the C++ glue behind its pins, generated from the ports of module ``rnic``.

The shell registers every input at the rising edge: what the harness decided in one cycle reaches the NIC in the next,
in the same instant as the NIC's own registers change. So nothing combinational in the NIC, an assertion least of all,
ever sees the new state beside old inputs, and one evaluation a cycle is enough.
"""

import re
from dataclasses import dataclass

from .enum_names import EnumTypes

__all__ = ["SHELL", "TOP", "Manifest", "ManifestError", "Port", "check_ports", "find_ports", "make_glue", "make_shell"]

TOP = "rnic"
SHELL = "rnic_shell"


class ManifestError(ValueError):
    """The manifest and the ports of the Verilog disagree, or one of them lacks something the harness needs."""


@dataclass(frozen=True)
class Port:
    """A port of the top module: its name, ``True`` for an input, its width in bits."""

    name: str
    is_input: bool
    bits: int


@dataclass(frozen=True)
class Manifest:
    """What the harness must know and cannot see in the ports.

    ``data_width`` bits of a beat; ``probe_slots`` records of ``probe_width`` bits in port ``probe``, bit 0 of each is its
    valid (0 when the model has no probe); ``clock_hz`` gives the cycle its length in waves and captures. Other keys of
    the manifest file are kept and ignored here.
    """

    data_width: int
    probe_slots: int = 0
    probe_width: int = 0
    clock_hz: int = 250_000_000

    @classmethod
    def of(cls, manifest: dict) -> "Manifest":
        if "data_width" not in manifest:
            raise ManifestError("the manifest has no data_width")
        known = {key: int(manifest[key]) for key in cls.__dataclass_fields__ if key in manifest}
        return cls(**known)


def find_ports(verilog: str) -> list[Port]:
    """The ports of module ``rnic`` in Verilog as Yosys writes it. Raises ManifestError when there is no such module."""
    module = re.search(rf"^module {TOP}\s*\((.*?)\);(.*?)^endmodule", verilog, re.M | re.S)
    if module is None:
        raise ManifestError(f"the Verilog has no module {TOP}")
    ports = []
    for direction, high, name in re.findall(r"^\s*(input|output) (?:\[(\d+):0\] )?(\w+) *;", module[2], re.M):
        ports.append(Port(name, direction == "input", int(high or 0) + 1))
    return ports


def check_ports(ports: list[Port], manifest: Manifest) -> None:
    """Raises ManifestError where a width in the ports is not the one of the manifest."""
    bits = {port.name: port.bits for port in ports}
    width = manifest.data_width
    wanted = {"m_axi_wdata": width, "m_axi_rdata": width, "m_axi_wstrb": width // 8}
    for stream in ("net_tx", "net_rx", "eth_tx", "eth_rx"):
        wanted |= {f"{stream}_tdata": width, f"{stream}_tkeep": width // 8}
    for name, expected in wanted.items():
        if name in bits and bits[name] != expected:
            raise ManifestError(f"port {name} has {bits[name]} bits, data_width {width} asks for {expected}")
    probe = manifest.probe_slots * manifest.probe_width
    if bits.get("probe", 0) != probe:
        raise ManifestError(f"port probe has {bits.get('probe', 0)} bits, the manifest says {manifest.probe_slots} slots of "
                            f"{manifest.probe_width}")


def _range(bits: int) -> str:
    return "" if bits == 1 else f"[{bits - 1}:0] "


def _taps(manifest: Manifest, names: list[str], taps: dict, types: EnumTypes) -> list[str]:
    """One scope for each slot of the probe port, its fields by name and of enum types where numbers have names.

    ``probe_event`` is NONE but in the cycle of an event; the other fields mean something in that cycle.
    """
    lines = ["    generate if (1) begin : probes"]
    event_low, event_bits = taps["fields"]["event"]
    event_type = types.of("ProbeEvent", event_bits, _numbers(taps["events"]))
    for slot, name in enumerate(names):
        base = slot * manifest.probe_width
        lines.append(f"        if (1) begin : {name}")

        def part(low: int, bits: int, base: int = base) -> str:
            return f"probe[{base + low}]" if bits == 1 else f"probe[{base + low + bits - 1}:{base + low}]"

        lines.append(f"            wire {event_type} probe_event = {event_type}'(probe[{base}] ? {part(event_low, event_bits)} : "
                     f"{event_bits}'d0);")  # fmt: skip
        for field, (low, bits) in taps["fields"].items():
            if field not in ("valid", "event", "opcode"):
                lines.append(f"            wire {_range(bits)}{field} = {part(low, bits)};")
        low, bits = taps["fields"]["opcode"]
        for shown, table in taps["opcodes"].get(name, {"opcode": None}).items():
            kind = None if table is None else types.of(table["name"], bits, _numbers(table["values"]))
            lines.append(f"            wire {kind} {shown} = {kind}'({part(low, bits)});" if kind
                         else f"            wire {_range(bits)}{shown} = {part(low, bits)};")  # fmt: skip
        lines.append("        end")
    return [*lines, "    end endgenerate"]


def _numbers(table: dict) -> dict[int, str]:
    return {int(value): name for value, name in table.items()}  # JSON has no numbers as keys


def make_shell(ports: list[Port], manifest: Manifest, probe_names: list[str] | None = None, taps: dict | None = None) -> str:
    """SystemVerilog of the shell module. With ``taps`` (`rnic_sim.names.probe_taps`) the slots of the probe port, called
    ``probe_names``, stand in the waves field by field."""
    types = EnumTypes("shell")
    inputs = [port for port in ports if port.is_input and port.name != "clk"]
    outputs = [port for port in ports if not port.is_input]
    has_probe = any(port.name == "probe" for port in outputs)
    lines = ["/* verilator tracing_off */", f"module {SHELL}("]
    declared = ["input clk"]
    declared += [f"input {_range(p.bits)}{p.name}" for p in inputs] + [f"output {_range(p.bits)}{p.name}" for p in outputs]
    if has_probe:
        declared.append(f"output {_range(manifest.probe_slots)}probe_valid")
    lines += ["    " + ",\n    ".join(declared), ");"]
    for port in inputs:
        initial = " = 1'b1" if port.name == "rst" else ""
        lines.append(f"    reg {_range(port.bits)}{port.name}_q{initial};")
    lines.append("    always @(posedge clk) begin")
    lines += [f"        {port.name}_q <= {port.name};" for port in inputs]
    lines.append("    end")
    if has_probe:
        lines += [f"    assign probe_valid[{slot}] = probe[{slot * manifest.probe_width}];"
                  if manifest.probe_slots > 1 else "    assign probe_valid = probe[0];"
                  for slot in range(manifest.probe_slots)]
    lines.append("    /* verilator tracing_on */")
    if has_probe and probe_names and taps:
        lines += _taps(manifest, probe_names, taps, types)
    lines.append(f"    {TOP} nic(")
    connections = [".clk(clk)"] + [f".{p.name}({p.name}_q)" for p in inputs] + [f".{p.name}({p.name})" for p in outputs]
    lines += ["        " + ",\n        ".join(connections), "    );", "endmodule", ""]
    return types.packages() + "\n".join(lines)


def _member(name: str) -> str:
    return name.replace("__", "___05F")  # how Verilator writes a double underscore


def make_glue(ports: list[Port], manifest: Manifest) -> str:
    """C++ that puts the Verilated class behind the harness's NicModel."""
    pins = list(ports)
    if any(port.name == "probe" for port in pins):
        pins.append(Port("probe_valid", False, manifest.probe_slots))
    table = "\n".join(f'        {{"{p.name}", {p.bits}, PIN({_member(p.name)})}},' for p in pins)
    return f"""// Generated by rnic_sim.shell. One NIC of this model, behind the interface the harness knows.
#include "Vrnic.h"
#include "pins.h"
#include "verilated.h"
#if VM_TRACE
#include "verilated_fst_c.h"
#endif

namespace {{
struct PinEntry {{
    const char* name;
    uint32_t bits;
    uint8_t* (*storage)(Vrnic&);
}};
#define PIN(member) [](Vrnic& m) {{ return reinterpret_cast<uint8_t*>(&m.member); }}
const PinEntry PINS[] = {{
{table}
}};

class Glue final : public NicModel {{
public:
    Glue(VerilatedContext* context, const char* name) : m_model(context, name) {{}}
    void eval() override {{ m_model.eval(); }}
    void finish() override {{ m_model.final(); }}
    void trace(VerilatedFstC* file) override {{
#if VM_TRACE
        m_model.trace(file, 99);
#else
        (void)file;
        throw std::runtime_error("this model was built without waves");
#endif
    }}
    Pin pin(const char* name) override {{
        for (const PinEntry& entry : PINS)
            if (!strcmp(entry.name, name)) return {{entry.storage(m_model), entry.bits}};
        return {{}};
    }}

private:
    Vrnic m_model;
}};
}}  // namespace

NicModel* make_nic_model(VerilatedContext* context, const char* name) {{ return new Glue(context, name); }}
const ModelInfo& model_info() {{
    static const ModelInfo info{{{manifest.data_width}, {manifest.probe_slots}, {manifest.probe_width}, {manifest.clock_hz}}};
    return info;
}}
"""
