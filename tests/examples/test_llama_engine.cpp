#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <llama/dense_attention.hpp>
#include <llama/engine.hpp>
#include <llama/safetensors.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

using nlohmann::json;
using test::contains;

namespace {

using Ids = std::vector<std::int32_t>;

const std::filesystem::path vectors = TEST_VECTORS;
const std::filesystem::path smollm2 = std::filesystem::path(TEST_MODELS) / "smollm2-135m";

/// How far fp32 logits may stray from exact ones.
///
/// In a product over n terms that is summed one by one in fp32 (unit roundoff u = 2^-24), every partial sum
/// is rounded. For terms of random sign the i-th partial sum has size sqrt(i) against the result's sqrt(n),
/// so the roundings, taken as independent, add to an error of u sqrt(sum of i / n) = u sqrt(n / 2) of the
/// result. A logit is the end of a chain of products; RMSNorm and the residual sum keep relative sizes, so
/// the chain's errors add in squares:
///     u sqrt(sum of n / 2 over the chain).
/// A factor of 8 allows for what a model amplifies and for the worst of many logits, which lies at four to
/// five standard deviations.
///
/// Kernels that sum in several lanes do far better than one by one, so this alone would let a small mistake
/// pass. The vectors also say how far NumPy strays when it computes the same formulas in fp32: two honest
/// fp32 implementations differ by the order of their sums, which costs at most the square root of the lanes
/// (up to 64 of them: a factor 8).
double tolerance(const llama::Config& c, std::size_t count, double largest, double numpy_error) {
    const double width = c.heads * c.head_dim;
    const double layer = c.hidden_size + c.head_dim + static_cast<double>(count) +
                         width                                   // q k v, scores, values, o
                         + c.hidden_size + c.intermediate_size;  // gate and up, down
    const double bound = 8 * 0x1p-24 * std::sqrt((c.layers * layer + c.hidden_size) / 2) * largest;
    return std::min(bound, 8 * numpy_error);
}

std::vector<std::int64_t> range(std::int64_t first, std::size_t count) {
    std::vector<std::int64_t> positions(count);
    std::iota(positions.begin(), positions.end(), first);
    return positions;
}

/// All logits of the tokens, fed in chunks of this size.
std::vector<float> run(const llama::Model& model, const Ids& tokens, std::size_t chunk) {
    llama::Engine engine(model);
    llama::DenseAttention attention(model.config);
    std::vector<float> all;
    for (std::size_t at = 0; at < tokens.size(); at += chunk) {
        const std::size_t count = std::min(chunk, tokens.size() - at);
        const auto logits =
            engine.forward(std::span(tokens).subspan(at, count), range(static_cast<std::int64_t>(at), count),
                           attention, llama::Logits::all);
        all.insert(all.end(), logits.begin(), logits.end());
    }
    CHECK(attention.length() == static_cast<std::int64_t>(tokens.size()));
    return all;
}

void check_logits(const llama::Model& model, const json& c) {
    const auto tokens = c["tokens"].get<Ids>();
    const auto rows = c["rows"].get<std::vector<std::size_t>>(),
               columns = c["columns"].get<std::vector<std::size_t>>();
    const double largest = c["largest"], numpy_error = c["fp32_error"];
    const double allowed = tolerance(model.config, tokens.size(), largest, numpy_error);
    for (const std::size_t chunk : {tokens.size(), std::size_t{1}, std::size_t{5}}) {
        const auto logits = run(model, tokens, chunk);
        double error = 0;
        for (std::size_t r = 0; r < rows.size(); ++r)
            for (std::size_t i = 0; i < columns.size(); ++i) {
                const float got =
                    logits[rows[r] * static_cast<std::size_t>(model.config.vocab_size) + columns[i]];
                const double off = std::abs(double{got} - c["logits"][r][i].get<double>());
                error =
                    std::max(error, std::isnan(off) ? INFINITY : off);  // a NaN would lose every comparison
            }
        CAPTURE(chunk);
        CHECK(error <= allowed);
        MESSAGE("chunks of ", chunk, ": largest error ", error, " of logits up to ", largest, "; allowed ",
                allowed, "; NumPy's own fp32 error ", numpy_error);
    }
}

/// Writes the random model of tests/reference/llama_logits.py; every third tensor in each of the three types.
void write_small_model(const test::Folder& folder, const json& config) {
    folder.write("config.json", config.dump());
    std::uint64_t state = 0;
    const auto random = [&] {  // splitmix64
        std::uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    };
    json header = json::object();
    std::string data;
    int index = 0;
    for (const auto& spec : llama::expected_tensors(llama::parse_config(config.dump(), "config.json"))) {
        std::size_t count = 1;
        for (const auto n : spec.shape) count *= static_cast<std::size_t>(n);
        const std::size_t begin = data.size();
        const int type = index++ % 3;
        for (std::size_t i = 0; i < count; ++i) {
            const float v = static_cast<float>(static_cast<int>(random() >> 56) - 128) / 128;
            const float value = contains(spec.name, "norm")   ? (v == -1 ? 1.0f : 1 + v)
                                : contains(spec.name, "proj") ? v / 4
                                                              : v;
            const auto bits = std::bit_cast<std::uint32_t>(value);
            char bytes[4];
            if (type == 0) {
                std::memcpy(bytes, &bits, 4);
            } else if (type == 1) {
                std::memcpy(bytes, reinterpret_cast<const char*>(&bits) + 2,
                            2);  // the upper half is the bf16
            } else {
                // a normal half, or 0: no value is smaller than 2^-9
                const std::uint32_t half =
                    value == 0
                        ? 0
                        : (bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff);
                std::memcpy(bytes, &half, 2);
            }
            data.append(bytes, type == 0 ? 4 : 2);
        }
        const char* names[] = {"F32", "BF16", "F16"};
        header[spec.name] = {
            {"dtype", names[type]}, {"shape", spec.shape}, {"data_offsets", {begin, data.size()}}};
    }
    folder.write("model.safetensors", test::safetensors_bytes(header.dump(), data));
}

}  // namespace

