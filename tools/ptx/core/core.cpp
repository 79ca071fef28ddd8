// Executes a kernel on one block after another: as `tools/ptx/executor.py`, which is its reference, does for several at once.
//
// Registers are [register][lane], 64 bits each. Immediates and special registers are registers too. An instruction that is not known here is
// handed to the caller, who computes it and resumes. A fault ends the block.

#include <algorithm>

#include "arithmetic.h"
#include "groups.h"
#include "matrices.h"

constexpr Bits POISON = 0xDEADBEEFDEADBEEF;
constexpr int MOST_BARRIERS = 16;
enum Status : int32_t { ENDED, NEEDS_CALLER, FAULT };

struct Core {
    // What the caller gives
    const Op* ops;
    const int32_t* operands;
    const uint8_t* is_target;
    const Bits* masks;
    Bits* registers;
    uint8_t* lanes_out;  // [lanes], for the caller
    int64_t* executed;
    int num_ops, lanes;
    bool early;  // whether copies and products are made when they are issued, not when they are waited for
    DeviceMemory memory;
    // Of the block
    SharedMemory shared;
    std::vector<int32_t> pcs;
    Lanes active, doing, waiting;  // `waiting`: for the barrier of this number and 1
    std::vector<Lanes> arrived;  // at each barrier
    Groups copies, products;
    int pc = 0;
    bool going = false, caller_did = false;
    std::string message;

    Bits* reg(const Op& op, int which) { return registers + Bits(operands[op.first + which]) * lanes; }
    Bits mask(const Op& op, int which) const { return masks[operands[op.first + which]]; }
    bool is_none(const Op& op, int which) const { return operands[op.first + which] < 0; }

    void begin(int shared_bytes) {
        shared.begin(shared_bytes);
        pcs.assign(lanes, 0);
        for (auto* one : {&active, &doing, &waiting}) one->assign(lanes, 0);
        arrived.assign(MOST_BARRIERS, Lanes(lanes));
        copies.begin(lanes);
        products.begin(lanes);
        going = caller_did = false;
    }

    // The lanes that go on: those farthest behind of all that wait for nothing.
    bool choose() {
        int first = num_ops;
        bool any_waits = false;
        for (int lane = 0; lane < lanes; lane++) {
            any_waits |= waiting[lane];
            if (!waiting[lane]) first = std::min(first, pcs[lane]);
        }
        if (first == num_ops) {
            if (!any_waits) return false;
            for (int lane = 0; lane < lanes; lane++)
                if (waiting[lane]) {
                    pc = pcs[lane] - 1;
                    break;
                }
            throw Fault{"a barrier that not all threads reach", waiting};
        }
        for (int lane = 0; lane < lanes; lane++) active[lane] = !waiting[lane] && pcs[lane] == first;
        pc = first;
        return true;
    }

