#include "link.h"

#include <algorithm>

namespace {
constexpr uint64_t ONE_BEAT = 65536;
constexpr uint32_t ETHERTYPE_IPV4 = 0x0800, ETHERTYPE_IPV6 = 0x86DD, ETHERTYPE_VLAN = 0x8100;
constexpr uint32_t UDP = 17, ROCE_PORT = 4791;

uint32_t load16(const std::vector<uint8_t>& bytes, size_t at) {
    return at + 2 <= bytes.size() ? uint32_t(bytes[at]) << 8 | bytes[at + 1] : 0;
}

// Offset of the IP header and its EtherType (0 when the frame has neither IPv4 nor IPv6).
size_t ip_offset(const std::vector<uint8_t>& bytes, uint32_t& type) {
    size_t at = 12;
    type = load16(bytes, at);
    if (type == ETHERTYPE_VLAN) type = load16(bytes, at += 4);
    at += 2;
    const size_t header = type == ETHERTYPE_IPV4 ? 20 : 40;
    if ((type != ETHERTYPE_IPV4 && type != ETHERTYPE_IPV6) || at + header > bytes.size()) type = 0;
    return at;
}
}  // namespace

int frame_opcode(const std::vector<uint8_t>& bytes) {
    uint32_t type;
    const size_t ip = ip_offset(bytes, type);
    if (!type) return -1;
    const bool v4 = type == ETHERTYPE_IPV4;
    const size_t udp = ip + (v4 ? (bytes[ip] & 15) * 4 : 40);
    if (bytes[ip + (v4 ? 9 : 6)] != UDP || udp + 9 > bytes.size() || load16(bytes, udp + 2) != ROCE_PORT) return -1;
    return bytes[udp + 8];
}

bool mark_ce(std::vector<uint8_t>& bytes) {
    uint32_t type;
    const size_t ip = ip_offset(bytes, type);
    if (!type) return false;
    if (type == ETHERTYPE_IPV6) {
        bytes[ip + 1] |= 0x30;
        return true;
    }
    bytes[ip + 1] |= 3;
    bytes[ip + 10] = bytes[ip + 11] = 0;
    uint32_t sum = 0;
    for (size_t i = 0; i < 20; i += 2) sum += load16(bytes, ip + i);
    while (sum >> 16) sum = (sum & 0xFFFF) + (sum >> 16);
    bytes[ip + 10] = static_cast<uint8_t>(~sum >> 8);
    bytes[ip + 11] = static_cast<uint8_t>(~sum);
    return true;
}

void split_frame(const Frame& frame, uint32_t beat_bytes, std::deque<Beat>& out) {
    for (size_t at = 0; at < frame.bytes.size(); at += beat_bytes) {
        Beat beat{};
        const size_t count = std::min<size_t>(beat_bytes, frame.bytes.size() - at);
        memcpy(beat.data, &frame.bytes[at], count);
        beat.keep = count == 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
        beat.last = at + count == frame.bytes.size();
        beat.user = beat.last && frame.user;
        out.push_back(beat);
    }
}

bool LinkDirection::faulty() const {
    if (!rules.empty() || !m_held.empty()) return true;
    for (uint64_t p : config.probability)
        if (p) return true;
    return false;
}

void LinkDirection::take(uint64_t cycle, const Beat& beat) {
    if (!m_inside) m_store = faulty();
    m_inside = !beat.last;
    m_tokens -= std::min(m_tokens, ONE_BEAT);
    if (!m_store) {
        m_line.push_back({cycle + config.latency, beat});
        frames += beat.last;
        return;
    }
    m_frame.bytes.insert(m_frame.bytes.end(), beat.data, beat.data + keep_count(beat.keep));
    if (!beat.last) return;
    m_frame.user = beat.user;
    frames++;
    whole(cycle, std::move(m_frame));
    m_frame = Frame{};
}

