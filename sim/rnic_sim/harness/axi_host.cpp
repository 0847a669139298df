#include "axi_host.h"

#include <algorithm>
#include <cstdio>

namespace {
constexpr uint32_t DECERR = 3;
constexpr uint64_t ONE_BEAT = 65536;
constexpr size_t EARLY_BEATS = 256;  // W beats taken before their AW

std::string hex(uint64_t value) {
    char text[24];
    snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}
}  // namespace

AxiHost::AxiHost(NicModel& model, uint32_t nic, uint32_t beat_bytes, Monitor& monitor, Failure& failure, uint64_t seed)
    : m_nic(nic), m_beat_bytes(beat_bytes), m_size(0), m_monitor(monitor), m_failure(failure), m_rng(seed) {
    while ((1u << m_size) < beat_bytes) m_size++;
#define BIND(name) m_pins.name = model.need("m_axi_" #name)
    BIND(awid); BIND(awaddr); BIND(awlen); BIND(awsize); BIND(awburst); BIND(awvalid); BIND(awready);
    BIND(wdata); BIND(wstrb); BIND(wlast); BIND(wvalid); BIND(wready);
    BIND(bid); BIND(bresp); BIND(bvalid); BIND(bready);
    BIND(arid); BIND(araddr); BIND(arlen); BIND(arsize); BIND(arburst); BIND(arvalid); BIND(arready);
    BIND(rid); BIND(rdata); BIND(rresp); BIND(rlast); BIND(rvalid); BIND(rready);
#undef BIND
}

void AxiHost::violation(const std::string& text) {
    m_failure.raise(Failure::PROTOCOL, "nic " + std::string(1, static_cast<char>('a' + m_nic)) + ", port m_axi, cycle "
                                           + std::to_string(m_cycle) + ": " + text);
}

void AxiHost::check_address(const char* channel, uint64_t address, uint64_t len, uint64_t size, uint64_t kind) {
    const std::string where = std::string(channel) + " " + hex(address) + ", len " + std::to_string(len) + ": ";
    if (kind != 1) violation(where + "burst type " + std::to_string(kind) + ", must be INCR");
    if (size != m_size) violation(where + "size " + std::to_string(size) + ", must be the full bus width");
    const uint64_t first = address - address % m_beat_bytes, end = first + (len + 1) * m_beat_bytes;
    if (first / 4096 != (end - 1) / 4096) violation(where + "the burst crosses a 4 KiB boundary");
}

void AxiHost::check_held(const char* channel, Held& held, const Held& now) {
    if (!held.valid) return;
    if (!now.valid) violation(std::string(channel) + "valid fell before " + channel + "ready");
    else if (now.id != held.id || now.address != held.address || now.shape != held.shape)
        violation(std::string(channel) + " payload changed before " + channel + "ready");
}

void AxiHost::sample(uint64_t cycle) {
    m_cycle = cycle;
    sample_read_address(cycle);
    sample_write_address(cycle);
    sample_write_data(cycle);

    if (m_r && m_pins.rready.get()) {
        Burst& burst = *m_r;
        if (burst.done == 0) m_monitor.event(cycle, EV_R_FIRST, m_nic, burst.id, burst.address, burst.response);
        burst.done++;
        counters.read_beats++;
        m_r_sticky = m_r;
        if (burst.done == burst.beats) {
            m_monitor.event(cycle, EV_R_LAST, m_nic, burst.id, burst.address, burst.response);
            m_r_sticky = nullptr;
            m_reads.erase(std::find_if(m_reads.begin(), m_reads.end(), [&](auto& b) { return b.get() == &burst; }));
        }
        m_r = nullptr;
    }
    if (m_b && m_pins.bready.get()) {
        m_monitor.event(cycle, EV_B, m_nic, m_b->id, m_b->address, m_b->response);
        m_b.reset();
    }
}

void AxiHost::sample_read_address(uint64_t cycle) {
    const Held now{m_pins.arvalid.get() != 0, m_pins.arid.get(), m_pins.araddr.get(),
                   m_pins.arlen.get() | m_pins.arsize.get() << 8 | m_pins.arburst.get() << 16};
    check_held("ar", m_held_ar, now);
    m_held_ar = now;
    if (!now.valid || !m_arready) return;
    m_held_ar.valid = false;
    check_address("AR", now.address, m_pins.arlen.get(), m_pins.arsize.get(), m_pins.arburst.get());
    auto burst = std::make_unique<Burst>();
    burst->id = static_cast<uint32_t>(now.id);
    burst->beats = static_cast<uint32_t>(m_pins.arlen.get()) + 1;
    burst->address = now.address;
    burst->due = cycle + config.read_latency + (config.read_jitter ? m_rng.below(config.read_jitter + 1) : 0);
    m_monitor.event(cycle, EV_AR, m_nic, burst->id, burst->address, burst->beats);
    counters.reads++;
    m_reads.push_back(std::move(burst));
}

