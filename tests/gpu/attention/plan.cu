// The plan of attention calls against a naive one: for every super-tile, which rows are in the list, in which
// order, and what through and known say of every query tile.
#include <kvpolicy/attention/cuda/kernel_plan.cuh>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;
namespace backend = kvpolicy::cuda_backend;

namespace {

/// One segment's numbers, [B][H][rows].
struct Segment {
    std::int32_t rows = 0, first = 0;
    std::vector<std::int32_t> position;
    std::vector<expiry_t> expiry;
    std::vector<float> log_bias;
    std::vector<std::int32_t> lengths;  // empty: all
};

struct Case {
    std::int32_t batch = 1, heads = 1, queries = 1, tile_q = 16, boundary_q = 0;
    Segment past, self;
    std::vector<std::int32_t> lengths, starts, edges, bias_from;
    bool triangular = false;
    std::int32_t whole = 0;
};

struct Row {
    std::int32_t row, begin, expiry, from;
    float bias;
};

/// The rows that queries [first, first + span) of head h of sequence b see, straight from the definition.
std::vector<Row> naive(const Case& c, std::int32_t b, std::int32_t h, std::int64_t first, std::int32_t span) {
    std::vector<Row> rows;
    const std::int64_t length = c.lengths.empty() ? c.queries : c.lengths[static_cast<std::size_t>(b)];
    const std::int64_t start = c.starts.empty() ? 0 : c.starts[static_cast<std::size_t>(b)];
    for (const Segment* s : {&c.past, &c.self}) {
        const bool own = s == &c.self;
        std::int64_t count = own                  ? length
                             : s->lengths.empty() ? s->rows
                                                  : s->lengths[static_cast<std::size_t>(b)];
        count = std::min<std::int64_t>(count, s->rows);
        for (std::int64_t t = 0; t < count; ++t) {
            const auto at = static_cast<std::size_t>((std::int64_t{b} * c.heads + h) * s->rows + t);
            const std::int64_t position =
                !s->position.empty() ? s->position[at] : (own ? start : std::int64_t{s->first}) + t;
            std::int32_t begin = span, seen_until = 0;
            bool seen = false;
            for (std::int32_t i = 0; i < span && first + i < length; ++i) {
                const std::int64_t p = start + first + i;
                bool sees = position <= p && (s->expiry.empty() || p < s->expiry[at]);
                for (std::size_t e = 0; sees && e + 1 < c.edges.size(); ++e) {
                    sees = (c.edges[e] <= p && p < c.edges[e + 1]) == (c.edges[e] <= t && t < c.edges[e + 1]);
                }
                if (sees) {
                    begin = seen ? begin : i;
                    seen = true;
                    seen_until = i + 1;
                }
            }
            if (!seen) {
                continue;
            }
            // The plan says super_q for whatever outlives the super-tile or the sequence.
            const std::int64_t expiry = s->expiry.empty() ? never : s->expiry[at];
            std::int64_t end = expiry == never ? span : expiry - start - first;
            if (!c.edges.empty()) {
                end =
                    std::min<std::int64_t>(end, *std::upper_bound(c.edges.begin(), c.edges.end(), t) - first);
            }
            const auto limit = static_cast<std::int32_t>(std::min<std::int64_t>(end, span));
            CHECK(limit >= seen_until);
            Row row{own ? static_cast<std::int32_t>(c.past.rows + t) : static_cast<std::int32_t>(t), begin,
                    limit, span, 0.0f};
            if (!s->log_bias.empty()) {
                row.bias = s->log_bias[at];
                const std::int64_t from =
                    position + (c.bias_from.empty() ? 0 : c.bias_from[static_cast<std::size_t>(h)]) - start -
                    first;
                row.from = static_cast<std::int32_t>(std::clamp<std::int64_t>(from, 0, span));
            }
            rows.push_back(row);
        }
    }
    std::stable_sort(rows.begin(), rows.end(), [span](const Row& a, const Row& b) {
        const auto part = [span](const Row& r) { return r.begin == 0 ? 0 : r.expiry == span ? 1 : 2; };
        if (part(a) != part(b)) {
            return part(a) < part(b);
        }
        return a.begin == 0 ? a.expiry > b.expiry : a.begin < b.begin;
    });
    return rows;
}

template <class T>
plane_view<const T> plane_of(const Device<T>& device, const Case& c, std::int32_t rows) {
    return device.size() == 0 ? plane_view<const T>{}
                              : view_bhs<const T>(device.data(), c.batch, c.heads, rows);
}

struct SegmentOnDevice {
    Device<std::int32_t> position;
    Device<expiry_t> expiry;
    Device<float> log_bias;
    Device<std::int32_t> lengths;
    explicit SegmentOnDevice(const Segment& s)
        : position(s.position), expiry(s.expiry), log_bias(s.log_bias), lengths(s.lengths) {}

