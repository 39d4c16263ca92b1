// Top-k updates of a step as kernels run them: which key is admitted to a top-k slot. Bodies are for a group
// of threads; a plain C++ compiler runs them as a group of one. The CPU backend has its own
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

/// A key in a top-k slot, as it ranks at some query. slot -1: none.
struct ranked_slot {
    double value = 0.0;
    position_t position = 0;
    std::int32_t slot = -1;
};

/// A gate with a keep part beside it, whose keys have slots outside of gate and budget.
template <class Gate, class Keep>
struct held_gate {
    Gate gate;
    Keep keep;

    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const HeadParams& head_params) const {
        return gate.open(score, head_params);
    }
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return keep.keeps(t); }
};
template <class Gate>
inline constexpr bool holds_keys = requires(const Gate& gate, position_t t) {
    gate.keeps(t);
};

/// Whether key t has a slot for its position alone.
template <class Gate>
KVPOLICY_HOST_DEVICE constexpr bool holds([[maybe_unused]] const Gate& gate, [[maybe_unused]] position_t t) {
    if constexpr (holds_keys<Gate>) {
        return gate.keeps(t);
    } else {
        return false;
    }
}

/// Whether a is evicted before b; an empty slot is not.
KVPOLICY_HOST_DEVICE inline bool gives_way(const ranked_slot& a, const ranked_slot& b) {
    if (a.slot < 0 || b.slot < 0) {
        return b.slot < 0 && a.slot >= 0;
    }
    return ranks_before(b.value, b.position, a.value, a.position);
}

/// Scores and positions of one head's top-k slots. The functions below take this or another type with
/// head_params, rank() and at().
struct head_slots {
    HeadParams head_params;
    position_t rebase_limit = kvpolicy::rebase_limit;
    float* score = nullptr;          // [budget], from slot 0 on
    position_t* position = nullptr;  // [budget]

    KVPOLICY_HOST_DEVICE ranked_slot rank(float s, position_t t, std::int32_t slot, position_t q) const {
        return {rank_value(head_params, s, t, q, rebase_limit), t, slot};
    }
    KVPOLICY_HOST_DEVICE ranked_slot at(std::int32_t slot, position_t q) const {
        return rank(score[slot], position[slot], slot, q);
    }
};

/// Slots some of whose keys do not compete; slot -1 is the record of a tile without competitors.
template <class Slots, class Gate>
struct candidate_slots : Slots {
    Gate gate;
    KVPOLICY_HOST_DEVICE ranked_slot at(std::int32_t slot, position_t q) const {
        if (slot < 0) {
            return {};
        }
        const ranked_slot one = Slots::at(slot, q);
        return gate.keeps(one.position) ? ranked_slot{} : one;
    }
};
template <class Slots, class Gate>
KVPOLICY_HOST_DEVICE auto competing(const Slots& top_k_slots, [[maybe_unused]] const Gate& gate) {
    if constexpr (holds_keys<Gate>) {
        return candidate_slots<Slots, Gate>{top_k_slots, gate};
    } else {
        return top_k_slots;
    }
}

