// AXI-Stream ends: a sink that takes beats from the NIC and checks them, a source that drives beats into it.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "monitor.h"
#include "pins.h"

struct Beat {
    uint8_t data[MAX_BEAT_BYTES];
    uint64_t keep;
    bool last, user;
};

struct Frame {
    std::vector<uint8_t> bytes;
    bool user = false;
};

inline uint32_t keep_count(uint64_t keep) { return static_cast<uint32_t>(__builtin_popcountll(keep)); }

// Collects the beats of one direction of one port into a frame record.
class FrameRecorder {
public:
    FrameRecorder(uint32_t nic, FramePort port, Monitor& monitor, EventKind first, EventKind last)
        : m_nic(nic), m_port(port), m_monitor(monitor), m_first_kind(first), m_last_kind(last) {}
    // True when the beat ended a frame that was captured.
    bool beat(uint64_t cycle, const Beat& beat) {
        if (!m_open) {
            m_open = true;
            m_first = cycle;
            m_length = 0;
            m_bytes.clear();
            m_monitor.event(cycle, m_first_kind, m_nic, m_count, 0, 0);
        }
        const bool capture = m_monitor.frame_ports >> m_port & 1;
        const uint32_t count = keep_count(beat.keep);
        m_length += count;
        if (capture) m_bytes.insert(m_bytes.end(), beat.data, beat.data + count);
        if (!beat.last) return false;
        m_open = false;
        m_monitor.event(cycle, m_last_kind, m_nic, m_count++, m_length, beat.user);
        if (!capture) return false;
        m_monitor.frame({m_first, cycle, m_nic, static_cast<uint32_t>(m_port), static_cast<uint32_t>(m_bytes.size()),
                         beat.user}, m_bytes.data());
        return true;
    }
    void reset() { m_open = false; }

private:
    uint32_t m_nic;
    FramePort m_port;
    Monitor& m_monitor;
    EventKind m_first_kind, m_last_kind;
    bool m_open = false;
    uint64_t m_first = 0;
    uint32_t m_count = 0, m_length = 0;
    std::vector<uint8_t> m_bytes;
};

class StreamSink {  // takes what the NIC sends
public:
    StreamSink(AxisPins pins, std::string where, uint32_t beat_bytes, Failure& failure)
        : m_pins(pins), m_where(std::move(where)), m_bytes(beat_bytes), m_failure(failure) {}
    bool present() const { return bool(m_pins.tvalid); }

    bool sample(uint64_t cycle, Beat& beat) {  // true on a handshake
        const bool valid = m_pins.tvalid.get() != 0;
        if (m_held && !valid) violation(cycle, "tvalid fell before tready");
        if (!valid) return m_held = false;
        memcpy(beat.data, m_pins.tdata.p, m_bytes);
        beat.keep = m_pins.tkeep.get();
        beat.last = m_pins.tlast.get() != 0;
        beat.user = m_pins.tuser.get() != 0;
        if (m_held && (beat.keep != m_previous.keep || beat.last != m_previous.last || beat.user != m_previous.user
                       || memcmp(beat.data, m_previous.data, m_bytes)))
            violation(cycle, "payload changed before tready");
        const uint64_t full = m_bytes == 64 ? ~uint64_t(0) : (uint64_t(1) << m_bytes) - 1;
        if (!(beat.keep & 1)) violation(cycle, "a beat without a byte");
        else if (beat.keep & (beat.keep + 1)) violation(cycle, "tkeep is not contiguous from byte 0");
        else if (!beat.last && beat.keep != full) violation(cycle, "tkeep is not full before the last beat");
        m_held = !m_ready;
        if (m_held) m_previous = beat;
        return m_ready;
    }
    void drive(bool ready) {
        m_ready = ready;
        m_pins.tready.set(ready);
    }
    void reset() {
        m_held = false;
        drive(false);
    }

private:
    void violation(uint64_t cycle, const char* text) {
        m_failure.raise(Failure::PROTOCOL, m_where + ", cycle " + std::to_string(cycle) + ": " + text);
    }
    AxisPins m_pins;
    std::string m_where;
    uint32_t m_bytes;
    Failure& m_failure;
    bool m_ready = false, m_held = false;
    Beat m_previous{};
};

class StreamSource {  // drives beats into the NIC; a beat stays until it is taken
public:
    StreamSource(AxisPins pins, uint32_t beat_bytes) : m_pins(pins), m_bytes(beat_bytes) {}
    bool present() const { return bool(m_pins.tvalid); }
    bool empty() const { return !m_valid; }
    bool sample(Beat& beat) {  // true on a handshake; the source is empty afterwards
        if (!m_valid || !m_pins.tready.get()) return false;
        beat = m_beat;
        m_valid = false;
        return true;
    }
    void load(const Beat& beat) {
        m_beat = beat;
        m_valid = true;
        memcpy(m_pins.tdata.p, beat.data, m_bytes);
        m_pins.tkeep.set(beat.keep);
        m_pins.tlast.set(beat.last);
        if (m_pins.tuser) m_pins.tuser.set(beat.user);
    }
    void drive() { m_pins.tvalid.set(m_valid); }
    void reset() {
        m_valid = false;
        drive();
    }

private:
    AxisPins m_pins;
    uint32_t m_bytes;
    bool m_valid = false;
    Beat m_beat{};
};