    // At a barrier, the first operand, of as many threads as the second says, or of all. `extra`: 1 to go on without waiting.
    void arrive(const Op& op) {
        if (active != doing) throw Fault{"a barrier with a guard is not modelled", {}};
        const Bits* numbers = reg(op, 0);
        const Bits* counts = op.count > 1 ? reg(op, 1) : nullptr;
        const size_t first = std::find(active.begin(), active.end(), 1) - active.begin();
        const Bits number = numbers[first], count = counts ? counts[first] : Bits(lanes);
        for (int lane = 0; lane < lanes; lane++)
            if (active[lane] && (numbers[lane] != number || (counts && counts[lane] != count))) throw Fault{"threads that are together at several barriers are not modelled", {}};
        if (number >= MOST_BARRIERS) throw Fault{text("barrier %d of %d", int(number), MOST_BARRIERS), {}};
        Lanes& here = arrived[number];
        Bits have = 0;
        bool ended = false;
        for (int lane = 0; lane < lanes; lane++) {
            if (active[lane]) {
                pcs[lane] = pc + 1;
                here[lane] = 1;
                if (!op.extra) waiting[lane] = uint8_t(number + 1);
            }
            have += here[lane];
            ended |= pcs[lane] == num_ops && !waiting[lane] && !here[lane];
        }
        if (have > count) throw Fault{text("a barrier of %d threads that %d reach", int(count), int(have)), {}};
        if (have < count) {
            bool all_here = !counts;
            for (int lane = 0; lane < lanes; lane++) all_here &= here[lane] || pcs[lane] == num_ops;
            if (all_here && ended) throw Fault{"a barrier that threads never reach, as they have ended", waiting};
            return;
        }
        if (have == Bits(lanes)) {
            shared.pass_barrier();
        } else {
            std::vector<uint8_t> warps(lanes / 32);
            for (int lane = 0; lane < lanes; lane++) warps[lane / 32] |= uint8_t(here[lane] != 0);
            shared.pass_barrier_of(warps);
        }
        for (int lane = 0; lane < lanes; lane++)
            if (waiting[lane] == number + 1) waiting[lane] = 0;
        std::fill(here.begin(), here.end(), 0);
    }

    void whole_warps(int threads) {
        Lanes wrong(lanes);
        bool any_wrong = false;
        for (int begin = 0; begin < lanes; begin += threads) {
            int count = 0;
            for (int lane = begin; lane < begin + threads; lane++) count += doing[lane];
            if (count && count != threads)
                for (int lane = begin; lane < begin + threads; lane++) any_wrong |= wrong[lane] = doing[lane];
        }
        if (any_wrong) throw Fault{"an instruction of whole warps, of which some threads are missing", wrong};
    }

    std::vector<Bits> addresses(const Op& op, int which) {
        std::vector<Bits> found(lanes, Bits(op.offset));
        if (!is_none(op, which)) {
            const Bits* base = reg(op, which);
            for (int lane = 0; lane < lanes; lane++) found[lane] += base[lane];
        }
        return found;
    }

    // A number of its parts, lowest first, and back. The whole is the first operand.
    void pack(const Op& op) {
        const int count = op.count - 1, part = bits_of(op.kind) / count;
        Bits* to = reg(op, 0);
        for (int lane = 0; lane < lanes; lane++) {
            if (!doing[lane]) continue;
            Bits whole = 0;
            for (int k = 0; k < count; k++) whole |= cut(reg(op, k + 1)[lane], part, false) << (k * part);
            to[lane] = whole & mask(op, 0);
        }
    }
    void unpack(const Op& op) {
        const int count = op.count - 1, part = bits_of(op.kind) / count;
        const std::vector<Bits> whole(reg(op, 0), reg(op, 0) + lanes);
        for (int k = 0; k < count; k++) {
            if (is_none(op, k + 1)) continue;
            for (int lane = 0; lane < lanes; lane++)
                if (doing[lane]) reg(op, k + 1)[lane] = cut(whole[lane] >> (k * part), part, false) & mask(op, k + 1);
        }
    }