void AxiHost::sample_write_address(uint64_t cycle) {
    const Held now{m_pins.awvalid.get() != 0, m_pins.awid.get(), m_pins.awaddr.get(),
                   m_pins.awlen.get() | m_pins.awsize.get() << 8 | m_pins.awburst.get() << 16};
    check_held("aw", m_held_aw, now);
    m_held_aw = now;
    if (!now.valid || !m_awready) return;
    m_held_aw.valid = false;
    check_address("AW", now.address, m_pins.awlen.get(), m_pins.awsize.get(), m_pins.awburst.get());
    auto burst = std::make_unique<Burst>();
    burst->id = static_cast<uint32_t>(now.id);
    burst->beats = static_cast<uint32_t>(m_pins.awlen.get()) + 1;
    burst->address = now.address;
    burst->accepted = cycle;
    burst->data.resize(size_t(burst->beats) * m_beat_bytes);
    burst->strobes.resize(burst->data.size());
    m_monitor.event(cycle, EV_AW, m_nic, burst->id, burst->address, burst->beats);
    counters.writes++;
    m_writes.push_back(std::move(burst));
}

void AxiHost::sample_write_data(uint64_t cycle) {
    WriteBeat now{};
    const bool valid = m_pins.wvalid.get() != 0;
    if (valid) {
        memcpy(now.data, m_pins.wdata.p, m_beat_bytes);
        now.strobe = m_pins.wstrb.get();
        now.last = m_pins.wlast.get() != 0;
        now.cycle = cycle;
    }
    if (m_held_w) {
        if (!valid) violation("wvalid fell before wready");
        else if (now.strobe != m_held_beat.strobe || now.last != m_held_beat.last
                 || memcmp(now.data, m_held_beat.data, m_beat_bytes))
            violation("w payload changed before wready");
    }
    m_held_w = valid && !m_wready;
    if (m_held_w) m_held_beat = now;
    if (valid && m_wready) {
        m_early.push_back(now);
        counters.write_beats++;
        m_write_tokens -= std::min(m_write_tokens, ONE_BEAT);
    }
    place_write_beats();
}

void AxiHost::place_write_beats() {
    while (!m_writes.empty() && !m_early.empty()) {
        Burst& burst = *m_writes.front();
        const WriteBeat& beat = m_early.front();
        const bool last = burst.done + 1 == burst.beats;
        if (burst.done == 0) {
            m_monitor.event(beat.cycle, EV_W_FIRST, m_nic, burst.id, burst.address, burst.beats);
            const uint64_t below = (uint64_t(1) << burst.address % m_beat_bytes) - 1;
            if (beat.strobe & below) violation("wstrb enables bytes below the address " + hex(burst.address));
        }
        if (beat.last != last)
            violation("wlast is " + std::to_string(beat.last) + " on beat " + std::to_string(burst.done + 1) + " of "
                      + std::to_string(burst.beats) + " of the write to " + hex(burst.address));
        memcpy(&burst.data[size_t(burst.done) * m_beat_bytes], beat.data, m_beat_bytes);
        for (uint32_t i = 0; i < m_beat_bytes; i++)
            burst.strobes[size_t(burst.done) * m_beat_bytes + i] = beat.strobe >> i & 1;
        burst.done++;
        burst.last_w = beat.cycle;
        m_early.pop_front();
        if (last) {
            BurstPtr whole = std::move(m_writes.front());
            m_writes.pop_front();
            finish_write(std::move(whole));
        }
    }
}

void AxiHost::finish_write(BurstPtr burst) {
    m_monitor.event(burst->last_w, EV_W_LAST, m_nic, burst->id, burst->address, burst->beats);
    const uint64_t from = std::max(burst->last_w, burst->accepted);
    burst->due = from + config.write_latency + (config.write_jitter ? m_rng.below(config.write_jitter + 1) : 0);
    m_responses.push_back(std::move(burst));
}

// The response code of a burst: an error range first, then whether the memory is mapped.
uint32_t AxiHost::fault(const Burst& burst, bool is_write) {
    const uint64_t first = burst.beat_address(m_beat_bytes), end = first + uint64_t(burst.beats) * m_beat_bytes;
    for (ErrorRange& range : errors) {
        const uint32_t response = is_write ? range.write_response : range.read_response;
        if (!response || range.remaining == 0 || end <= range.first || first >= range.end) continue;
        if (range.remaining > 0) range.remaining--;
        return response;
    }
    if (memory.granule(first)) return 0;
    counters.unmapped++;
    return DECERR;
}

