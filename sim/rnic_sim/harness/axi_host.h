// The host side of the AXI4 manager port: memory behind a bus with latency, stalls, reordering and errors.
//
// A read burst takes its bytes from memory when its first beat is put on R; a write burst is in memory from the cycle
// its B is put on the bus. Between AR and R, and between W and B, the order of reads and writes is therefore open, as
// AXI leaves it: who needs an order waits for the response.
#pragma once
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hostmem.h"
#include "monitor.h"
#include "pins.h"
#include "rng.h"

struct AxiConfig {
    uint32_t read_latency = 64;    // cycles from AR handshake to first R beat
    uint32_t read_jitter = 0;      // plus 0..jitter more, uniform
    uint32_t write_latency = 16;   // cycles from the later of AW and last W handshake to B
    uint32_t write_jitter = 0;
    uint64_t stall[5] = {0, 0, 0, 0, 0};  // AR, R, AW, W, B: probability of a held cycle, in 1/2^32
    uint32_t reorder = 0;          // 1: responses of different IDs pass each other
    uint32_t interleave = 0;       // 1: R beats of different IDs mix (and their bursts pass each other)
    uint32_t max_reads = 256;      // bursts accepted and not finished
    uint32_t max_writes = 256;
    uint32_t read_rate = 65536;    // bandwidth limit, beats per 65536 cycles
    uint32_t write_rate = 65536;
};

struct ErrorRange {
    uint64_t first, end;
    uint32_t read_response, write_response;  // 0: this direction is fine
    int64_t remaining;                       // bursts still to fail; negative: all
};

struct AxiCounters { uint64_t reads, writes, read_beats, write_beats, read_errors, write_errors, unmapped; };

class AxiHost {
public:
    AxiConfig config;
    AxiCounters counters{};
    HostMemory memory;
    std::vector<ErrorRange> errors;
    struct Watch { uint64_t first, end; };
    std::vector<Watch> watches;  // a committed write that touches one sets `watch_hit`
    bool watch_hit = false;

    AxiHost(NicModel& model, uint32_t nic, uint32_t beat_bytes, Monitor& monitor, Failure& failure, uint64_t seed);
    void sample(uint64_t cycle);  // handshakes and checks of this cycle
    void drive(uint64_t next);    // inputs of the next cycle
    void reset();
    bool idle() const { return m_reads.empty() && m_writes.empty() && m_responses.empty(); }

private:
    struct Burst {
        uint32_t id, beats;
        uint64_t address, due = 0;
        uint32_t done = 0;       // beats on the bus so far
        uint32_t response = 0;
        uint64_t accepted = 0, last_w = 0;
        std::vector<uint8_t> data, strobes;
        uint64_t beat_address(uint32_t beat_bytes) const { return address - address % beat_bytes; }
    };
    using BurstPtr = std::unique_ptr<Burst>;
    struct Held { bool valid = false; uint64_t id = 0, address = 0, shape = 0; };
    struct WriteBeat { uint8_t data[MAX_BEAT_BYTES]; uint64_t strobe; bool last; uint64_t cycle; };

    void sample_read_address(uint64_t cycle);
    void sample_write_address(uint64_t cycle);
    void sample_write_data(uint64_t cycle);
    void place_write_beats();
    void finish_write(BurstPtr burst);
    void commit(Burst& burst);
    void load(Burst& burst, uint64_t cycle);
    uint32_t fault(const Burst& burst, bool is_write);
    void check_address(const char* channel, uint64_t address, uint64_t len, uint64_t size, uint64_t kind);
    void check_held(const char* channel, Held& held, const Held& now);
    size_t pick(const std::deque<BurstPtr>& from, uint64_t cycle);
    void violation(const std::string& text);

    AxiPins m_pins;
    uint32_t m_nic, m_beat_bytes, m_size;
    Monitor& m_monitor;
    Failure& m_failure;
    Rng m_rng;
    uint64_t m_cycle = 0;

    std::deque<BurstPtr> m_reads;        // accepted, in order
    std::deque<BurstPtr> m_writes;       // AW accepted, data not complete
    std::deque<WriteBeat> m_early;       // W accepted before its AW
    std::deque<BurstPtr> m_responses;    // data complete, B to come
    bool m_arready = false, m_awready = false, m_wready = false;
    Burst* m_r = nullptr;                // the burst whose beat is on R
    BurstPtr m_b;                        // the burst whose response is on B
    Burst* m_r_sticky = nullptr;         // the burst that goes on after this beat, unless interleaving
    uint64_t m_read_tokens = 0, m_write_tokens = 0;
    Held m_held_ar, m_held_aw;
    bool m_held_w = false;
    WriteBeat m_held_beat{};
};