    // Loads and stores: the first operand is the base of the address, the others the numbers. `extra`: whether it is shared memory.
    void load(const Op& op) {
        int unit = bits_of(op.kind) / 8, count = op.count - 1;
        auto at = addresses(op, 0);
        if (op.extra) shared.check_load(at.data(), unit * count, doing, op.flags);
        else memory.check(at.data(), unit * count, doing, true);
        for (int k = 0; k < count; k++) {
            if (is_none(op, k + 1)) continue;
            Bits *to = reg(op, k + 1), mask_of_register = mask(op, k + 1);
            for (int lane = 0; lane < lanes; lane++) {
                if (!doing[lane]) continue;
                Bits number = op.extra ? shared.load(at[lane] + k * unit, unit) : memory.load(at[lane] + k * unit, unit);
                to[lane] = cut(number, 8 * unit, is_signed(op.kind)) & mask_of_register;
            }
        }
    }
    void store(const Op& op) {
        int unit = bits_of(op.kind) / 8, count = op.count - 1;
        auto at = addresses(op, 0);
        std::vector<const Bits*> numbers;
        for (int k = 0; k < count; k++) numbers.push_back(reg(op, k + 1));
        if (op.extra) store_shared(at, unit, numbers, doing, op.flags);
        else store_global(at, unit, numbers);
    }
    void store_global(const std::vector<Bits>& at, int unit, const std::vector<const Bits*>& numbers) {
        int count = int(numbers.size());
        memory.check(at.data(), unit * count, doing, false);
        for (int k = 0; k < count; k++) {
            auto differs = [&](size_t lane) { return memory.load(at[lane] + k * unit, unit) != (numbers[k][lane] & mask_of(8 * unit)); };
            for (int lane = 0; lane < lanes; lane++)
                if (doing[lane]) memory.store(at[lane] + k * unit, unit, numbers[k][lane]);
            refuse(doing, "race: several threads store different numbers to one place", differs);
        }
    }
    void store_shared(const std::vector<Bits>& at, int unit, const std::vector<const Bits*>& numbers, const Lanes& now, int allowed) {
        shared.begin_copy(at.data(), unit * int(numbers.size()), now, allowed);
        finish_store(at, unit, numbers, now);
    }
    void finish_store(const std::vector<Bits>& at, int unit, const std::vector<const Bits*>& numbers, const Lanes& now) {
        for (size_t k = 0; k < numbers.size(); k++)
            for (int lane = 0; lane < lanes; lane++)
                if (now[lane]) shared.store(at[lane] + k * unit, unit, numbers[k][lane], lane);
        for (size_t k = 0; k < numbers.size(); k++)
            refuse(now, "race: several threads store different numbers to one shared place",
                   [&](size_t lane) { return shared.load(at[lane] + k * unit, unit) != (numbers[k][lane] & mask_of(8 * unit)); });
    }

    // cp.async: to (with `offset`), from (with the offset `extra`), and perhaps how many bytes to read. `kind` is the size.
    void copy(const Op& op) {
        Pending one{pc, doing, copies.committed, addresses(op, 0), {}, Lanes(lanes, 1), {}};
        one.from.assign(reg(op, 1), reg(op, 1) + lanes);
        for (auto& address : one.from) address += op.extra;
        if (op.count > 2) {
            const Bits* given = reg(op, 2);
            for (int lane = 0; lane < lanes; lane++) {
                if (doing[lane] && given[lane] && given[lane] != Bits(op.kind)) throw Fault{"a copy of a part of its size is not modelled", {}};
                one.kept[lane] = given[lane] != 0;
            }
        }
        shared.begin_copy(one.to.data(), op.kind, doing, op.flags);
        if (early) {
            make_copy(one, doing);
            for (int lane = 0; lane < lanes; lane++)  // not to be read yet
                if (doing[lane]) std::memset(&shared.written[one.to[lane]], SharedMemory::BEING_COPIED, op.kind);
        }
        copies.pending.push_back(std::move(one));
    }
    void finish_copy(const Pending& one, const Lanes& now) {
        if (!early) return make_copy(one, now);
        for (int lane = 0; lane < lanes; lane++)
            if (now[lane]) shared.mark_copied(one.to[lane], ops[one.pc].kind, lane);
    }
    void make_copy(const Pending& one, const Lanes& now) {
        int size = ops[one.pc].kind, unit = std::min(size, 8);
        Lanes reading(lanes);
        for (int lane = 0; lane < lanes; lane++) reading[lane] = now[lane] && one.kept[lane];
        memory.check(one.from.data(), size, reading, true);
        std::vector<std::vector<Bits>> parts;
        std::vector<const Bits*> numbers;
        for (int k = 0; k < size / unit; k++) {
            std::vector<Bits> part(lanes);
            for (int lane = 0; lane < lanes; lane++)
                if (reading[lane]) part[lane] = memory.load(one.from[lane] + k * unit, unit);
            parts.push_back(std::move(part));
        }
        for (auto& part : parts) numbers.push_back(part.data());
        finish_store(one.to, unit, numbers, now);
    }

