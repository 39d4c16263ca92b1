// Top-k updates as kernels run them: which key is admitted to a top-k slot. Bodies are for a group of
// threads; a plain C++ compiler runs them as a group of one. The CPU backend has its own
// (caches/host/entries.hpp, masks/top_k_set.hpp); tests require identical results.
//
// A step does not search all slots for the worst key. Slots are cut into tiles, and a cache records the worst
// slot of each tile. An admitted key changes one tile's record; the worst of all is found among the records.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

// An error of nvcc's in here: a gate's open() or a part's keeps() lacks KVPOLICY_HOST_DEVICE
// (policies/compose.hpp).
#if defined(__NVCC__) && defined(__CUDACC__)
#pragma nv_diagnostic push
#pragma nv_diag_error 20011, 20013, 20014, 20015
#endif

namespace kvpolicy::detail {

/// A key in a top-k slot, as it ranks at some query. place -1: none.
struct ranked_place {
    double value = 0.0;
    position_t position = 0;
    std::int32_t place = -1;
};

/// A gate with a keep part beside it, whose keys have places outside of gate and budget.
template <class Gate, class Keep>
struct held_gate {
    Gate gate;
    Keep keep;

    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadRule& rule) const {
        return gate.open(score, rule);
    }
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return keep.keeps(t); }
};
template <class Gate>
inline constexpr bool holds_keys = requires(const Gate& gate, position_t t) {
    gate.keeps(t);
};

/// Whether key t has a place for its position alone.
template <class Gate>
KVPOLICY_HOST_DEVICE constexpr bool holds([[maybe_unused]] const Gate& gate, [[maybe_unused]] position_t t) {
    if constexpr (holds_keys<Gate>) {
        return gate.keeps(t);
    } else {
        return false;
    }
}

/// Whether a evicts_before b; an empty slot never does.
KVPOLICY_HOST_DEVICE inline bool gives_way(const ranked_place& a, const ranked_place& b) {
    if (a.place < 0 || b.place < 0) {
        return b.place < 0 && a.place >= 0;
    }
    return ranks_before(b.value, b.position, a.value, a.position);
}

/// Scores and positions of one head's top-k slots. What follows takes this or another type with rule, rank()
/// and at().
struct head_places {
    HeadRule rule;
    position_t rebase_limit = kvpolicy::rebase_limit;
    float* score = nullptr;          // [budget], from place 0 on
    position_t* position = nullptr;  // [budget]

    KVPOLICY_HOST_DEVICE ranked_place rank(float s, position_t t, std::int32_t place, position_t q) const {
        return {rank_value(rule, s, t, q, rebase_limit), t, place};
    }
    KVPOLICY_HOST_DEVICE ranked_place at(std::int32_t place, position_t q) const {
        return rank(score[place], position[place], place, q);
    }
};

/// Places some of whose keys do not compete; place -1 is the record of a tile without competitors.
template <class Places, class Gate>
struct contested_places : Places {
    Gate gate;
    KVPOLICY_HOST_DEVICE ranked_place at(std::int32_t place, position_t q) const {
        if (place < 0) {
            return {};
        }
        const ranked_place one = Places::at(place, q);
        return gate.keeps(one.position) ? ranked_place{} : one;
    }
};
template <class Places, class Gate>
KVPOLICY_HOST_DEVICE auto contested(const Places& places, [[maybe_unused]] const Gate& gate) {
    if constexpr (holds_keys<Gate>) {
        return contested_places<Places, Gate>{places, gate};
    } else {
        return places;
    }
}

