// Matrices that a warp or four hold together, and their products. The same as `tools/ptx/matrices.py`.
#pragma once

#include "memory.h"

// Of one row that four lanes hold: `words` registers with 16 bytes each, four by each lane.
// out: [8 rows][depth], where depth = words * 16 / bytes of an element.
template <class Word>
void held_rows(float* out, int stride, int words, int kind, Word word) {
    const int unit = bits_of(kind) / 8, per = 4 / unit;
    for (int row = 0; row < 8; row++)
        for (int k = 0; k < words; k++)
            for (int t = 0; t < 4; t++) {
                Bits bits = word(k, 4 * row + t);
                for (int e = 0; e < per; e++) out[row * stride + (k * 4 + t) * per + e] = value_of(bits >> (8 * unit * e) & mask_of(8 * unit), kind);
            }
}

// out [rows][columns] = left [rows][depth] times right [columns][depth]
inline void multiply(float* out, const float* left, const float* right, int rows, int columns, int depth) {
    std::vector<float> turned(size_t(columns) * depth);
    for (int column = 0; column < columns; column++)
        for (int k = 0; k < depth; k++) turned[size_t(k) * columns + column] = right[size_t(column) * depth + k];
    for (int row = 0; row < rows; row++) {
        float* sums = out + size_t(row) * columns;
        std::fill(sums, sums + columns, 0.0f);
        for (int k = 0; k < depth; k++) {
            const float factor = left[size_t(row) * depth + k], *others = &turned[size_t(k) * columns];
            for (int column = 0; column < columns; column++) sums[column] += factor * others[column];
        }
    }
}

// Where a 16-byte piece of a matrix lies in shared memory, by its descriptor: of `row`, and of `piece` 0 or 1 of its depth; if `turned`, of
// the eight rows from 8 * `row`, and of `piece` in 0..15 of its depth.
inline int64_t place(Bits descriptor, int row, int piece, bool turned) {
    const int64_t start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
    const int mode = descriptor >> 62 & 3;
    if (descriptor >> 49 & 7) throw Fault{"a base offset in a descriptor of wgmma is not modelled", {}};
    static const int widths[] = {16, 128, 64, 32}, swizzles[] = {0, 7, 3, 1};
    const int width = widths[mode];
    int64_t at;
    if (turned) {
        const int per_row = width / 16;
        at = start + row / per_row * leading + row % per_row * 16 + piece % 8 * width + piece / 8 * stride;
    } else {
        at = start + row / 8 * stride + row % 8 * width + piece * (mode ? 16 : leading);
    }
    return at ^ (at >> 7 & swizzles[mode]) << 4;
}

// out [rows][depth] of a matrix in shared memory, whose depth is of 32 bytes.
inline void shared_rows(float* out, SharedMemory& shared, Bits descriptor, int rows, bool turned, int kind) {
    const int unit = bits_of(kind) / 8, depth = 32 / unit, per = 16 / unit;
    for (int row = 0; row < (turned ? rows / 8 : rows); row++)
        for (int piece = 0; piece < (turned ? 16 : 2); piece++) {
            int64_t at = place(descriptor, row, piece, turned);
            shared.check_piece(at);
            for (int e = 0; e < per; e++) {
                float number = value_of(shared.load(at + e * unit, unit), kind);
                if (turned) out[(row * 8 + e) * depth + piece] = number;
                else out[row * depth + piece * per + e] = number;
            }
        }
}