    // mma.sync of m16n8: D, A, B and C are the operands, of 4, `extra` (4 or 2), half of it, and 4 registers. `kind` is of A and B.
    void mma(const Op& op) {
        whole_warps(32);
        const int words = op.extra / 2, depth = words * 16 / (bits_of(op.kind) / 8);
        std::vector<float> left(16 * depth), right(8 * depth), out(16 * 8);
        for (int begin = 0; begin < lanes; begin += 32) {
            if (!doing[begin]) continue;
            for (int half = 0; half < 2; half++)
                held_rows(&left[half * 8 * depth], depth, words, op.kind, [&](int k, int lane) { return reg(op, 4 + 2 * k + half)[begin + lane]; });
            held_rows(right.data(), depth, words, op.kind, [&](int k, int lane) { return reg(op, 4 + op.extra + k)[begin + lane]; });
            multiply(out.data(), left.data(), right.data(), 16, 8, depth);
            for (int half = 0; half < 2; half++)
                for (int e = 0; e < 2; e++) {
                    const int which = 2 * half + e;
                    if (is_none(op, which)) continue;
                    Bits* to = reg(op, which);
                    const Bits* before = reg(op, 4 + op.extra + words + which);
                    for (int lane = 0; lane < 32; lane++) {
                        const float sum = out[(half * 8 + lane / 4) * 8 + lane % 4 * 2 + e];
                        to[begin + lane] = cast<uint32_t>(f32(before[begin + lane]) + sum);
                    }
                }
        }
    }

    // wgmma: the operands are whether D is kept, B's descriptor, A's or its four registers, and D's. `extra`: columns of B. `kind`,
    // `source_kind`: of A and B. `flags`: 1 and 2, whether A and B are turned; 4, whether A is in registers.
    void issue_product(const Op& op) {
        whole_warps(128);
        const bool in_registers = op.flags & 4;
        Pending one{pc, doing, products.committed, {}, {}, {}, {}};
        one.to.assign(reg(op, 1), reg(op, 1) + lanes);
        for (int lane = 0; lane < lanes; lane++) one.kept.push_back(reg(op, 0)[lane] & 1);
        if (in_registers)
            for (int k = 0; k < 4; k++) one.held.insert(one.held.end(), reg(op, 2 + k), reg(op, 2 + k) + lanes);
        else one.from.assign(reg(op, 2), reg(op, 2) + lanes);
        std::vector<float> unused(size_t(std::max(64, op.extra)) * 32);
        for (int begin = 0; begin < lanes; begin += 128) {  // it may be read from now on
            if (!doing[begin]) continue;
            if (!in_registers) shared_rows(unused.data(), shared, one.from[begin], 64, op.flags & 1, op.kind);
            shared_rows(unused.data(), shared, one.to[begin], op.extra, op.flags & 2, op.source_kind);
        }
        if (early) make_product(one, doing);
        products.pending.push_back(std::move(one));
    }
    void finish_product(const Pending& one, const Lanes& now) {
        if (!early) make_product(one, now);
    }
    void make_product(const Pending& one, const Lanes& now) {
        const Op& op = ops[one.pc];
        const bool in_registers = op.flags & 4;
        const int columns = op.extra, depth = 32 / (bits_of(op.kind) / 8), first = in_registers ? 6 : 3;
        std::vector<float> left(64 * depth), right(size_t(columns) * depth), out(size_t(64) * columns);
        for (int begin = 0; begin < lanes; begin += 128) {
            if (!now[begin]) continue;
            if (in_registers) {
                for (int warp = 0; warp < 4; warp++)
                    for (int half = 0; half < 2; half++)
                        held_rows(&left[(warp * 16 + half * 8) * depth], depth, 2, op.kind,
                                  [&](int k, int lane) { return one.held[size_t(2 * k + half) * lanes + begin + warp * 32 + lane]; });
            } else {
                shared_rows(left.data(), shared, one.from[begin], 64, op.flags & 1, op.kind);
            }
            shared_rows(right.data(), shared, one.to[begin], columns, op.flags & 2, op.source_kind);
            multiply(out.data(), left.data(), right.data(), 64, columns, depth);
            for (int which = 0; which < columns / 2; which++) {
                const int j = which / 4, half = which / 2 % 2, e = which % 2;
                Bits* to = reg(op, first + which);
                for (int lane = 0; lane < 128; lane++) {
                    const int row = lane / 32 * 16 + lane % 32 / 4 + 8 * half, column = 8 * j + 2 * (lane % 4) + e;
                    const float before = one.kept[begin + lane] ? f32(to[begin + lane]) : 0.0f;
                    to[begin + lane] = cast<uint32_t>(before + out[size_t(row) * columns + column]);
                }
            }
        }
    }

