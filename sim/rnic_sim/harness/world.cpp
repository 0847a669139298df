#include "world.h"

#include <cstdarg>
#include <cstdio>

#include "verilated.h"
#include "verilated_fst_c.h"

namespace {
thread_local World* g_world = nullptr;  // the world whose model is being evaluated
constexpr size_t LOG_LIMIT = 1 << 20;

std::string nic_name(uint32_t index) { return std::string(1, static_cast<char>('a' + index)); }
std::string where(uint32_t index, const char* port) { return "nic " + nic_name(index) + ", port " + port; }
}  // namespace

// --- What the Verilated runtime calls: text of $write and $error, and $stop after a failed assertion.

int rnic_vl_printf(const char* format, ...) {
    va_list args;
    va_start(args, format);
    char text[8192];
    const int count = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (g_world) g_world->printed(text);
    else fputs(text, stderr);
    return count;
}
void vl_stop(const char* file, int line, const char* hier) VL_MT_UNSAFE {
    (void)file, (void)line;
    if (g_world) g_world->stopped(hier && *hier ? hier : "");
}
void vl_fatal(const char* file, int line, const char*, const char* message) VL_MT_UNSAFE {
    throw std::runtime_error(std::string(message) + " (" + file + ":" + std::to_string(line) + ")");
}

NicEnd::NicEnd(NicModel* m, uint32_t index, uint32_t beat_bytes, Monitor& monitor, Failure& failure, uint64_t seed)
    : model(m), clk(m->need("clk")), rst(m->need("rst")), irq(m->pin("irq")), probe(m->pin("probe")),
      probe_valid(m->pin("probe_valid")),
      axi(*m, index, beat_bytes, monitor, failure, seed * 3 + 1), csr(*m, index, monitor, failure),
      net_tx(m->axis("net_tx"), where(index, "net_tx"), beat_bytes, failure),
      eth_rx(m->axis("eth_rx"), where(index, "eth_rx"), beat_bytes, failure),
      net_rx(m->axis("net_rx"), beat_bytes), eth_tx(m->axis("eth_tx"), beat_bytes),
      net_tx_log(index, PORT_NET_TX, monitor, EV_NET_TX_FIRST, EV_NET_TX_LAST),
      net_rx_log(index, PORT_NET_RX, monitor, EV_NET_RX_FIRST, EV_NET_RX_LAST),
      eth_tx_log(index, PORT_ETH_TX, monitor, EV_ETH_TX_FIRST, EV_ETH_TX_LAST),
      eth_rx_log(index, PORT_ETH_RX, monitor, EV_ETH_RX_FIRST, EV_ETH_RX_LAST),
      wire(beat_bytes, seed * 3 + 2), irq_level(irq.bits) {}

World::World(uint32_t count, uint64_t seed)
    : m_context(new VerilatedContext), m_beat_bytes(model_info().data_width / 8),
      m_period_ps((1000000000000ull + model_info().clock_hz / 2) / model_info().clock_hz) {
    m_context->traceEverOn(true);
    m_context->randSeed(1);
    m_context->timeunit(-12);
    m_context->timeprecision(-12);
    Rng seeds(seed);
    g_world = this;
    for (uint32_t i = 0; i < count; i++) {
        NicModel* model = make_nic_model(m_context.get(), nic_name(i).c_str());
        nics.emplace_back(new NicEnd(model, i, m_beat_bytes, monitor, failure, seeds.next()));
    }
    for (uint32_t i = 0; i + 1 < count; i += 2) {
        nics[i]->peer = static_cast<int>(i + 1);
        nics[i + 1]->peer = static_cast<int>(i);
    }
    for (auto& nic : nics) {
        clear(*nic);
        nic->clk.set(0);
        nic->rst.set(1);
        nic->model->eval();
    }
    g_world = nullptr;
}

World::~World() {
    trace_close();
    g_world = this;
    for (auto& nic : nics) nic->model->finish();
    nics.clear();  // before the context they live in
    g_world = nullptr;
}