    [[nodiscard]] backend::segment_frame frame(const Case& c, const Segment& s,
                                               const std::int32_t* bias_from) const {
        backend::segment_frame frame;
        frame.position = plane_of(position, c, s.rows);
        frame.expiry = plane_of(expiry, c, s.rows);
        frame.log_bias = plane_of(log_bias, c, s.rows);
        frame.bias_from = bias_from;
        frame.lengths = s.lengths.empty() ? nullptr : lengths.data();
        frame.rows = s.rows;
        frame.first = s.first;
        return frame;
    }
};

void check(const Case& c, const std::string& what) {
    const SegmentOnDevice past(c.past), self(c.self);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges), bias_from(c.bias_from);
    const std::int32_t* from = c.bias_from.empty() ? nullptr : bias_from.data();
    backend::key_frames frames;
    frames.past = past.frame(c, c.past, from);
    frames.self = self.frame(c, c.self, from);
    frames.lengths = c.lengths.empty() ? nullptr : lengths.data();
    frames.starts = c.starts.empty() ? nullptr : starts.data();
    frames.edges = c.edges.empty() ? nullptr : edges.data();
    frames.segments = c.edges.empty() ? 0 : static_cast<std::int32_t>(c.edges.size()) - 1;
    frames.length = c.queries;

    const bool with_bias = !c.past.log_bias.empty() || !c.self.log_bias.empty();
    backend::attention_plan whole = backend::shape_plan(std::int64_t{c.past.rows} + c.self.rows, c.queries,
                                                        c.tile_q, c.triangular, c.whole, c.boundary_q);
    backend::workspace_parts measure(nullptr);
    const std::int64_t heads = std::int64_t{c.batch} * c.heads;
    backend::take_plan(measure, whole, heads, with_bias);
    const Device<unsigned char> memory(measure.bytes());
    backend::workspace_parts parts(memory.data());
    backend::take_plan(parts, whole, heads, with_bias);