    // 8 x 8 elements of 16 bits: each eight lanes have the addresses of the rows of one. `extra`: whether they are turned.
    void load_matrices(const Op& op) {
        whole_warps(32);
        const int count = op.count - 1;
        auto at = addresses(op, 0);
        Lanes first(lanes);
        for (int lane = 0; lane < lanes; lane++) first[lane] = doing[lane] && lane % 32 < 8 * count;
        shared.check_load(at.data(), 16, first, op.flags);
        for (int k = 0; k < count; k++) {
            if (is_none(op, k + 1)) continue;
            Bits* to = reg(op, k + 1);
            for (int lane = 0; lane < lanes; lane++) {
                if (!doing[lane]) continue;
                const Bits* rows = &at[lane / 32 * 32 + 8 * k];
                const int g = lane % 32 / 4, t = lane % 4;
                if (op.extra) to[lane] = shared.load(rows[2 * t] + 2 * g, 2) | shared.load(rows[2 * t + 1] + 2 * g, 2) << 16;
                else to[lane] = shared.load(rows[g] + 4 * t, 4);
            }
        }
    }
    void store_matrices(const Op& op) {
        whole_warps(32);
        const int count = op.count - 1;
        auto at = addresses(op, 0);
        Lanes first(lanes);
        std::vector<std::vector<Bits>> parts(4, std::vector<Bits>(lanes));
        for (int lane = 0; lane < lanes; lane++) {
            const int begin = lane / 32 * 32, matrix = lane % 32 / 8, row = lane % 8;
            first[lane] = doing[lane] && matrix < count;
            if (!first[lane]) continue;
            const Bits* held = reg(op, matrix + 1) + begin;
            for (int t = 0; t < 4; t++)
                if (op.extra)  // element j of row r is element r of what lanes hold of row j
                    for (int e = 0; e < 2; e++) parts[t][lane] |= (held[4 * (2 * t + e) + row / 2] >> (16 * (row % 2)) & 0xFFFF) << (16 * e);
                else parts[t][lane] = held[4 * row + t];
        }
        std::vector<const Bits*> numbers;
        for (auto& part : parts) numbers.push_back(part.data());
        store_shared(at, 4, numbers, first, op.flags);
    }