void World::printed(const char* text) {
    if (log.size() > LOG_LIMIT) log.erase(0, log.size() - LOG_LIMIT / 2);
    // The text of a failed assertion comes by itself, without a newline, before what the run time says about it.
    if (strstr(text, "%Error: ") && !log.empty() && log.back() != '\n') log += '\n';
    log += text;
}

void World::stopped(const std::string& hier) {
    std::string text = log.size() > 1000 ? log.substr(log.size() - 1000) : log;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    failure.raise(Failure::ASSERTION, "cycle " + std::to_string(cycle) + (hier.empty() ? "" : ", in " + hier) + ": "
                                          + (text.empty() ? "$stop" : text));
}

void World::clear(NicEnd& nic) {
    nic.axi.reset();
    nic.csr.reset();
    if (nic.net_tx.present()) nic.net_tx.reset();
    if (nic.eth_rx.present()) nic.eth_rx.reset();
    if (nic.net_rx.present()) nic.net_rx.reset();
    if (nic.eth_tx.present()) nic.eth_tx.reset();
    nic.net_tx_log.reset();
    nic.net_rx_log.reset();
    nic.eth_tx_log.reset();
    nic.eth_rx_log.reset();
    nic.wire.reset();
    nic.net_inject.clear();
    nic.eth_inject.clear();
    nic.link_frame_open = nic.inject_frame_open = false;
    std::fill(nic.irq_level.begin(), nic.irq_level.end(), 0);
}

void World::reset(uint32_t cycles) {
    if (failure.kind) return;
    for (auto& nic : nics) {
        clear(*nic);
        nic->rst.set(1);
    }
    for (uint32_t i = 0; i < cycles && !failure.kind; i++) edge();
    for (auto& nic : nics) nic->rst.set(0);
    if (!failure.kind) edge();
}

void World::sample_probes(NicEnd& nic, uint32_t index) {
    const uint32_t slots = model_info().probe_slots, width = model_info().probe_width;
    const uint32_t record = (width + 63) / 64 * 8;
    for (uint32_t word = 0; word < (slots + 31) / 32; word++) {
        uint32_t valid = 0;
        memcpy(&valid, nic.probe_valid.p + size_t(word) * 4, std::min<size_t>(4, (slots + 7) / 8 - size_t(word) * 4));
        for (; valid; valid &= valid - 1) {
            const uint32_t slot = word * 32 + static_cast<uint32_t>(__builtin_ctz(valid));
            const ProbeHeader header{cycle, index, slot};
            Monitor::append(monitor.probes, &header, sizeof header);
            const size_t at = monitor.probes.size();
            monitor.probes.resize(at + record);
            uint8_t* out = &monitor.probes[at];
            const uint64_t first = uint64_t(slot) * width;
            const uint32_t shift = first % 8;
            const uint8_t* from = nic.probe.p + first / 8;
            const uint8_t* end = nic.probe.p + (nic.probe.bits + 7) / 8;
            for (uint32_t i = 0; i < (width + 7) / 8; i++) {
                const uint32_t low = from[i], high = shift && from + i + 1 < end ? from[i + 1] : 0;
                out[i] = static_cast<uint8_t>(low >> shift | high << (8 - shift));
            }
            if (width % 8) out[(width - 1) / 8] &= static_cast<uint8_t>((1u << width % 8) - 1);
        }
    }
}

void World::sample(NicEnd& nic, uint32_t index) {
    nic.axi.sample(cycle);
    if (nic.axi.watch_hit) m_reason |= STOP_WATCH;
    nic.csr.sample(cycle);
    if (nic.csr.completed) {
        nic.csr.completed = false;
        m_reason |= STOP_CSR;
    }
    Beat beat;
    const uint64_t frames = monitor.frame_count;
    if (nic.net_tx.present() && nic.net_tx.sample(cycle, beat)) {
        nic.net_tx_log.beat(cycle, beat);
        if (nic.peer >= 0) nic.wire.take(cycle, beat);
    }
    if (nic.net_rx.present() && nic.net_rx.sample(beat)) nic.net_rx_log.beat(cycle, beat);
    if (nic.eth_rx.present() && nic.eth_rx.sample(cycle, beat)) nic.eth_rx_log.beat(cycle, beat);
    if (nic.eth_tx.present() && nic.eth_tx.sample(beat)) nic.eth_tx_log.beat(cycle, beat);
    if (monitor.frame_count != frames) m_reason |= STOP_FRAME;
    for (uint32_t i = 0; i < nic.irq.bits; i++) {
        const uint8_t level = nic.irq.p[i / 8] >> i % 8 & 1;
        if (level == nic.irq_level[i]) continue;
        nic.irq_level[i] = level;
        monitor.event(cycle, level ? EV_IRQ_RISE : EV_IRQ_FALL, index, i, 0, 0);
        if (level) m_reason |= STOP_IRQ;
    }
    if (monitor.probes_on && nic.probe_valid) sample_probes(nic, index);
}

