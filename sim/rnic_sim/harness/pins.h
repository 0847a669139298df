// The pins of one Verilated NIC, seen without its widths: the harness is compiled once for all models.
#pragma once
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

constexpr int MAX_BEAT_BYTES = 64;

struct Pin {  // little-endian storage of `bits` bits, null when the model has no such port
    uint8_t* p = nullptr;
    uint32_t bits = 0;
    explicit operator bool() const { return p != nullptr; }
    uint64_t get() const {
        switch ((bits + 7) / 8) {
        case 0: return 0;
        case 1: return *p;
        case 2: { uint16_t v; memcpy(&v, p, 2); return v; }
        case 3: case 4: { uint32_t v; memcpy(&v, p, 4); return v; }
        default: { uint64_t v; memcpy(&v, p, 8); return v; }
        }
    }
    void set(uint64_t v) const {
        if (bits < 64) v &= (uint64_t(1) << bits) - 1;
        switch ((bits + 7) / 8) {
        case 0: return;
        case 1: *p = static_cast<uint8_t>(v); return;
        case 2: memcpy(p, &v, 2); return;
        case 3: case 4: memcpy(p, &v, 4); return;
        default: memcpy(p, &v, 8); return;
        }
    }
};

struct AxisPins { Pin tdata, tkeep, tlast, tuser, tvalid, tready; };

struct AxiPins {
    Pin awid, awaddr, awlen, awsize, awburst, awvalid, awready, wdata, wstrb, wlast, wvalid, wready;
    Pin bid, bresp, bvalid, bready, arid, araddr, arlen, arsize, arburst, arvalid, arready;
    Pin rid, rdata, rresp, rlast, rvalid, rready;
};

struct AxilPins {
    Pin awaddr, awvalid, awready, wdata, wstrb, wvalid, wready, bresp, bvalid, bready;
    Pin araddr, arvalid, arready, rdata, rresp, rvalid, rready;
};

class VerilatedContext;
class VerilatedFstC;

// One NIC: the Verilated class behind an interface. `glue.cpp`, generated per model, implements it.
class NicModel {
public:
    virtual ~NicModel() = default;
    virtual void eval() = 0;
    virtual void trace(VerilatedFstC* file) = 0;
    virtual void finish() = 0;
    virtual Pin pin(const char* name) = 0;  // null Pin when there is no such port
    Pin need(const std::string& name) {
        Pin found = pin(name.c_str());
        if (!found) throw std::runtime_error("the model has no port " + name);
        return found;
    }
    AxisPins axis(const std::string& prefix) {
        AxisPins s;
        s.tvalid = pin((prefix + "_tvalid").c_str());
        if (!s.tvalid) return s;
        s.tdata = need(prefix + "_tdata");
        s.tkeep = need(prefix + "_tkeep");
        s.tlast = need(prefix + "_tlast");
        s.tuser = pin((prefix + "_tuser").c_str());
        s.tready = need(prefix + "_tready");
        return s;
    }
};

struct ModelInfo { uint32_t data_width, probe_slots, probe_width, clock_hz; };

// Implemented by glue.cpp.
NicModel* make_nic_model(VerilatedContext* context, const char* name);
const ModelInfo& model_info();
