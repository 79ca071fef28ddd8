// Global and shared memory that know what is allocated, written, and who touched it. The same as `tools/ptx/memory.py`.
#pragma once

#include <cstdio>
#include <string>

#include "numbers.h"

struct Fault {
    std::string what;
    std::vector<uint8_t> lanes;  // that do it; empty: all that are at the instruction
};

template <class... Args>
std::string text(const char* format, Args... args) {
    char out[256];
    std::snprintf(out, sizeof out, format, args...);
    return out;
}

using Lanes = std::vector<uint8_t>;

// The lanes of which something holds; none: no fault.
template <class Test>
void refuse(const Lanes& doing, const std::string& what, Test test) {
    Lanes wrong(doing.size());
    bool any = false;
    for (size_t lane = 0; lane < doing.size(); lane++)
        if (doing[lane] && test(lane)) wrong[lane] = any = true;
    if (any) throw Fault{what, wrong};
}

constexpr Bits BASE = Bits(1) << 40;
constexpr uint8_t ALLOCATED = 1, WRITTEN = 3;

struct DeviceMemory {
    uint8_t *data, *state;
    Bits size;

    bool has(Bits address, int bytes, uint8_t needed) const {
        Bits at = address - BASE;
        if (at >= size || at + bytes > size) return false;
        for (int i = 0; i < bytes; i++)
            if ((state[at + i] & needed) != needed) return false;
        return true;
    }
    void check(const Bits* addresses, int bytes, const Lanes& doing, bool written) const {
        for (size_t lane = 0; lane < doing.size(); lane++) {
            if (!doing[lane]) continue;
            Bits address = addresses[lane];
            if (address & (bytes - 1)) {
                auto what = text("address 0x%llx is no multiple of %d bytes", (unsigned long long)address, bytes);
                refuse(doing, what, [&](size_t one) { return addresses[one] & (bytes - 1); });
            }
            if (!has(address, bytes, written ? WRITTEN : ALLOCATED)) {
                auto why = has(address, bytes, ALLOCATED) ? "was never written" : "is out of bounds";
                auto what = text("%s address 0x%llx, %d bytes, which %s", written ? "load of" : "store to", (unsigned long long)address, bytes, why);
                refuse(doing, what, [&](size_t one) { return !has(addresses[one], bytes, written ? WRITTEN : ALLOCATED); });
            }
        }
    }
    Bits load(Bits address, int unit) const {
        Bits out = 0;
        std::memcpy(&out, data + (address - BASE), unit);
        return out;
    }
    void store(Bits address, int unit, Bits number) {
        std::memcpy(data + (address - BASE), &number, unit);
        std::memset(state + (address - BASE), WRITTEN, unit);
    }
};

// Of one block. Since its last barrier, a byte belongs to the warp that wrote it, and to those that read it. `allowed`: of an instruction, bits
// of `Allowed`.
enum Allowed : int32_t { RACES = 1, UNWRITTEN = 2 };
struct SharedMemory {
    enum State : uint8_t { NEVER, WRITTEN_ONCE, BEING_COPIED };
    std::vector<uint8_t> data, written, unfenced, writers, readers;  // `written`: a State; the others: warps from 1, 255 is several

    void begin(int size) {
        data.assign(size, 0xFF);
        for (auto* marks : {&written, &unfenced, &writers, &readers}) marks->assign(size, 0);
    }
    void pass_barrier() {
        for (auto* marks : {&writers, &readers}) std::fill(marks->begin(), marks->end(), 0);
    }
    // Of some warps: what they did is behind them, and taken as behind all others, too. Of bytes that several warps have touched it is not
    // known which, so those are forgotten.
    void pass_barrier_of(const std::vector<uint8_t>& warps) {
        if (std::count(warps.begin(), warps.end(), 1) < 2) return;
        for (auto* marks : {&writers, &readers})
            for (auto& mark : *marks)
                if (mark == 255 || (mark && warps[mark - 1])) mark = 0;
    }
    void pass_fence() { std::fill(unfenced.begin(), unfenced.end(), 0); }

    bool inside(Bits at, int bytes) const { return at + bytes <= data.size() && !(at & (bytes - 1)); }