    std::int32_t next = 0, rounds = 0;
    for (; next < whole.supers; ++rounds) {
        const backend::attention_plan round = backend::plan_round(whole, heads, next);
        next += round.supers;
        backend::launch_plan(kvpolicy::cuda{}, frames, round, c.batch, c.heads);
        ok(cudaDeviceSynchronize());
        const auto lists = static_cast<std::size_t>(heads * round.supers);
        const auto boundaries = static_cast<std::size_t>(round.boundaries);
        const auto read = [](auto* from_device, std::size_t count) {
            std::vector<std::remove_const_t<std::remove_pointer_t<decltype(from_device)>>> values(count);
            ok(cudaMemcpy(values.data(), from_device, count * sizeof(values[0]), cudaMemcpyDeviceToHost));
            return values;
        };
        const auto old = read(round.old, lists);
        const auto total = read(round.total, lists);
        const auto through = read(round.through, lists * boundaries);
        const auto known = read(round.known, lists * boundaries);
        const auto passing = read(round.passing, lists * boundaries);
        const auto lasting = read(round.lasting, lists);
        const auto runs = read(round.runs, lists);
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t j = 0; j < round.supers; ++j) {
                    const std::int64_t head = std::int64_t{b} * c.heads + h;
                    const auto list = static_cast<std::size_t>(head * round.supers + j);
                    const std::vector<Row> wanted =
                        naive(c, b, h, (std::int64_t{round.first} + j) * round.super_q, round.super_q);
                    const std::string name =
                        what + ", list " + std::to_string(list) + " of round " + std::to_string(rounds);
                    REQUIRE_MESSAGE(total[list] == static_cast<std::int32_t>(wanted.size()), name);
                    const auto is_old = [](const Row& r) { return r.begin == 0; };
                    const auto wanted_old = std::count_if(wanted.begin(), wanted.end(), is_old);
                    CHECK_MESSAGE(old[list] == wanted_old, name);
                    const auto stays = [&round](const Row& r) { return r.expiry == round.super_q; };
                    CHECK_MESSAGE(
                        lasting[list] == std::count_if(wanted.begin(), wanted.end(),
                                                       [&](const Row& r) { return r.begin > 0 && stays(r); }),
                        name);
                    std::vector<std::int32_t> staying;
                    for (const Row& r : wanted) {
                        if (stays(r)) {
                            staying.push_back(r.row);
                        }
                    }
                    std::sort(staying.begin(), staying.end());
                    std::size_t begins = 0;
                    for (std::size_t i = 0; i < staying.size(); ++i) {
                        begins += i == 0 || staying[i] != staying[i - 1] + 1 ? 1 : 0;
                    }
                    // The plan also counts one for every 32 rows, about.
                    const std::size_t slack = staying.size() / 32 + 16;
                    CHECK_MESSAGE((runs[list] == 0 || begins <= staying.size() / 16), name);
                    CHECK_MESSAGE((runs[list] != 0 || begins + slack > staying.size() / 16), name);
                    const auto at = static_cast<std::size_t>(head * round.entries_a_head() + round.before(j));
                    // Entries behind the list's end are nobody's.
                    const auto row = read(round.row + at, wanted.size());
                    const auto interval = read(round.interval + at, wanted.size());
                    const auto bias =
                        read(with_bias ? round.bias + at : nullptr, with_bias ? wanted.size() : 0);
                    const auto bias_begin =
                        read(with_bias ? round.bias_from + at : nullptr, with_bias ? wanted.size() : 0);
                    std::int64_t wrong = 0;
                    std::size_t where = 0;
                    for (std::size_t i = wanted.size(); i-- > 0;) {
                        const bool same =
                            row[i] == wanted[i].row && interval[i].begin == wanted[i].begin &&
                            interval[i].expiry == wanted[i].expiry &&
                            (!with_bias || (bias[i] == wanted[i].bias &&
                                            (wanted[i].bias == 0.0f || bias_begin[i] == wanted[i].from)));
                        where = same ? where : i;
                        wrong += same ? 0 : 1;
                    }
                    CHECK_MESSAGE(wrong == 0, name, ": entry ", where, " of ", wanted.size(), " is row ",
                                  wrong == 0 ? 0 : row[where], ", not ", wrong == 0 ? 0 : wanted[where].row,
                                  "; wrong: ", wrong);
                    for (std::size_t i = 0; i < boundaries; ++i) {
                        const auto e = static_cast<std::int32_t>(i) * round.boundary_q;
                        const auto lives = std::count_if(wanted.begin(), wanted.end(), [&](const Row& r) {
                            return r.begin == 0 && r.expiry >= e;
                        });
                        const auto begin = [&](bool lasts) {
                            return std::count_if(wanted.begin(), wanted.end(), [&](const Row& r) {
                                return r.begin > 0 && r.begin < e && stays(r) == lasts;
                            });
                        };
                        CHECK_MESSAGE(through[list * boundaries + i] == lives, name, ", boundary ", i);
                        CHECK_MESSAGE(known[list * boundaries + i] == begin(true), name, ", boundary ", i);
                        CHECK_MESSAGE(passing[list * boundaries + i] == begin(false), name, ", boundary ", i);
                    }
                }
            }
        }
    }
}