    // The operands are the base, the old number (none: -1), and one or two given. `source_kind`: 1 of shared memory. `extra`: what is done.
    void exchange(const Op& op) {
        enum { ADD_, MIN_, MAX_, AND_, OR_, XOR_, EXCH, CAS };
        const int unit = bits_of(op.kind) / 8;
        auto at = addresses(op, 0);
        std::vector<Bits> before(lanes);
        for (int lane = 0; lane < lanes; lane++) {
            if (!doing[lane]) continue;
            Lanes alone(lanes);
            alone[lane] = 1;
            if (op.source_kind) shared.check_load(at.data(), unit, alone, 0);
            else memory.check(at.data(), unit, alone, true);
            const Bits old = op.source_kind ? shared.load(at[lane], unit) : memory.load(at[lane], unit);
            const Bits given = reg(op, 2)[lane];
            Bits now = given;
            if (op.extra == CAS) {
                now = old == (given & mask_of(8 * unit)) ? reg(op, 3)[lane] : old;
            } else if (op.extra != EXCH) {
                static const int codes[] = {ADD, MIN, MAX, AND, OR, XOR};
                Op simple{};
                simple.code = codes[op.extra], simple.kind = op.kind;
                const Bits* x[] = {&old, &given, nullptr};
                const uint8_t one = 1;
                compute(simple, &now, ~Bits(0), x, &one, 1);
            }
            uint8_t* to = op.source_kind ? &shared.data[at[lane]] : memory.data + (at[lane] - BASE);
            std::memcpy(to, &now, unit);
            before[lane] = old;
        }
        if (!is_none(op, 1))
            for (int lane = 0; lane < lanes; lane++)
                if (doing[lane]) reg(op, 1)[lane] = before[lane] & mask(op, 1);
    }

    // The operands are the result, whether the lane that is read is there (none: -1), the number, the amount and the bounds.
    void shuffle(const Op& op) {
        enum { UP, DOWN, BUTTERFLY, INDEX };
        whole_warps(32);
        std::vector<Bits> found(lanes), is_there(lanes);
        for (int lane = 0; lane < lanes; lane++) {
            const int bounds = int(reg(op, 4)[lane]), clamp = bounds & 31, segment = bounds >> 8 & 31, me = lane % 32;
            const int amount = int(reg(op, 3)[lane] & 31), least = me & segment, most = least | (clamp & ~segment);
            const int source = op.extra == UP ? me - amount : op.extra == DOWN ? me + amount : op.extra == BUTTERFLY ? me ^ amount : least | (amount & ~segment);
            is_there[lane] = op.extra == UP ? source >= most : source <= most;
            found[lane] = reg(op, 2)[lane / 32 * 32 + (is_there[lane] ? source : me)];
        }
        for (int lane = 0; lane < lanes; lane++) {
            if (!doing[lane]) continue;
            reg(op, 0)[lane] = found[lane] & mask(op, 0);
            if (!is_none(op, 1)) reg(op, 1)[lane] = is_there[lane];
        }
    }
    void vote(const Op& op) {
        enum { BALLOT, ALL, ANY };
        whole_warps(32);
        for (int begin = 0; begin < lanes; begin += 32) {
            if (!doing[begin]) continue;
            Bits flags = 0;
            for (int lane = 0; lane < 32; lane++) flags |= (reg(op, 1)[begin + lane] & 1) << lane;
            const Bits found = op.extra == BALLOT ? flags : op.extra == ALL ? flags == 0xFFFFFFFF : flags != 0;
            for (int lane = 0; lane < 32; lane++) reg(op, 0)[begin + lane] = found;
        }
    }

