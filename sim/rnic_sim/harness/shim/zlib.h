// The zlib functions that writing an FST needs, so that no machine has to install zlib: deflate with stored
// blocks only (RFC 1950, RFC 1951 section 3.2.4). Every inflate reads it; the writer keeps the raw bytes where
// those are smaller, which with stored blocks is always.
#pragma once
#include <cstdint>
#include <cstring>

typedef unsigned char Bytef;
typedef unsigned long uLong;
typedef unsigned long uLongf;
#define Z_OK 0
#define Z_BUF_ERROR (-5)

static inline uLong compressBound(uLong size) { return size + 5 * (size / 65535 + 1) + 6; }

static inline int compress2(Bytef* target, uLongf* target_size, const Bytef* source, uLong size, int) {
    if (*target_size < compressBound(size)) return Z_BUF_ERROR;
    Bytef* out = target;
    *out++ = 0x78;  // deflate, 32 KiB window
    *out++ = 0x01;  // no dictionary, fastest; makes the 16-bit header a multiple of 31
    uint32_t low = 1, high = 0;
    uLong at = 0;
    do {
        const uLong count = size - at < 65535 ? size - at : 65535;
        *out++ = at + count == size;  // BFINAL, BTYPE 00
        *out++ = static_cast<Bytef>(count);
        *out++ = static_cast<Bytef>(count >> 8);
        *out++ = static_cast<Bytef>(~count);
        *out++ = static_cast<Bytef>(~count >> 8);
        memcpy(out, source + at, count);
        out += count;
        for (uLong i = 0; i < count; i++) {
            low = (low + source[at + i]) % 65521;
            high = (high + low) % 65521;
        }
        at += count;
    } while (at < size);
    const uint32_t adler = high << 16 | low;
    for (int shift = 24; shift >= 0; shift -= 8) *out++ = static_cast<Bytef>(adler >> shift);
    *target_size = static_cast<uLongf>(out - target);
    return Z_OK;
}