TEST_CASE("logits of small random models agree with float64, in any chunks") {
    for (const json& c : test::read_json(vectors / "llama_small.json")) {
        const test::Folder folder;
        write_small_model(folder, c["config"]);
        check_logits(llama::load_model(folder.path()), c);
    }
}

TEST_CASE("SmolLM2's logits agree with float64" *
          doctest::skip(!std::filesystem::exists(smollm2 / "config.json"))) {
    check_logits(llama::load_model(smollm2), test::read_json(vectors / "smollm2_logits.json")[0]);
}

TEST_CASE("the seam: shapes, order, observers, which logits") {
    const json c = test::read_json(vectors / "llama_small.json")[0];
    const test::Folder folder;
    write_small_model(folder, c["config"]);
    const llama::Model model = llama::load_model(folder.path());
    const Ids tokens{1, 2, 3, 4, 5};
    const auto positions = range(0, 5);

    llama::DenseAttention dense(model.config);
    std::vector<int> layers;
    std::vector<float> first_keys, first_values;
    auto observer = [&](int layer, std::span<const std::int64_t> p, std::span<const float> q,
                        std::span<const float> k, std::span<const float> v) {
        layers.push_back(layer);
        CHECK(p.size() == 5);
        CHECK(q.size() == 5 * 6 * 16);
        CHECK(k.size() == 5 * 2 * 16);
        CHECK(v.size() == 5 * 2 * 16);
        if (layer == 0) first_keys.assign(k.begin(), k.end()), first_values.assign(v.begin(), v.end());
    };
    llama::Engine engine(model);
    const auto all = engine.forward(tokens, positions, llama::observed(dense, observer), llama::Logits::all);
    CHECK(all.size() == 5 * 61);
    CHECK(layers == std::vector<int>{0, 1, 2});
    CHECK(std::ranges::equal(first_keys, dense.keys(0)));
    CHECK(std::ranges::equal(first_values, dense.values(0)));
    const std::vector<float> last_of_all(all.end() - 61, all.end());

    // The hidden states are what projections read: values are their products, and the first token's keys,
    // which no rotation turns.
    llama::DenseAttention inner(model.config);
    auto projected = [&](int layer, std::span<const std::int64_t> p, std::span<const float> hidden,
                         std::span<const float> q, std::span<const float> k, std::span<const float> v,
                         std::span<float> out) {
        const llama::Layer& weights = model.layers[static_cast<std::size_t>(layer)];
        const auto width = static_cast<std::size_t>(model.config.hidden_size);
        REQUIRE(hidden.size() == 5 * width);
        const auto product = [&](const llama::Matrix& w, std::size_t row, std::size_t token) {
            double sum = 0;
            for (std::size_t i = 0; i < width; ++i)
                sum += double{w.values[row * width + i]} * double{hidden[token * width + i]};
            return sum;
        };
        for (std::size_t row = 0; row < 32; ++row) {
            CHECK(v[4 * 32 + row] == doctest::Approx(product(weights.v, row, 4)).epsilon(1e-4));
            CHECK(k[row] == doctest::Approx(product(weights.k, row, 0)).epsilon(1e-4));
        }
        inner(layer, p, hidden, q, k, v, out);
    };
    engine.forward(tokens, positions, projected);

    dense.clear();
    CHECK(dense.length() == 0);
    const auto last = engine.forward(tokens, positions, dense);
    REQUIRE(last.size() == 61);
    for (std::size_t i = 0; i < 61; ++i) CHECK(last[i] == doctest::Approx(last_of_all[i]).epsilon(1e-5));
    CHECK(engine.forward(std::span(tokens).first(0), {}, dense).empty());
    CHECK(engine.forward(Ids{6}, range(5, 1), dense, llama::Logits::none).empty());
    CHECK(dense.length() == 6);

    // Keys are rotated by their positions: the same token elsewhere has another key and the same value.
    llama::DenseAttention other(model.config);
    auto nothing = [](int, std::span<const std::int64_t>, std::span<const float>, std::span<const float>,
                      std::span<const float>, std::span<const float>,
                      std::span<float> out) { std::ranges::fill(out, 0.0f); };
    std::vector<float> key0, key9, value0, value9;
    auto look = [&](int layer, std::span<const std::int64_t>, std::span<const float>,
                    std::span<const float> k, std::span<const float> v) {
        if (layer != 0) return;
        key0.assign(k.begin(), k.begin() + 32), key9.assign(k.begin() + 32, k.end());
        value0.assign(v.begin(), v.begin() + 32), value9.assign(v.begin() + 32, v.end());
    };
    engine.forward(Ids{7, 7}, std::vector<std::int64_t>{0, 9}, llama::observed(nothing, look),
                   llama::Logits::none);
    CHECK(key0 != key9);
    for (std::size_t i = 0; i < 32; ++i) CHECK(value0[i] == doctest::Approx(value9[i]));
    const double angle = 9, a = key0[0], b = key0[8];  // frequency 1 turns element 0 with 0 + 16 / 2
    CHECK(key9[0] == doctest::Approx(a * std::cos(angle) - b * std::sin(angle)).epsilon(1e-4));
    CHECK(key9[8] == doctest::Approx(b * std::cos(angle) + a * std::sin(angle)).epsilon(1e-4));
}