/// The worst of a tile of `kept` places at query q. `changed` stands for what its place holds.
template <class Group, class Places>
KVPOLICY_HOST_DEVICE ranked_place worst_of_tile(const Group& group, const Places& places, std::int32_t tile,
                                                std::int32_t kept, position_t q,
                                                const ranked_place& changed = {}) {
    const std::int32_t end = kept - tile * place_tile < place_tile ? kept : (tile + 1) * place_tile;
    ranked_place worst;
    for (std::int32_t p = tile * place_tile + group.rank(); p < end; p += group.size()) {
        const ranked_place one = p == changed.place ? changed : places.at(p, q);
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return group.worst(worst);
}

/// Records the worst of every stride-th tile from `first` on, where `record` is not null, and returns the
/// worst of them.
template <class Group, class Places>
KVPOLICY_HOST_DEVICE ranked_place worst_of_tiles(const Group& group, const Places& places,
                                                 std::int32_t* record, std::int32_t first,
                                                 std::int32_t stride, std::int32_t kept, position_t q) {
    ranked_place worst;
    for (std::int32_t tile = first; tile < tiles_of_places(kept); tile += stride) {
        const ranked_place one = worst_of_tile(group, places, tile, kept, q);
        if (record != nullptr && group.rank() == 0) {
            record[tile] = one.place;
        }
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return worst;
}

/// The worst of `kept` places once `changed` is in its place, from the tiles' records; updates the record of
/// its tile. Records are those of query q's priorities.
template <class Group, class Places>
KVPOLICY_HOST_DEVICE ranked_place worst_after(const Group& group, const Places& places, std::int32_t* record,
                                              std::int32_t kept, position_t q, const ranked_place& changed) {
    const std::int32_t tile = changed.place / place_tile;
    const ranked_place fresh = worst_of_tile(group, places, tile, kept, q, changed);
    if (group.rank() == 0) {
        record[tile] = fresh.place;
    }
    ranked_place worst;
    for (std::int32_t t = group.rank(); t < tiles_of_places(kept); t += group.size()) {
        const ranked_place one = t == tile ? fresh : places.at(record[t], q);
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return group.worst(worst);
}

/// The worst slots beside a known one, of its tile and of all others: worst_after(), as far as it can be
/// known before what comes into that place.
struct place_rivals {
    ranked_place in_tile, elsewhere;
};
template <class Group, class Places>
KVPOLICY_HOST_DEVICE place_rivals rivals_of(const Group& group, const Places& places,
                                            const std::int32_t* record, std::int32_t kept, position_t q,
                                            std::int32_t known) {
    const std::int32_t tile = known / place_tile,
                       end = kept - tile * place_tile < place_tile ? kept : (tile + 1) * place_tile;
    place_rivals rivals;
    for (std::int32_t p = tile * place_tile + group.rank(); p < end; p += group.size()) {
        const ranked_place one = p == known ? ranked_place{} : places.at(p, q);
        if (gives_way(one, rivals.in_tile)) {
            rivals.in_tile = one;
        }
    }
    for (std::int32_t t = group.rank(); t < tiles_of_places(kept); t += group.size()) {
        const ranked_place one = t == tile ? ranked_place{} : places.at(record[t], q);
        if (gives_way(one, rivals.elsewhere)) {
            rivals.elsewhere = one;
        }
    }
    return {group.worst(rivals.in_tile), group.worst(rivals.elsewhere)};
}
/// worst_after() from them.
template <class Group>
KVPOLICY_HOST_DEVICE ranked_place worst_after(const Group& group, const place_rivals& rivals,
                                              std::int32_t* record, const ranked_place& changed) {
    const ranked_place fresh = gives_way(rivals.in_tile, changed) ? rivals.in_tile : changed;
    if (group.rank() == 0) {
        record[changed.place / place_tile] = fresh.place;
    }
    return gives_way(rivals.elsewhere, fresh) ? rivals.elsewhere : fresh;
}

/// What one step does to the rows of one head.
struct step_decision {
    std::int32_t used = 0;       ///< rows in use before
    std::int32_t newest = 0;     ///< the row that the new token gets
    std::int32_t promoted = -1;  ///< the row that u, the key that leaves the window, gets; or -1
    std::int32_t kept = 0;       ///< top-k slots in use afterwards
    std::int32_t known = -1;     ///< the worst slot, or -1 where it must be searched
    bool full = false;           ///< u competes with the worst slot: settle_step() has the last word
    bool replaced = false;
    bool pinned = false;     ///< u has its place for its position
    position_t leaving = 0;  ///< u
};

/// The worst slot at query q, if `victim`, what the step before left as such, still is; else -1.
KVPOLICY_HOST_DEVICE inline std::int32_t known_worst(const HeadRule& rule, position_t rebase_limit,
                                                     position_t q, std::int32_t victim) {
    return rule.decay_step == 1 && priority_base(q, rebase_limit) == priority_base(q - 1, rebase_limit)
               ? victim
               : -1;
}

/// Query `q`, the slot's length, brings a key. `victim` is what the step before left as the worst slot;
/// `score` is u's; `pinned` of the `kept` places do not compete. All of the decision but the top-k update for
/// the worst slot, if there is one.
template <class Gate>
KVPOLICY_HOST_DEVICE step_decision begin_step(const HeadRule& rule, const Gate& gate, position_t rebase_limit,
                                              position_t q, std::int32_t kept, std::int32_t victim,
                                              float score, std::int32_t pinned = 0) {
    const HeadRows layout{rule.sinks, rule.window};
    step_decision step;
    step.used = layout.used(q, kept);
    step.newest = layout.recent(q);
    step.kept = kept;
    step.leaving = q - rule.window;
    if (step.leaving < rule.sinks) {
        return step;
    }
    if (holds(gate, step.leaving)) {
        step.promoted =
            layout.place(step.kept++);  // perhaps in a tile that has no record yet: `known` stays -1
        step.pinned = true;
        return step;
    }
    step.known = known_worst(rule, rebase_limit, q, victim);
    if (rule.budget == 0 || !gate.open(score, rule)) {
        return step;
    }
    step.full = kept - pinned >= rule.budget;
    if (!step.full) {
        step.promoted = layout.place(step.kept++);
        step.known = -1;
    }
    return step;
}

/// The top-k update of u, as it ranks at the query, for the worst slot.
KVPOLICY_HOST_DEVICE inline void settle_step(step_decision& step, const HeadRule& rule,
                                             const ranked_place& newcomer, const ranked_place& worst) {
    step.known = worst.place;
    step.replaced = ranks_before(newcomer.value, newcomer.position, worst.value, worst.position);
    if (step.replaced) {
        step.promoted = HeadRows{rule.sinks, rule.window}.place(worst.place);
    }
}

/// The worst slot for the next step to know, after this one; -1 where it has to search. Only one group may
/// call it, and only once u has been settled; the rows need not have changed yet.
template <class Group, class Places>
KVPOLICY_HOST_DEVICE std::int32_t next_victim(const Group& group, const Places& places, std::int32_t* record,
                                              const step_decision& step, const ranked_place& newcomer,
                                              position_t q) {
    if (places.rule.decay_step != 1 || !step.replaced) {
        return places.rule.decay_step == 1 ? step.known : -1;
    }
    ranked_place winner = newcomer;
    winner.place = step.known;
    return worst_after(group, places, record, step.kept, q, winner).place;
}

/// The same where rivals_of() the worst slot, if it is known, have been found.
template <class Group>
KVPOLICY_HOST_DEVICE std::int32_t next_victim(const Group& group, const HeadRule& rule,
                                              const place_rivals& rivals, std::int32_t* record,
                                              const step_decision& step, const ranked_place& newcomer) {
    if (rule.decay_step != 1 || !step.replaced) {
        return rule.decay_step == 1 ? step.known : -1;
    }
    ranked_place winner = newcomer;
    winner.place = step.known;
    return worst_after(group, rivals, record, winner).place;
}

/// What a chunk of tokens leaves of one head's top-k updates, in memory of the caller's. Keys have names, as
/// in the host's chunk plan: a row r of the cache is r, token j of the chunk is rows + j, where `rows` is the
/// head's capacity.
struct chunk_places {
    head_places of;                    // copies of the cache's, which the top-k updates change
    std::int32_t* holder = nullptr;    // [budget]: the name of the key in each place
    std::int32_t* record = nullptr;    // [tiles_of_places(budget)]
    expiry_t* past_expiry = nullptr;   // of the cache's rows
    expiry_t* chunk_expiry = nullptr;  // of the chunk's tokens
};

/// The first threads of a group that wait take the free slots, all at once; keys that stay for their position
/// get slots, too.
template <class Group, class Gate, class Put>
KVPOLICY_HOST_DEVICE void fill_free_places(const Group& group, [[maybe_unused]] const Gate& gate,
                                           const chunk_places& chunk, std::int32_t& kept,
                                           [[maybe_unused]] std::int32_t& outside, bool& waits,
                                           [[maybe_unused]] bool stays, Put&& put) {
    // The first of those that wait take the free places, all at once.
    std::int32_t before = group.before(waits), waiting = group.count(waits);
    std::int32_t free = chunk.of.rule.budget - kept;
    if constexpr (holds_keys<Gate>) {
        free += outside;
    }
    const bool takes = waits && before < free;
    std::int32_t taken = waiting < free ? waiting : free;
    if constexpr (holds_keys<Gate>) {
        before = group.before(takes || stays);
        const std::int32_t staying = group.count(stays), tiles = tiles_of_places(kept);
        outside += staying;
        taken += staying;
        if (group.rank() == 0) {  // tiles of keys that do not compete
            for (std::int32_t tile = tiles; tile < tiles_of_places(kept + taken); ++tile) {
                chunk.record[tile] = -1;
            }
        }
    }
    if (takes || stays) {
        put(kept + before);
    }
    group.sync();
    kept += taken;
    waits = waits && !takes;
}

/// Runs the top-k updates of a chunk of `tokens` tokens from position `base` on. score(j) is that of the key
/// that leaves the window at token j; name(u) of key u. Expiries, relative to `base`, have been filled in for
/// keys that leave with their window. Returns the places in use; `pinned`: those of keys that do not compete,
/// before and after.
///
/// With decay step 1 the worst key only gets better, so a group looks at as many candidates at once as it has
/// threads, and only those that beat the worst take their turn.
template <class Group, class Gate, class Score, class Name>
KVPOLICY_HOST_DEVICE std::int32_t contest_chunk(const Group& group, const chunk_places& chunk,
                                                const Gate& gate, position_t base, std::int32_t tokens,
                                                std::int32_t kept, Score&& score, Name&& name,
                                                std::int32_t rows, std::int32_t* pinned = nullptr) {
    const HeadRule& rule = chunk.of.rule;
    const position_t limit = chunk.of.rebase_limit;
    const bool still = rule.decay_step == 1;
    const position_t first =
        position_t{rule.sinks} + rule.window - base;  // the first token at which a key leaves
    if ((rule.budget == 0 && !holds_keys<Gate>) || first >= tokens) {
        return kept;
    }
    const auto places = contested(chunk.of, gate);
    [[maybe_unused]] std::int32_t outside = pinned != nullptr ? *pinned : 0;
    ranked_place worst;
    position_t known_for = -1;  // the base of priorities that `worst` and the records belong to
    for (std::int32_t j = first > 0 ? static_cast<std::int32_t>(first) : 0; j < tokens;) {
        // A batch has one base of priorities; a step that ranks anew has one candidate.
        const position_t q = base + j, next_base = priority_base(q, limit) + limit;
        position_t count = still ? group.size() : 1;
        count = count < tokens - j ? count : tokens - j;
        count = count < next_base - q ? count : next_base - q;
        ranked_place mine;
        float my_score = 0.0f;
        bool waits = group.rank() < count;
        [[maybe_unused]] bool stays = false;
        if (waits) {
            const position_t u = q + group.rank() - rule.window;
            my_score = score(j + group.rank());
            mine = chunk.of.rank(my_score, u, -1, q + group.rank());
            stays = holds(gate, u);
            waits = !stays && rule.budget != 0 && gate.open(my_score, rule);
        }
        const auto put = [&](std::int32_t place, position_t u, float s) {
            const std::int32_t key = name(u);
            (key < rows ? chunk.past_expiry[key] : chunk.chunk_expiry[key - rows]) = never;
            chunk.holder[place] = key;
            chunk.of.score[place] = s;
            chunk.of.position[place] = u;
        };
        if (holds_keys<Gate> || kept < rule.budget) {
            fill_free_places(group, gate, chunk, kept, outside, waits, stays, [&](std::int32_t place) {
                put(place, q + group.rank() - rule.window, my_score);
            });
        }
        while (group.count(waits) != 0) {
            if (!still || known_for != priority_base(q, limit)) {
                worst = worst_of_tiles(group, places, chunk.record, 0, 1, kept, q);
                group.sync();
                known_for = priority_base(q, limit);
            }
            const std::int32_t winner =
                group.first(waits && ranks_before(mine.value, mine.position, worst.value, worst.position));
            if (winner >= group.size()) {
                break;
            }
            const float s = group.from(winner, my_score);
            const std::int32_t place = worst.place;
            if (group.rank() == 0) {
                const std::int32_t loser = chunk.holder[place];
                (loser < rows ? chunk.past_expiry[loser] : chunk.chunk_expiry[loser - rows]) = j + winner;
                put(place, q + winner - rule.window, s);
            }
            group.sync();
            if (still) {
                worst = worst_after(group, places, chunk.record, kept, q, chunk.of.at(place, q));
                group.sync();
            }
            waits = waits && group.rank() > winner;
        }
        j += static_cast<std::int32_t>(count);
    }
    if constexpr (holds_keys<Gate>) {
        if (pinned != nullptr) {
            *pinned = outside;
        }
    }
    return kept;
}

/// A group of one thread. All threads of a group call its members together: rank() below size(); the worst of
/// all; the first thread for which something is so, or size(), how many threads before this one it is so for,
/// and for how many in all; the number of one of them; sync() shows what they wrote to each other.
struct lone_group {
    KVPOLICY_HOST_DEVICE static std::int32_t rank() { return 0; }
    KVPOLICY_HOST_DEVICE static std::int32_t size() { return 1; }
    KVPOLICY_HOST_DEVICE static ranked_place worst(const ranked_place& mine) { return mine; }
    KVPOLICY_HOST_DEVICE static std::int32_t first(bool is) { return is ? 0 : 1; }
    KVPOLICY_HOST_DEVICE static std::int32_t before(bool /*is*/) { return 0; }
    KVPOLICY_HOST_DEVICE static std::int32_t count(bool is) { return is ? 1 : 0; }
    KVPOLICY_HOST_DEVICE static float from(std::int32_t /*rank*/, float mine) { return mine; }
    KVPOLICY_HOST_DEVICE static void sync() {}
};

}  // namespace kvpolicy::detail

#if defined(__NVCC__) && defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
