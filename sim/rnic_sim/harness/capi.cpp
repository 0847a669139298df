// The C ABI that rnic_sim.native binds with ctypes. Every call is made from one thread.
#include <algorithm>

#include "verilated.h"
#include "verilated_fst_c.h"
#include "world.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {
thread_local std::string g_error;

struct Handle {
    World world;
    std::vector<PortEvent> events;        // handed out, valid until the next fetch
    std::vector<uint8_t> probes, frames;
    std::string text;
    Handle(uint32_t nics, uint64_t seed) : world(nics, seed) {}
};

template <class T>
uint64_t hand_out(std::vector<T>& from, std::vector<T>& kept, const void** data) {
    kept.clear();
    kept.swap(from);
    *data = kept.data();
    return kept.size() * sizeof(T);
}
}  // namespace

API const char* rnic_last_error() { return g_error.c_str(); }

API Handle* rnic_create(uint32_t nics, uint64_t seed) {
    try {
        return new Handle(nics, seed);
    } catch (const std::exception& error) {
        g_error = error.what();
        return nullptr;
    }
}
API void rnic_destroy(Handle* h) { delete h; }

API uint64_t rnic_step(Handle* h, uint64_t cycles, uint32_t mask, uint32_t* reason) {
    return h->world.step(cycles, mask, reason);
}
API uint64_t rnic_cycle(Handle* h) { return h->world.cycle; }
API void rnic_reset(Handle* h, uint32_t cycles) { h->world.reset(cycles); }
API uint32_t rnic_failure(Handle* h, const char** text) {
    *text = h->world.failure.text.c_str();
    return h->world.failure.kind;
}
API const char* rnic_log(Handle* h) {
    h->text.swap(h->world.log);
    h->world.log.clear();
    return h->text.c_str();
}

// Memory
API void rnic_map(Handle* h, uint32_t nic, uint64_t base, uint64_t length) {
    h->world.nics[nic]->axi.memory.map(base, length);
}
API void rnic_unmap(Handle* h, uint32_t nic, uint64_t base) { h->world.nics[nic]->axi.memory.unmap(base); }
API int rnic_peek(Handle* h, uint32_t nic, uint64_t address, uint8_t* out, uint64_t length) {
    return h->world.nics[nic]->axi.memory.read(address, out, length);
}
API int rnic_poke(Handle* h, uint32_t nic, uint64_t address, const uint8_t* in, uint64_t length) {
    return h->world.nics[nic]->axi.memory.write(address, in, length);
}
API void rnic_watch(Handle* h, uint32_t nic, uint64_t first, uint64_t end) {  // end 0: forget all
    auto& watches = h->world.nics[nic]->axi.watches;
    if (end) watches.push_back({first, end});
    else watches.clear();
}

// Host bus
API void rnic_axi_config(Handle* h, uint32_t nic, const AxiConfig* config) { h->world.nics[nic]->axi.config = *config; }
API void rnic_axi_counters(Handle* h, uint32_t nic, AxiCounters* out) { *out = h->world.nics[nic]->axi.counters; }
API void rnic_axi_error(Handle* h, uint32_t nic, const ErrorRange* range) {  // null: forget all
    auto& errors = h->world.nics[nic]->axi.errors;
    if (range) errors.push_back(*range);
    else errors.clear();
}

// Registers
API uint64_t rnic_csr(Handle* h, uint32_t nic, int write, uint32_t address, uint32_t data, int posted) {
    return h->world.nics[nic]->csr.queue(write, address, data, posted);
}
API int rnic_csr_take(Handle* h, uint32_t nic, uint64_t ticket, CsrResult* result) {
    return h->world.nics[nic]->csr.take(ticket, *result);
}
API uint64_t rnic_csr_posted_errors(Handle* h, uint32_t nic) { return h->world.nics[nic]->csr.posted_errors; }
API uint32_t rnic_idle(Handle* h, uint32_t nic) {  // bit 0: registers, 1: host bus, 2: wire out, 3: injection queues
    NicEnd& end = *h->world.nics[nic];
    return uint32_t(end.csr.idle()) | uint32_t(end.axi.idle()) << 1 | uint32_t(end.wire.idle()) << 2
         | uint32_t(end.net_inject.empty() && end.eth_inject.empty() && end.net_rx.empty() && end.eth_tx.empty()) << 3;
}

// Interrupts
API uint32_t rnic_irq_count(Handle* h) { return h->world.nics[0]->irq.bits; }
API int rnic_irq(Handle* h, uint32_t nic, uint32_t index) { return h->world.nics[nic]->irq_level[index]; }

// Frames and the wire
API void rnic_inject(Handle* h, uint32_t nic, uint32_t port, const uint8_t* bytes, uint64_t length, int user) {
    NicEnd& end = *h->world.nics[nic];
    Frame frame{std::vector<uint8_t>(bytes, bytes + length), user != 0};
    split_frame(frame, model_info().data_width / 8, port == PORT_NET_RX ? end.net_inject : end.eth_inject);
}
API void rnic_peer(Handle* h, uint32_t nic, int32_t peer) { h->world.nics[nic]->peer = peer; }
API void rnic_link_config(Handle* h, uint32_t nic, const LinkConfig* config) { h->world.nics[nic]->wire.config = *config; }
API void rnic_link_rule(Handle* h, uint32_t nic, const FaultRule* rule) {  // null: forget all
    auto& rules = h->world.nics[nic]->wire.rules;
    if (rule) rules.push_back(*rule);
    else rules.clear();
}
API void rnic_link_counters(Handle* h, uint32_t nic, uint64_t* frames_and_hits) {
    LinkDirection& wire = h->world.nics[nic]->wire;
    frames_and_hits[0] = wire.frames;
    std::copy(wire.hits, wire.hits + FAULTS, frames_and_hits + 1);
}

// Monitors
API void rnic_monitor(Handle* h, int events, int probes, uint32_t frame_ports) {
    Monitor& monitor = h->world.monitor;
    monitor.events_on = events;
    monitor.probes_on = probes;
    monitor.frame_ports = frame_ports;
}
API uint64_t rnic_events(Handle* h, const void** data) { return hand_out(h->world.monitor.events, h->events, data); }
API uint64_t rnic_probes(Handle* h, const void** data) { return hand_out(h->world.monitor.probes, h->probes, data); }
API uint64_t rnic_frames(Handle* h, const void** data) { return hand_out(h->world.monitor.frames, h->frames, data); }

// Waves
API int rnic_trace_open(Handle* h, const char* path) {
    try {
        h->world.trace_open(path);
        return 1;
    } catch (const std::exception& error) {
        g_error = error.what();
        return 0;
    }
}
API void rnic_trace_close(Handle* h) { h->world.trace_close(); }