/// Lifetimes of all sorts: never, soon, late, at their begin and before it.
std::vector<expiry_t> lifetimes(std::mt19937& generator, std::int64_t planes, std::int32_t rows,
                                std::int64_t origin, std::int32_t kind) {
    std::vector<expiry_t> expiry;
    for (std::int64_t p = 0; p < planes; ++p) {
        for (std::int32_t t = 0; t < rows; ++t) {
            std::int64_t e = never;
            const std::uint32_t draw = generator();
            if (kind == 0) {  // a policy: a window, and one key of eight kept for long
                e = origin + t + 64 + (draw % 8 == 0 ? static_cast<std::int64_t>(generator() % 3000) : 0);
            } else if (kind == 1) {
                e = draw % 5 == 0
                        ? never
                        : origin +
                              static_cast<std::int64_t>(generator() % static_cast<std::uint32_t>(rows + 2)) -
                              1;
            } else if (kind == 2) {  // all at once, in the middle of a super-tile
                e = origin + 1500;
            } else if (kind == 3) {
                e = draw % 3 == 0 ? std::numeric_limits<expiry_t>::min() + static_cast<std::int32_t>(draw % 7)
                                  : origin + t;
            } else if (kind == 5) {
                e = draw % 2 == 0 ? never - 1 : std::numeric_limits<expiry_t>::min();
            }
            expiry.push_back(static_cast<expiry_t>(e));
        }
    }
    return expiry;
}

}  // namespace

TEST_CASE("plain frames: every kind of lifetime, lengths around a super-tile") {
    std::mt19937 generator(1);
    for (const std::int32_t queries : {1, 15, 16, 17, 1000, 1008, 1025, 2500}) {
        for (std::int32_t kind = 0; kind < 6; ++kind) {
            Case c;
            c.batch = 2;
            c.heads = 2;
            c.queries = queries;
            c.tile_q = kind % 2 == 0 ? 48 : 38;
            c.boundary_q = kind % 4 == 0 ? 16 : 0;
            c.triangular = true;
            c.past.rows = queries + kind;
            if (kind != 4) {
                c.past.expiry = lifetimes(generator, 4, c.past.rows, 0, kind);
            }
            check(c, "queries " + std::to_string(queries) + ", kind " + std::to_string(kind));
        }
    }
}

TEST_CASE("lengths of sequences and keys, 0 included, and biases") {
    std::mt19937 generator(2);
    Case c;
    c.batch = 5;
    c.heads = 1;
    c.queries = 1300;
    c.past.rows = 1400;
    c.past.expiry = lifetimes(generator, 5, 1400, 0, 0);
    c.lengths = {1300, 0, 1, 700, 1024};
    check(c, "lengths");
    c.past.lengths = {0, 1400, 1400, 77, 1399};
    check(c, "key lengths");
    c.past.log_bias.assign(5 * 1400, 0.0f);
    for (float& x : c.past.log_bias) {
        x = static_cast<float>(generator() % 100) - 100.0f;
    }
    c.bias_from = {64};
    check(c, "biases");
}

