// Deterministic random numbers: the same seed gives the same run on every machine.
#pragma once
#include <cstdint>

class Rng {  // xorshift64*
public:
    explicit Rng(uint64_t seed = 1) {
        // splitmix64 spreads small and neighbouring seeds, and never yields the forbidden state 0 here
        uint64_t z = seed + 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        m_state = (z ^ z >> 31) | 1;
    }
    uint64_t next() {
        m_state ^= m_state >> 12;
        m_state ^= m_state << 25;
        m_state ^= m_state >> 27;
        return m_state * 0x2545F4914F6CDD1Dull;
    }
    uint32_t below(uint32_t bound) { return static_cast<uint32_t>((next() >> 32) * bound >> 32); }
    // True with probability p / 2^32; draws nothing when p is 0, so an unused fault does not shift the others.
    bool chance(uint64_t p) { return p != 0 && (next() >> 32) < p; }

private:
    uint64_t m_state;
};
