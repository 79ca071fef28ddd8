// Copies and products that threads issue, commit in groups, and wait for. The same as `tools/ptx/groups.py`.
#pragma once

#include <deque>

#include "memory.h"

struct Pending {  // a copy or product that is issued and not waited for
    int pc;
    Lanes lanes;
    std::vector<int32_t> groups;  // that each lane had committed
    std::vector<Bits> to, from;
    Lanes kept;  // of copies: which read their source; of products: which add to what is there
    std::vector<Bits> held;
};

struct Groups {
    std::deque<Pending> pending;
    std::vector<int32_t> committed;

    void begin(int lanes) {
        pending.clear();
        committed.assign(lanes, 0);
    }
    void commit(const Lanes& doing) {
        for (size_t lane = 0; lane < doing.size(); lane++) committed[lane] += doing[lane];
    }
    template <class Action>
    void wait(int newest, const Lanes& doing, Action action) {
        for (auto& one : pending) {
            Lanes now(doing.size());
            bool any = false, left = false;
            for (size_t lane = 0; lane < doing.size(); lane++) {
                now[lane] = one.lanes[lane] && doing[lane] && one.groups[lane] < committed[lane] - newest;
                any |= now[lane];
                left |= one.lanes[lane] && !now[lane];
            }
            if (!any) continue;
            action(one, now);
            for (size_t lane = 0; lane < doing.size(); lane++) one.lanes[lane] &= !now[lane];
            if (!left) one.pc = -1;
        }
        std::erase_if(pending, [](const Pending& one) { return one.pc < 0; });
    }
};