TEST_CASE("positions in any order, starts below and above 0, two segments") {
    std::mt19937 generator(3);
    for (const std::int32_t queries : {1, 5, 1030}) {
        Case c;
        c.batch = 3;
        c.heads = 2;
        c.queries = queries;
        c.tile_q = 7;
        c.starts = {-20, 4000, 1 << 30};
        c.past.rows = 777;
        for (std::int32_t b = 0; b < 3; ++b) {
            for (std::int32_t h = 0; h < 2; ++h) {
                std::vector<std::int32_t> position(777);
                std::iota(position.begin(), position.end(), c.starts[static_cast<std::size_t>(b)] - 700);
                std::shuffle(position.begin(), position.end(), generator);
                c.past.position.insert(c.past.position.end(), position.begin(), position.end());
                const auto expiry =
                    lifetimes(generator, 1, 777, c.starts[static_cast<std::size_t>(b)] - 300, 1);
                c.past.expiry.insert(c.past.expiry.end(), expiry.begin(), expiry.end());
            }
        }
        check(c, "positions");
        c.self.rows = queries;
        check(c, "two segments");
        c.self.expiry = lifetimes(generator, 6, queries, 4000, 0);
        c.lengths = {queries, queries / 2, 0};
        check(c, "two segments, lengths");
        c.past.log_bias.assign(6 * 777, -1.5f);
        check(c, "two segments, one biased");
        c.past.position.clear();
        c.past.first = 3700;
        check(c, "a cache without positions");
    }
}

TEST_CASE("a chunk behind older rows, without positions") {
    std::mt19937 generator(7);
    for (const std::int32_t queries : {1, 47, 384, 1009, 2100}) {
        for (std::int32_t kind = 0; kind < 6; ++kind) {
            Case c;
            c.batch = 2;
            c.heads = 2;
            c.queries = c.self.rows = queries;
            c.tile_q = 48;
            c.boundary_q = 16;
            c.past.rows = c.whole = 777;
            c.past.first = -777;
            c.triangular = kind != 1;
            if (kind != 4) {
                c.past.expiry = lifetimes(generator, 4, 777, -300, kind);
            }
            c.self.expiry = lifetimes(generator, 4, queries, 0, (kind + 1) % 6);
            const std::string name = std::to_string(queries) + " queries, kind " + std::to_string(kind);
            check(c, name);
            c.past.lengths = {0, 500};
            c.lengths = {queries, queries / 2};
            check(c, name + ", lengths");
            c.self.expiry.clear();
            check(c, name + ", tokens that stay");
        }
    }
}

TEST_CASE("rows that share positions") {
    std::mt19937 generator(5);
    Case c;
    c.heads = 2;
    c.queries = 1030;
    c.past.rows = 5000;
    for (std::int32_t i = 0; i < c.heads * c.past.rows; ++i) {
        c.past.position.push_back(static_cast<std::int32_t>(generator() % 900));
        const unsigned interval = generator() % 500;
        c.past.expiry.push_back(
            interval < 100 ? never : c.past.position.back() + static_cast<std::int32_t>(interval - 100));
    }
    check(c, "shared positions");
}

TEST_CASE("packed segments") {
    std::mt19937 generator(4);
    Case c;
    c.heads = 2;
    c.queries = 2600;
    c.past.rows = 2600;
    c.triangular = true;
    c.edges = {0, 0, 1, 40, 513, 1024, 1024, 2300, 2600};
    check(c, "packed, dense");
    c.past.expiry = lifetimes(generator, 2, 2600, 0, 0);
    check(c, "packed");
}

TEST_CASE("many rows") {
    std::mt19937 generator(6);
    for (const std::int32_t rows : {4095, 4096, 5000, 13001}) {
        Case c;
        c.heads = 2;
        c.queries = 2100;
        c.tile_q = 48;
        c.past.rows = rows;
        c.past.first = 2000 - rows;
        c.past.expiry = lifetimes(generator, 2, rows, c.past.first, rows % 2 == 0 ? 0 : 2);
        check(c, std::to_string(rows) + " rows");
        c.past.first = 0;
        c.queries = rows;
        c.triangular = true;
        c.past.expiry = lifetimes(generator, 2, rows, 0, 1);
        check(c, std::to_string(rows) + " rows, triangular");
    }
}

TEST_CASE("many rounds") {
    std::mt19937 generator(5);
    Case c;
    c.queries = 40 * 1024;
    c.tile_q = 64;
    c.past.rows = 96;
    c.past.first = 39000;
    c.past.expiry = lifetimes(generator, 1, 96, 39000, 0);
    check(c, "40 super-tiles, not triangular");
}