    void check(const Bits* addresses, int bytes, const Lanes& doing) const {
        for (size_t lane = 0; lane < doing.size(); lane++)
            if (doing[lane] && !inside(addresses[lane], bytes)) {
                auto what = text("shared address %lld of %d bytes: no multiple of them, or beyond %d", (long long)addresses[lane], bytes, int(data.size()));
                refuse(doing, what, [&](size_t one) { return !inside(addresses[one], bytes); });
            }
    }
    template <class Test>
    bool any(Bits at, int bytes, Test test) const {
        for (Bits i = at; i < at + bytes; i++)
            if (test(i)) return true;
        return false;
    }
    static uint8_t warp(size_t lane) { return uint8_t(lane / 32 + 1); }

    void check_load(const Bits* addresses, int bytes, const Lanes& doing, int allowed) {
        check(addresses, bytes, doing);
        auto unwritten = [&](size_t lane) {
            return any(addresses[lane], bytes, [&](Bits i) { return written[i] == BEING_COPIED || (written[i] == NEVER && !(allowed & UNWRITTEN)); });
        };
        auto raced = [&](size_t lane) {
            return !(allowed & RACES) && any(addresses[lane], bytes, [&](Bits i) { return writers[i] && writers[i] != warp(lane); });
        };
        for (size_t lane = 0; lane < doing.size(); lane++) {
            if (!doing[lane]) continue;
            if (unwritten(lane)) refuse(doing, "load of shared bytes that were never written, or whose copy is under way", unwritten);
            if (raced(lane)) refuse(doing, "race: shared bytes that another warp wrote since the last barrier", raced);
            for (Bits i = addresses[lane]; i < addresses[lane] + bytes; i++)
                readers[i] = readers[i] == 0 || readers[i] == warp(lane) ? warp(lane) : 255;
        }
    }
    void begin_copy(const Bits* addresses, int bytes, const Lanes& doing, int allowed) {
        check(addresses, bytes, doing);
        for (auto [marks, verb] : {std::pair(&writers, "wrote"), std::pair(&readers, "read")}) {
            auto raced = [&, marks = marks](size_t lane) {
                return any(addresses[lane], bytes, [&](Bits i) { return (*marks)[i] && (*marks)[i] != warp(lane); });
            };
            for (size_t lane = 0; lane < doing.size(); lane++)
                if (doing[lane] && !(allowed & RACES) && raced(lane))
                    refuse(doing, text("race: store to shared bytes that another warp %s since the last barrier", verb), raced);
        }
        for (size_t lane = 0; lane < doing.size(); lane++)
            if (doing[lane]) std::memset(&written[addresses[lane]], BEING_COPIED, bytes);
    }
    void store(Bits at, int unit, Bits number, size_t lane) {
        std::memcpy(&data[at], &number, unit);
        mark_copied(at, unit, lane);
    }
    // Of a copy that was made before: it is there from now on.
    void mark_copied(Bits at, int bytes, size_t lane) {
        std::memset(&writers[at], warp(lane), bytes);
        std::memset(&written[at], WRITTEN_ONCE, bytes);
        std::memset(&unfenced[at], 1, bytes);
    }
    Bits load(Bits at, int unit) const {
        Bits out = 0;
        std::memcpy(&out, &data[at], unit);
        return out;
    }
    // A 16-byte piece of a matrix of wgmma, which reads behind a fence and a barrier of all.
    void check_piece(int64_t at) {
        if (at < 0 || at + 16 > int64_t(data.size()))
            throw Fault{text("a matrix of wgmma reaches to byte %d of %d bytes of shared memory", int(at + 16), int(data.size())), {}};
        if (any(at, 16, [&](Bits i) { return written[i] != WRITTEN_ONCE; }))
            throw Fault{"wgmma of shared bytes that were never written, or whose copy is under way", {}};
        if (any(at, 16, [&](Bits i) { return unfenced[i]; }))
            throw Fault{"wgmma of shared bytes that no fence.proxy.async has passed since they were written", {}};
        if (any(at, 16, [&](Bits i) { return writers[i]; }))
            throw Fault{"race: wgmma of shared bytes that were written since the last barrier", {}};
        std::memset(&readers[at], 255, 16);
    }
};