void World::drive(NicEnd& nic) {
    const uint64_t next = cycle + 1;
    nic.axi.drive(next);
    nic.csr.drive();
    if (nic.net_tx.present()) {
        nic.wire.expire(cycle);
        nic.net_tx.drive(nic.peer >= 0 ? nic.wire.ready_next() : true);
    }
    if (nic.eth_rx.present()) nic.eth_rx.drive(true);
    if (nic.net_rx.present()) {
        if (nic.net_rx.empty()) {
            Beat beat;
            if (!nic.link_frame_open && !nic.net_inject.empty()) {  // between frames of the wire, Python's go first
                beat = nic.net_inject.front();
                nic.net_inject.pop_front();
                nic.inject_frame_open = !beat.last;
                nic.net_rx.load(beat);
            } else if (nic.peer >= 0 && !nic.inject_frame_open && nics[nic.peer]->wire.offer(next, beat)) {
                nic.link_frame_open = !beat.last;
                nic.net_rx.load(beat);
            }
        }
        nic.net_rx.drive();
    }
    if (nic.eth_tx.present()) {
        if (nic.eth_tx.empty() && !nic.eth_inject.empty()) {
            nic.eth_tx.load(nic.eth_inject.front());
            nic.eth_inject.pop_front();
        }
        nic.eth_tx.drive();
    }
}

void World::edge() {
    g_world = this;
    try {
        cycle++;
        m_context->time(cycle * m_period_ps);
        for (auto& nic : nics) {
            nic->clk.set(1);
            nic->model->eval();
        }
        if (m_trace) m_trace->dump(cycle * m_period_ps);
        for (auto& nic : nics) {
            nic->clk.set(0);
            nic->model->eval();
        }
        if (m_trace) m_trace->dump(cycle * m_period_ps + m_period_ps / 2);
    } catch (const std::exception& error) {
        failure.raise(Failure::FATAL, "cycle " + std::to_string(cycle) + ": " + error.what());
    }
    g_world = nullptr;
}

uint64_t World::step(uint64_t cycles, uint32_t stop_mask, uint32_t* reason) {
    uint64_t done = 0;
    m_reason = 0;
    for (auto& nic : nics) nic->axi.watch_hit = false;
    stop_mask |= STOP_FAILURE;
    while (done < cycles && !failure.kind && !(m_reason & stop_mask)) {
        for (uint32_t i = 0; i < nics.size(); i++) sample(*nics[i], i);
        for (auto& nic : nics) drive(*nic);
        if (failure.kind) break;
        edge();
        done++;
    }
    if (failure.kind) {
        m_reason |= STOP_FAILURE;
        if (m_trace) m_trace->flush();
    }
    *reason = m_reason;
    return done;
}

void World::trace_open(const char* path) {
    trace_close();
    m_trace.reset(new VerilatedFstC);
    for (auto& nic : nics) nic->model->trace(m_trace.get());
    m_trace->set_time_unit("1ps");
    m_trace->set_time_resolution("1ps");
    m_trace->open(path);
    if (!m_trace->isOpen()) {
        m_trace.reset();
        throw std::runtime_error(std::string("cannot write ") + path);
    }
}

void World::trace_close() {
    if (!m_trace) return;
    m_trace->close();
    m_trace.reset();
}