/// The worst of a tile of `num_long_range` slots at query q. `changed` stands for the key in its slot.
template <class Group, class Slots>
KVPOLICY_HOST_DEVICE ranked_slot worst_of_tile(const Group& group, const Slots& top_k_slots,
                                               std::int32_t tile, std::int32_t num_long_range, position_t q,
                                               const ranked_slot& changed = {}) {
    const std::int32_t end =
        num_long_range - tile * slot_tile < slot_tile ? num_long_range : (tile + 1) * slot_tile;
    ranked_slot worst;
    for (std::int32_t p = tile * slot_tile + group.rank(); p < end; p += group.size()) {
        const ranked_slot one = p == changed.slot ? changed : top_k_slots.at(p, q);
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return group.worst(worst);
}

/// Records the worst of every stride-th tile from `first` on, where `record` is not null, and returns the
/// worst of them.
template <class Group, class Slots>
KVPOLICY_HOST_DEVICE ranked_slot worst_of_tiles(const Group& group, const Slots& top_k_slots,
                                                std::int32_t* record, std::int32_t first, std::int32_t stride,
                                                std::int32_t num_long_range, position_t q) {
    ranked_slot worst;
    for (std::int32_t tile = first; tile < tiles_of_slots(num_long_range); tile += stride) {
        const ranked_slot one = worst_of_tile(group, top_k_slots, tile, num_long_range, q);
        if (record != nullptr && group.rank() == 0) {
            record[tile] = one.slot;
        }
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return worst;
}

/// The worst of `num_long_range` slots once `changed` is in its slot, from the tiles' records; updates the
/// record of its tile. Records are those of query q's priorities.
template <class Group, class Slots>
KVPOLICY_HOST_DEVICE ranked_slot worst_after(const Group& group, const Slots& top_k_slots,
                                             std::int32_t* record, std::int32_t num_long_range, position_t q,
                                             const ranked_slot& changed) {
    const std::int32_t tile = changed.slot / slot_tile;
    const ranked_slot fresh = worst_of_tile(group, top_k_slots, tile, num_long_range, q, changed);
    if (group.rank() == 0) {
        record[tile] = fresh.slot;
    }
    ranked_slot worst;
    for (std::int32_t t = group.rank(); t < tiles_of_slots(num_long_range); t += group.size()) {
        const ranked_slot one = t == tile ? fresh : top_k_slots.at(record[t], q);
        if (gives_way(one, worst)) {
            worst = one;
        }
    }
    return group.worst(worst);
}

/// The worst slots beside a known one, of its tile and of all others: worst_after(), as far as it can be
/// known before what comes into that slot.
struct next_victims {
    ranked_slot in_tile, elsewhere;
};
template <class Group, class Slots>
KVPOLICY_HOST_DEVICE next_victims find_next_victims(const Group& group, const Slots& top_k_slots,
                                                    const std::int32_t* record, std::int32_t num_long_range,
                                                    position_t q, std::int32_t known) {
    const std::int32_t tile = known / slot_tile, end = num_long_range - tile * slot_tile < slot_tile
                                                           ? num_long_range
                                                           : (tile + 1) * slot_tile;
    next_victims victims;
    for (std::int32_t p = tile * slot_tile + group.rank(); p < end; p += group.size()) {
        const ranked_slot one = p == known ? ranked_slot{} : top_k_slots.at(p, q);
        if (gives_way(one, victims.in_tile)) {
            victims.in_tile = one;
        }
    }
    for (std::int32_t t = group.rank(); t < tiles_of_slots(num_long_range); t += group.size()) {
        const ranked_slot one = t == tile ? ranked_slot{} : top_k_slots.at(record[t], q);
        if (gives_way(one, victims.elsewhere)) {
            victims.elsewhere = one;
        }
    }
    return {group.worst(victims.in_tile), group.worst(victims.elsewhere)};
}
/// worst_after() from them.
template <class Group>
KVPOLICY_HOST_DEVICE ranked_slot worst_after(const Group& group, const next_victims& victims,
                                             std::int32_t* record, const ranked_slot& changed) {
    const ranked_slot fresh = gives_way(victims.in_tile, changed) ? victims.in_tile : changed;
    if (group.rank() == 0) {
        record[changed.slot / slot_tile] = fresh.slot;
    }
    return gives_way(victims.elsewhere, fresh) ? victims.elsewhere : fresh;
}

/// What one step does to the rows of one head.
struct step_decision {
    std::int32_t used = 0;            ///< rows in use before
    std::int32_t newest = 0;          ///< the row that the new token gets
    std::int32_t promoted = -1;       ///< the row that u, the key that leaves the window, gets; or -1
    std::int32_t num_long_range = 0;  ///< top-k slots in use afterwards
    std::int32_t known = -1;          ///< the worst slot, or -1 where it must be searched
    bool full = false;  ///< u competes with the worst slot: resolve_eviction() has the last word
    bool replaced = false;
    bool num_protected = false;  ///< u has its slot for its position
    position_t leaving = 0;      ///< u
};

/// The worst slot at query q, if `victim`, what the step before left as such, still is; else -1.
KVPOLICY_HOST_DEVICE inline std::int32_t known_worst(const HeadParams& head_params, position_t rebase_limit,
                                                     position_t q, std::int32_t victim) {
    return head_params.decay_step == 1 && priority_base(q, rebase_limit) == priority_base(q - 1, rebase_limit)
               ? victim
               : -1;
}

/// Query `q`, the sequence's length, brings a key. `victim` is what the step before left as the worst slot;
/// `score` is u's; `num_protected` of the `num_long_range` slots do not compete. All of the decision but the
/// top-k update for the worst slot, if there is one.
template <class Gate>
KVPOLICY_HOST_DEVICE step_decision begin_step(const HeadParams& head_params, const Gate& gate,
                                              position_t rebase_limit, position_t q,
                                              std::int32_t num_long_range, std::int32_t victim, float score,
                                              std::int32_t num_protected = 0) {
    const HeadRows layout{head_params.sinks, head_params.window};
    step_decision step;
    step.used = layout.used(q, num_long_range);
    step.newest = layout.recent(q);
    step.num_long_range = num_long_range;
    step.leaving = q - head_params.window;
    if (step.leaving < head_params.sinks) {
        return step;
    }
    if (holds(gate, step.leaving)) {
        step.promoted =
            layout.slot(step.num_long_range++);  // perhaps in a tile that has no record yet: `known` stays -1
        step.num_protected = true;
        return step;
    }
    step.known = known_worst(head_params, rebase_limit, q, victim);
    if (head_params.budget == 0 || !gate.open(score, head_params)) {
        return step;
    }
    step.full = num_long_range - num_protected >= head_params.budget;
    if (!step.full) {
        step.promoted = layout.slot(step.num_long_range++);
        step.known = -1;
    }
    return step;
}

/// The top-k update of u, as it ranks at the query, for the worst slot.
KVPOLICY_HOST_DEVICE inline void resolve_eviction(step_decision& step, const HeadParams& head_params,
                                                  const ranked_slot& candidate, const ranked_slot& worst) {
    step.known = worst.slot;
    step.replaced = ranks_before(candidate.value, candidate.position, worst.value, worst.position);
    if (step.replaced) {
        step.promoted = HeadRows{head_params.sinks, head_params.window}.slot(worst.slot);
    }
}

/// The worst slot for the next step to know, after this one; -1 where it has to search. Only one group may
/// call it, and only once the update of u is done; the rows need not have changed yet.
template <class Group, class Slots>
KVPOLICY_HOST_DEVICE std::int32_t next_victim(const Group& group, const Slots& top_k_slots,
                                              std::int32_t* record, const step_decision& step,
                                              const ranked_slot& candidate, position_t q) {
    if (top_k_slots.head_params.decay_step != 1 || !step.replaced) {
        return top_k_slots.head_params.decay_step == 1 ? step.known : -1;
    }
    ranked_slot admitted = candidate;
    admitted.slot = step.known;
    return worst_after(group, top_k_slots, record, step.num_long_range, q, admitted).slot;
}

/// The same where find_next_victims() the worst slot, if it is known, have been found.
template <class Group>
KVPOLICY_HOST_DEVICE std::int32_t next_victim(const Group& group, const HeadParams& head_params,
                                              const next_victims& victims, std::int32_t* record,
                                              const step_decision& step, const ranked_slot& candidate) {
    if (head_params.decay_step != 1 || !step.replaced) {
        return head_params.decay_step == 1 ? step.known : -1;
    }
    ranked_slot admitted = candidate;
    admitted.slot = step.known;
    return worst_after(group, victims, record, admitted).slot;
}

/// A group of one thread. All threads of a group call its members together: rank() below size(); the worst of
/// all; sync() shows what they wrote to each other.
struct single_thread_group {
    KVPOLICY_HOST_DEVICE static std::int32_t rank() { return 0; }
    KVPOLICY_HOST_DEVICE static std::int32_t size() { return 1; }
    KVPOLICY_HOST_DEVICE static ranked_slot worst(const ranked_slot& mine) { return mine; }
    KVPOLICY_HOST_DEVICE static void sync() {}
};

}  // namespace kvpolicy::detail

#if defined(__NVCC__) && defined(__CUDACC__)
#pragma nv_diagnostic pop
#endif