    // Whether the same lanes go on behind it.
    bool step(const Op& op, int count) {
        switch (op.code) {
            case BRA:
            case EXIT:
                for (int lane = 0; lane < lanes; lane++)
                    if (active[lane]) pcs[lane] = doing[lane] ? (op.code == BRA ? op.extra : num_ops) : pc + 1;
                return false;
            case BARRIER: arrive(op); return false;
        }
        if (!count) return true;
        switch (op.code) {
            case NOTHING: break;
            case FENCE: shared.pass_fence(); break;
            case PACK: pack(op); break;
            case UNPACK: unpack(op); break;
            case LOAD: load(op); break;
            case STORE: store(op); break;
            case PARAM:
                for (int k = 0; k < op.count / 2; k++) {
                    const Bits* x[] = {reg(op, op.count / 2 + k), nullptr, nullptr};
                    Op move{};
                    move.code = MOV, move.kind = op.kind;
                    compute(move, reg(op, k), mask(op, k), x, doing.data(), lanes);
                }
                break;
            case COPY: copy(op); break;
            case COMMIT: copies.commit(doing); break;
            case WAIT: copies.wait(op.extra, doing, [&](const Pending& one, const Lanes& now) { finish_copy(one, now); }); break;
            case MMA: mma(op); break;
            case WGMMA: issue_product(op); break;
            case WGMMA_COMMIT: products.commit(doing); break;
            case WGMMA_WAIT: products.wait(op.extra, doing, [&](const Pending& one, const Lanes& now) { finish_product(one, now); }); break;
            case ATOMIC: exchange(op); break;
            case SHUFFLE: shuffle(op); break;
            case VOTE: vote(op); break;
            case LDMATRIX: load_matrices(op); break;
            case STMATRIX: store_matrices(op); break;
            default: {
                const Bits* x[4] = {};
                for (int k = 1; k < op.count; k++) x[k - 1] = reg(op, k);
                compute(op, reg(op, 0), mask(op, 0), x, count == lanes ? nullptr : doing.data(), lanes);
            }
        }
        return true;
    }

    int32_t resume() {
        try {
            while (going || choose()) {
                going = true;
                while (going) {
                    if (caller_did) {
                        caller_did = false;
                    } else {
                        const Op& op = ops[pc];
                        int count = 0;
                        if (op.guard < 0) {
                            doing = active;
                        } else {
                            const Bits* guard = registers + Bits(op.guard) * lanes;
                            for (int lane = 0; lane < lanes; lane++) doing[lane] = active[lane] && (guard[lane] != 0) != bool(op.negated);
                        }
                        for (int lane = 0; lane < lanes; lane++) count += doing[lane];
                        executed[pc] += count;
                        if (op.code == FALLBACK && count) {
                            std::copy(doing.begin(), doing.end(), lanes_out);
                            caller_did = true;
                            return NEEDS_CALLER;
                        }
                        going = op.code == FALLBACK || step(op, count);
                    }
                    if (going && is_target[++pc]) {
                        for (int lane = 0; lane < lanes; lane++)
                            if (active[lane]) pcs[lane] = pc;
                        going = false;
                    }
                }
            }
            for (auto* groups : {&copies, &products})
                for (auto& one : groups->pending) {
                    pc = one.pc;
                    throw Fault{"a copy or product that is not waited for", one.lanes};
                }
            return ENDED;
        } catch (const Fault& fault) {
            message = fault.what;
            const Lanes& lanes_of = fault.lanes.empty() ? doing : fault.lanes;
            std::copy(lanes_of.begin(), lanes_of.end(), lanes_out);
            return FAULT;
        }
    }
};

extern "C" {
Core* ptx_new(const Op* ops, const int32_t* operands, const uint8_t* is_target, const Bits* masks, Bits* registers, uint8_t* lanes_out,
              int64_t* executed, int num_ops, int lanes, int early, uint8_t* data, uint8_t* state, Bits size) {
    auto* core = new Core{};
    core->ops = ops, core->operands = operands, core->is_target = is_target, core->masks = masks, core->registers = registers;
    core->lanes_out = lanes_out, core->executed = executed, core->num_ops = num_ops, core->lanes = lanes, core->early = early;
    core->memory = {data, state, size};
    return core;
}
void ptx_begin(Core* core, int shared_bytes, int first, int end) {  // registers that were never written
    for (int one = first; one < end; one++)
        std::fill_n(core->registers + Bits(one) * core->lanes, core->lanes, POISON & core->masks[one]);
    core->begin(shared_bytes);
}
int ptx_resume(Core* core) { return core->resume(); }
int ptx_pc(const Core* core) { return core->pc; }
const char* ptx_message(const Core* core) { return core->message.c_str(); }
void ptx_delete(Core* core) { delete core; }
}