bool LinkDirection::ready_next() {
    m_tokens = std::min<uint64_t>(m_tokens + config.rate, 2 * ONE_BEAT);
    return m_tokens >= ONE_BEAT && m_line.size() < size_t(config.latency) + config.buffer && !m_rng.chance(config.tx_stall);
}

// Whether `action` strikes this frame: by its probability, or by the first rule whose turn it is.
bool LinkDirection::hit(uint32_t action, const Frame& frame, int64_t* bit) {
    bool strikes = m_rng.chance(config.probability[action]);
    const int opcode = frame_opcode(frame.bytes);
    for (size_t i = 0; i < rules.size(); i++) {
        FaultRule& rule = rules[i];
        if (rule.action != action || (rule.opcode >= 0 && rule.opcode != opcode)) continue;
        if (rule.skip) {
            rule.skip--;
            continue;
        }
        strikes = true;
        if (bit) *bit = rule.bit;
        if (--rule.count == 0) rules.erase(rules.begin() + static_cast<long>(i--));
    }
    hits[action] += strikes;
    return strikes;
}

void LinkDirection::whole(uint64_t cycle, Frame frame) {
    int64_t bit = -1;
    // All actions are asked for every frame, so that rules count frames and not the survivors of other rules.
    const bool drop = hit(FAULT_DROP, frame), duplicate = hit(FAULT_DUPLICATE, frame);
    const bool reorder = hit(FAULT_REORDER, frame), corrupt = hit(FAULT_CORRUPT, frame, &bit);
    const bool ce = hit(FAULT_CE, frame), fcs = hit(FAULT_FCS, frame);
    if (ce) mark_ce(frame.bytes);
    if (corrupt) {
        const uint64_t bits = frame.bytes.size() * 8;
        const uint64_t first = std::min<uint64_t>(uint64_t(config.corrupt_first) * 8, bits - 8);
        const uint64_t at = bit >= 0 ? static_cast<uint64_t>(bit) % bits
                                     : first + m_rng.below(static_cast<uint32_t>(bits - first));
        frame.bytes[at / 8] ^= static_cast<uint8_t>(1u << at % 8);
    }
    if (fcs) frame.user = true;
    if (!drop && !reorder) emit(cycle, frame);
    pass(cycle);
    if (drop) return;
    if (reorder) m_held.push_back({frame, config.reorder_depth, cycle + config.reorder_timeout});
    if (duplicate) {
        if (config.duplicate_gap) m_held.push_back({frame, config.duplicate_gap, cycle + config.reorder_timeout});
        else emit(cycle, frame);
    }
}

void LinkDirection::emit(uint64_t cycle, const Frame& frame) {
    std::deque<Beat> beats;
    split_frame(frame, m_bytes, beats);
    for (const Beat& beat : beats) m_line.push_back({cycle + config.latency, beat});
}

void LinkDirection::pass(uint64_t cycle) {
    for (size_t i = 0; i < m_held.size();) {
        if (--m_held[i].passes) {
            i++;
            continue;
        }
        emit(cycle, m_held[i].frame);
        m_held.erase(m_held.begin() + static_cast<long>(i));
    }
}

void LinkDirection::expire(uint64_t cycle) {
    if (m_held.empty() || (m_inside && !m_store)) return;
    for (size_t i = 0; i < m_held.size();) {
        if (m_held[i].timeout > cycle) {
            i++;
            continue;
        }
        emit(cycle, m_held[i].frame);
        m_held.erase(m_held.begin() + static_cast<long>(i));
    }
}

bool LinkDirection::offer(uint64_t next, Beat& beat) {
    if (m_line.empty() || m_line.front().due > next || m_rng.chance(config.rx_stall)) return false;
    beat = m_line.front().beat;
    m_line.pop_front();
    return true;
}

void LinkDirection::reset() {
    m_line.clear();
    m_held.clear();
    m_frame = Frame{};
    m_inside = m_store = false;
}
