// The two LZ4 functions that writing an FST needs, so that no machine has to install liblz4.
// A greedy one-pass matcher in the LZ4 block format: every LZ4 decoder reads its output.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

static inline int LZ4_compressBound(int size) { return size + size / 255 + 16; }

namespace rnic_lz4 {
static inline uint32_t load32(const uint8_t* p) {
    uint32_t value;
    memcpy(&value, p, 4);
    return value;
}
// A length of 15 or more goes on in bytes of 255 after the token.
static inline uint8_t* put_length(uint8_t* out, int rest) {
    for (; rest >= 255; rest -= 255) *out++ = 255;
    *out++ = static_cast<uint8_t>(rest);
    return out;
}
static inline uint8_t* put_literals(uint8_t* out, const uint8_t* from, int count, int match_code) {
    *out++ = static_cast<uint8_t>((count < 15 ? count : 15) << 4 | (match_code < 15 ? match_code : 15));
    if (count >= 15) out = put_length(out, count - 15);
    memcpy(out, from, count);
    return out + count;
}
}  // namespace rnic_lz4

// `capacity` is at least LZ4_compressBound(size) in the only caller; returns the number of bytes written.
static inline int LZ4_compress_default(const char* source, char* target, int size, int capacity) {
    using namespace rnic_lz4;
    if (capacity < LZ4_compressBound(size)) return 0;
    constexpr int HASH_BITS = 12, LAST_LITERALS = 5, MATCH_GUARD = 12;
    int table[1 << HASH_BITS];
    const uint8_t* const in = reinterpret_cast<const uint8_t*>(source);
    uint8_t* out = reinterpret_cast<uint8_t*>(target);
    int anchor = 0, at = 0;
    if (size > MATCH_GUARD) {
        for (int& entry : table) entry = -1;
        while (at < size - MATCH_GUARD) {
            const uint32_t word = load32(in + at);
            int& entry = table[(word * 2654435761u) >> (32 - HASH_BITS)];
            const int candidate = entry;
            entry = at;
            if (candidate < 0 || at - candidate > 65535 || load32(in + candidate) != word) {
                at += 1 + ((at - anchor) >> 6);  // hurry through what does not compress
                continue;
            }
            int length = 4;
            while (at + length < size - LAST_LITERALS && in[candidate + length] == in[at + length]) length++;
            out = put_literals(out, in + anchor, at - anchor, length - 4);
            const int offset = at - candidate;
            *out++ = static_cast<uint8_t>(offset);
            *out++ = static_cast<uint8_t>(offset >> 8);
            if (length - 4 >= 15) out = put_length(out, length - 4 - 15);
            at += length;
            anchor = at;
        }
    }
    out = put_literals(out, in + anchor, size - anchor, 0);
    return static_cast<int>(out - reinterpret_cast<uint8_t*>(target));
}