TEST_CASE("bad arguments get a sentence") {
    const json c = test::read_json(vectors / "llama_small.json")[1];
    const test::Folder folder;
    write_small_model(folder, c["config"]);
    const llama::Model model = llama::load_model(folder.path());
    llama::Engine engine(model);
    llama::DenseAttention dense(model.config);
    const auto error = [&](const Ids& tokens, const std::vector<std::int64_t>& positions) {
        return test::message_of([&] { engine.forward(tokens, positions, dense); });
    };
    CHECK(contains(error({1, 61}, {0, 1}), "tokens[1] is 61, it must be from 0 to 60"));
    CHECK(contains(error({-1}, {0}), "tokens[0] is -1"));
    CHECK(contains(error({1}, {0, 1}), "1 tokens and 2 positions"));
    CHECK(contains(error({1}, {-1}), "positions[0] is -1, it must not be negative"));
    CHECK(contains(error({1}, {3}), "positions[0] is 3, layer 0 continues at 0"));
    CHECK(
        contains(test::message_of([] { llama::load_model("/nonexistent"); }), "config.json: cannot be read"));
    std::filesystem::remove(folder.path() / "model.safetensors");
    CHECK(contains(test::message_of([&] { llama::load_model(folder.path()); }),
                   "model.safetensors: cannot be opened"));
}
