// One direction of the wire: a delay line with bandwidth, back-pressure and faults.
//
// Without faults beats are cut through: a beat taken in cycle c is offered to the receiver in cycle c + latency. As
// long as a fault probability or a rule is set, whole frames are stored and offered latency cycles after their last
// beat, because a fault needs the frame.
#pragma once
#include <deque>
#include <vector>

#include "axis.h"
#include "rng.h"

enum FaultAction : uint32_t {  // numbers are part of the C ABI: rnic_sim.link.Fault repeats them
    FAULT_DROP = 0, FAULT_DUPLICATE = 1, FAULT_REORDER = 2, FAULT_CORRUPT = 3, FAULT_CE = 4, FAULT_FCS = 5, FAULTS = 6,
};

struct LinkConfig {
    uint32_t latency = 1;          // cycles, at least 1
    uint32_t buffer = 64;          // beats the link holds beyond its latency before it stops the sender
    uint32_t rate = 65536;         // beats per 65536 cycles
    uint32_t reorder_depth = 1;    // a reordered frame lets this many frames pass
    uint32_t reorder_timeout = 2000;  // cycles after which a held frame goes on anyway
    uint32_t corrupt_first = 0;    // corruption flips one bit of the bytes from this one on
    uint32_t duplicate_gap = 0;    // frames between a frame and its copy
    uint64_t tx_stall = 0, rx_stall = 0;  // probability of a held cycle, in 1/2^32
    uint64_t probability[FAULTS] = {0, 0, 0, 0, 0, 0};
};

struct FaultRule {
    uint32_t action;
    int32_t opcode;   // BTH opcode the frame must have; negative: any frame
    uint64_t skip;    // matching frames still to let through
    uint64_t count;   // matching frames to hit after that
    int64_t bit;      // FAULT_CORRUPT: the bit of the frame to flip; negative: random
};

class LinkDirection {
public:
    LinkConfig config;
    std::vector<FaultRule> rules;
    uint64_t frames = 0;
    uint64_t hits[FAULTS] = {0, 0, 0, 0, 0, 0};

    LinkDirection(uint32_t beat_bytes, uint64_t seed) : m_bytes(beat_bytes), m_rng(seed) {}

    void take(uint64_t cycle, const Beat& beat);    // a beat from the sender
    bool ready_next();                              // whether the sender may send in the next cycle
    bool offer(uint64_t next, Beat& beat);          // the beat for the receiver in cycle `next`, if any
    void expire(uint64_t cycle);                    // lets held frames go whose time is over
    void reset();
    bool idle() const { return m_line.empty() && m_held.empty() && !m_inside; }

private:
    struct Item { uint64_t due; Beat beat; };
    struct Held { Frame frame; uint32_t passes; uint64_t timeout; };

    bool faulty() const;
    void whole(uint64_t cycle, Frame frame);
    void emit(uint64_t cycle, const Frame& frame);
    void pass(uint64_t cycle);
    bool hit(uint32_t action, const Frame& frame, int64_t* bit = nullptr);

    uint32_t m_bytes;
    Rng m_rng;
    std::deque<Item> m_line;
    std::vector<Held> m_held;
    Frame m_frame;                 // being stored
    bool m_inside = false, m_store = false;
    uint64_t m_tokens = 0;
};

void split_frame(const Frame& frame, uint32_t beat_bytes, std::deque<Beat>& out);
int frame_opcode(const std::vector<uint8_t>& bytes);   // BTH opcode, or -1 when this is no RoCEv2 frame
bool mark_ce(std::vector<uint8_t>& bytes);             // ECN = CE in the IP header; false when it has none
