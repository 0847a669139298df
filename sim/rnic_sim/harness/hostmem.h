// Host memory of one NIC: sparse, 4 KiB granules made on first touch, only inside ranges the allocator mapped.
#pragma once
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>

class HostMemory {
public:
    static constexpr uint64_t GRANULE = 4096;

    void map(uint64_t base, uint64_t length) { m_ranges[base] = base + length; }

    // Unmapped memory loses its content, so late DMA to it is an error, not a silent success.
    void unmap(uint64_t base) {
        auto range = m_ranges.find(base);
        if (range == m_ranges.end()) return;
        const uint64_t first = range->first / GRANULE, last = (range->second + GRANULE - 1) / GRANULE;
        if (last - first < m_granules.size()) {
            for (uint64_t g = first; g < last; g++) m_granules.erase(g);
        } else {
            for (auto it = m_granules.begin(); it != m_granules.end();)
                it = it->first >= first && it->first < last ? m_granules.erase(it) : std::next(it);
        }
        m_ranges.erase(range);
    }

    // The granule holding `address`, or null when the address is not mapped.
    uint8_t* granule(uint64_t address) {
        const uint64_t index = address / GRANULE;
        auto found = m_granules.find(index);
        if (found != m_granules.end()) return found->second.get();
        auto range = m_ranges.upper_bound(address);
        if (range == m_ranges.begin() || address >= std::prev(range)->second) return nullptr;
        auto& fresh = m_granules[index];
        fresh.reset(new uint8_t[GRANULE]());
        return fresh.get();
    }

    bool read(uint64_t address, uint8_t* out, uint64_t length) {
        return span(address, length, [&](uint8_t* at, uint64_t count, uint64_t done) { memcpy(out + done, at, count); });
    }
    bool write(uint64_t address, const uint8_t* in, uint64_t length) {
        return span(address, length, [&](uint8_t* at, uint64_t count, uint64_t done) { memcpy(at, in + done, count); });
    }

private:
    template <class Copy>
    bool span(uint64_t address, uint64_t length, Copy copy) {
        for (uint64_t done = 0; done < length;) {
            uint8_t* base = granule(address + done);
            if (!base) return false;
            const uint64_t offset = (address + done) % GRANULE;
            const uint64_t count = length - done < GRANULE - offset ? length - done : GRANULE - offset;
            copy(base + offset, count, done);
            done += count;
        }
        return true;
    }

    std::map<uint64_t, uint64_t> m_ranges;  // base -> end
    std::unordered_map<uint64_t, std::unique_ptr<uint8_t[]>> m_granules;
};
