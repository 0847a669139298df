// The world: NICs in lock step, their hosts, the wires between them, the monitors.
//
// One rising edge is one cycle. In cycle c every input of a NIC holds what the harness decided from the outputs of
// cycle c - 1 or earlier (the shell around the NIC registers them at the edge), so no path runs through the harness
// inside a cycle. A ready of the harness never depends on the valid it answers.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "axi_host.h"
#include "axis.h"
#include "csr_master.h"
#include "link.h"
#include "monitor.h"

enum StopReason : uint32_t {  // numbers are part of the C ABI: rnic_sim.native.Stop repeats them
    STOP_FAILURE = 1, STOP_IRQ = 2, STOP_CSR = 4, STOP_FRAME = 8, STOP_WATCH = 16,
};

struct NicEnd {
    std::unique_ptr<NicModel> model;
    Pin clk, rst, irq, probe, probe_valid;
    AxiHost axi;
    CsrMaster csr;
    StreamSink net_tx, eth_rx;
    StreamSource net_rx, eth_tx;
    FrameRecorder net_tx_log, net_rx_log, eth_tx_log, eth_rx_log;
    LinkDirection wire;             // what this NIC sends
    int peer = -1;                  // the NIC at the far end; negative: only Python
    std::deque<Beat> net_inject, eth_inject;
    bool link_frame_open = false, inject_frame_open = false;
    std::vector<uint8_t> irq_level;

    NicEnd(NicModel* m, uint32_t index, uint32_t beat_bytes, Monitor& monitor, Failure& failure, uint64_t seed);
};

class World {
public:
    Monitor monitor;
    Failure failure;
    std::vector<std::unique_ptr<NicEnd>> nics;
    std::string log;       // text the model printed
    uint64_t cycle = 0;

    World(uint32_t nics, uint64_t seed);
    ~World();
    uint64_t step(uint64_t cycles, uint32_t stop_mask, uint32_t* reason);
    void reset(uint32_t cycles);
    void trace_open(const char* path);
    void trace_close();
    void printed(const char* text);
    void stopped(const std::string& text);

private:
    void sample(NicEnd& nic, uint32_t index);
    void sample_probes(NicEnd& nic, uint32_t index);
    void drive(NicEnd& nic);
    void edge();
    void clear(NicEnd& nic);

    std::unique_ptr<VerilatedContext> m_context;
    std::unique_ptr<VerilatedFstC> m_trace;
    uint32_t m_beat_bytes, m_reason = 0;
    uint64_t m_period_ps;
};