void AxiHost::load(Burst& burst, uint64_t cycle) {
    burst.data.assign(size_t(burst.beats) * m_beat_bytes, 0xA5);  // what a failed read returns
    burst.response = fault(burst, false);
    if (burst.response) {
        counters.read_errors++;
        m_monitor.event(cycle, EV_DMA_FAULT, m_nic, burst.id, burst.address, burst.response);
    } else {
        memory.read(burst.beat_address(m_beat_bytes), burst.data.data(), burst.data.size());
    }
}

void AxiHost::commit(Burst& burst) {
    burst.response = fault(burst, true);
    if (burst.response) {
        counters.write_errors++;
        m_monitor.event(m_cycle, EV_DMA_FAULT, m_nic, burst.id, burst.address, burst.response);
        return;
    }
    const uint64_t first = burst.beat_address(m_beat_bytes);
    uint8_t* at = memory.granule(first) + first % HostMemory::GRANULE;
    for (size_t i = 0; i < burst.data.size(); i++)
        if (burst.strobes[i]) at[i] = burst.data[i];
    for (const Watch& watch : watches)
        if (first < watch.end && first + burst.data.size() > watch.first) watch_hit = true;
}

// The index of the burst to serve next, or size() when none is due. Only the oldest burst of an ID is a candidate.
size_t AxiHost::pick(const std::deque<BurstPtr>& from, uint64_t cycle) {
    if (from.empty()) return 0;
    if (!config.reorder && !config.interleave) return from.front()->due <= cycle ? 0 : from.size();
    std::vector<size_t> candidates;
    std::vector<uint32_t> seen;
    for (size_t i = 0; i < from.size(); i++) {
        if (std::find(seen.begin(), seen.end(), from[i]->id) != seen.end()) continue;
        seen.push_back(from[i]->id);
        if (from[i]->due <= cycle) candidates.push_back(i);
    }
    if (candidates.empty()) return from.size();
    return candidates[m_rng.below(static_cast<uint32_t>(candidates.size()))];
}

void AxiHost::drive(uint64_t next) {
    m_arready = m_reads.size() < config.max_reads && !m_rng.chance(config.stall[0]);
    m_awready = m_writes.size() + m_responses.size() < config.max_writes && !m_rng.chance(config.stall[2]);
    m_write_tokens = std::min<uint64_t>(m_write_tokens + config.write_rate, 2 * ONE_BEAT);
    m_wready = m_write_tokens >= ONE_BEAT && m_early.size() < EARLY_BEATS && !m_rng.chance(config.stall[3]);
    m_pins.arready.set(m_arready);
    m_pins.awready.set(m_awready);
    m_pins.wready.set(m_wready);

    m_read_tokens = std::min<uint64_t>(m_read_tokens + config.read_rate, 2 * ONE_BEAT);
    if (!m_r && m_read_tokens >= ONE_BEAT && !m_rng.chance(config.stall[1])) {
        if (m_r_sticky && !config.interleave) {
            m_r = m_r_sticky;
        } else {
            const size_t index = pick(m_reads, next);
            if (index < m_reads.size()) m_r = m_reads[index].get();
        }
        if (m_r) {
            if (m_r->done == 0) load(*m_r, next);
            m_read_tokens -= ONE_BEAT;
            m_pins.rid.set(m_r->id);
            memcpy(m_pins.rdata.p, &m_r->data[size_t(m_r->done) * m_beat_bytes], m_beat_bytes);
            m_pins.rresp.set(m_r->response);
            m_pins.rlast.set(m_r->done + 1 == m_r->beats);
        }
    }
    m_pins.rvalid.set(m_r != nullptr);

    if (!m_b && !m_rng.chance(config.stall[4])) {
        const size_t index = pick(m_responses, next);
        if (index < m_responses.size()) {
            m_b = std::move(m_responses[index]);
            m_responses.erase(m_responses.begin() + static_cast<long>(index));
            commit(*m_b);
            m_pins.bid.set(m_b->id);
            m_pins.bresp.set(m_b->response);
        }
    }
    m_pins.bvalid.set(m_b != nullptr);
}

void AxiHost::reset() {
    m_reads.clear();
    m_writes.clear();
    m_early.clear();
    m_responses.clear();
    m_r = m_r_sticky = nullptr;
    m_b.reset();
    m_arready = m_awready = m_wready = m_held_w = false;
    m_held_ar = m_held_aw = {};
    for (const Pin* pin : {&m_pins.arready, &m_pins.awready, &m_pins.wready, &m_pins.rvalid, &m_pins.bvalid}) pin->set(0);
}
