// What the harness writes down: port events, probe records, frames. Fetched in bulk by Python.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

enum EventKind : uint16_t {  // numbers are part of the C ABI: rnic_sim.native.EventKind repeats them
    EV_AR = 1, EV_R_FIRST = 2, EV_R_LAST = 3, EV_AW = 4, EV_W_FIRST = 5, EV_W_LAST = 6, EV_B = 7,
    EV_NET_TX_FIRST = 8, EV_NET_TX_LAST = 9, EV_NET_RX_FIRST = 10, EV_NET_RX_LAST = 11,
    EV_CSR_WRITE = 12, EV_CSR_READ = 13, EV_IRQ_RISE = 14, EV_IRQ_FALL = 15,
    EV_ETH_TX_FIRST = 16, EV_ETH_TX_LAST = 17, EV_ETH_RX_FIRST = 18, EV_ETH_RX_LAST = 19, EV_DMA_FAULT = 20,
};

struct PortEvent {  // 32 bytes, fixed layout
    uint64_t cycle;
    uint16_t kind;
    uint16_t nic;
    uint32_t id;      // AXI id, frame number, interrupt index
    uint64_t address; // AXI or CSR address; byte count for *_LAST of a frame
    uint64_t aux;     // beats of a burst, response code, CSR datum
};

enum FramePort : uint32_t { PORT_NET_TX = 0, PORT_NET_RX = 1, PORT_ETH_TX = 2, PORT_ETH_RX = 3 };

struct FrameHeader {  // 32 bytes, followed by the frame, padded to 8
    uint64_t first, last;
    uint32_t nic, port, length, user;
};

struct ProbeHeader {  // 16 bytes, followed by the record, padded to 8
    uint64_t cycle;
    uint32_t nic, slot;
};

class Monitor {
public:
    bool events_on = false, probes_on = true;
    uint32_t frame_ports = 1u << PORT_NET_TX | 1u << PORT_ETH_RX;
    std::vector<PortEvent> events;
    std::vector<uint8_t> probes, frames;
    uint64_t frame_count = 0;

    void event(uint64_t cycle, EventKind kind, uint32_t nic, uint32_t id, uint64_t address, uint64_t aux) {
        if (events_on) events.push_back({cycle, static_cast<uint16_t>(kind), static_cast<uint16_t>(nic), id, address, aux});
    }
    void frame(const FrameHeader& header, const uint8_t* bytes) {
        append(frames, &header, sizeof header);
        append(frames, bytes, header.length);
        frames.resize((frames.size() + 7) & ~size_t(7));
        frame_count++;
    }
    static void append(std::vector<uint8_t>& to, const void* from, size_t count) {
        const uint8_t* p = static_cast<const uint8_t*>(from);
        to.insert(to.end(), p, p + count);
    }
};

// The first thing that went wrong. The world stops for good.
struct Failure {
    enum Kind : uint32_t { NONE = 0, PROTOCOL = 1, ASSERTION = 2, FATAL = 3 };
    Kind kind = NONE;
    std::string text;
    void raise(Kind k, const std::string& t) {
        if (kind == NONE) { kind = k; text = t; }
    }
};
