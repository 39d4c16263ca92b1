#include "report.hpp"

#include "support/whole_file.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>

namespace evaluate {
namespace {

double rounded(double x) { return std::round(x * 1e3) / 1e3; }

}  // namespace

std::string table(const Run& run, std::span<const Result> results) {
    std::string text =
        fmt::format("{:<34} {:>6} {:>6} {:>8} {:>8} {:>7} {:>7} {:>7} {:>10} {:>9}\n", "cache", "less",
                    "rows", "bits/B", "nll/tok", "exact", "first", "digits", "cache MiB", "tokens/s");
    for (const Result& r : results) {
        const examples::Score& s = r.score;
        text += fmt::format(
            "{:<34} {:>6} {:>6.0f} {:>8.4f} {:>8.4f} {:>7.3f} {:>7.3f} {:>7.3f} {:>10.2f} {:>9}\n",
            r.policy->label,
            r.budget == 0 && r.policy->gates == nullptr ? "-"
                                                        : fmt::format("{:.0f}%", 100 * run.compression(r)),
            s.rows_per_head(), s.bits_per_byte(), s.nll_per_token(), s.recall(), s.first_digit(),
            s.digit_accuracy(), r.mib,
            r.tokens_per_second == 0.0 ? "-" : fmt::format("{:.0f}", r.tokens_per_second));
    }
    return text;
}

void write_csv(const std::filesystem::path& file, const Run& run, std::span<const Result> results) {
    std::string text =
        "model,policy,label,budget,compression,sequences,length,bits_per_byte,nll_per_token,recall_exact,"
        "recall_first_digit,recall_digits,lookups,rows_per_head,cache_mib,tokens_per_s\n";
    for (const Result& r : results) {
        const examples::Score& s = r.score;
        fmt::format_to(
            std::back_inserter(text),
            "{},{},\"{}\",{},{:.4f},{},{},{:.5f},{:.5f},{:.5f},{:.5f},{:.5f},{},{:.1f},{:.3f},{:.1f}\n",
            run.model, r.policy->name, r.policy->label, r.budget, run.compression(r), s.sequences, run.length,
            s.bits_per_byte(), s.nll_per_token(), s.recall(), s.first_digit(), s.digit_accuracy(), s.answers,
            s.rows_per_head(), r.mib, r.tokens_per_second);
    }
    examples::write_whole(file, text);
}

void write_json(const std::filesystem::path& file, const Run& run, std::span<const Result> results) {
    nlohmann::json all{{"model", run.model},
                       {"sequences", run.sequences},
                       {"length", run.length},
                       {"sinks", run.sinks},
                       {"window", run.window},
                       {"layers", run.layers},
                       {"kv_heads", run.kv_heads},
                       {"head_dim", run.head_dim},
                       {"position_bins", position_bins},
                       {"results", nlohmann::json::array()}};
    for (const Result& r : results) {
        const examples::Score& s = r.score;
        const auto n = static_cast<double>(s.sequences);
        nlohmann::json one{{"policy", r.policy->name},
                           {"label", r.policy->label},
                           {"budget", r.budget},
                           {"compression", run.compression(r)},
                           {"bits_per_byte", s.bits_per_byte()},
                           {"nll_per_token", s.nll_per_token()},
                           {"recall_exact", s.recall()},
                           {"recall_first_digit", s.first_digit()},
                           {"recall_digits", s.digit_accuracy()},
                           {"lookups", s.answers},
                           {"rows_per_head", s.rows_per_head()},
                           {"cache_mib", r.mib},
                           {"tokens_per_s", r.tokens_per_second}};
        for (const double rows : r.rows) {
            one["rows"].push_back(rounded(rows / n));
        }
        for (const double share : r.kept) {
            one["kept_by_position"].push_back(rounded(share / n));
        }
        if (r.policy->scorers != nullptr) {
            one["training"] = r.policy->scorers->spec.training;
        }
        if (r.policy->gates != nullptr) {
            const examples::ScorerSpec& spec = r.policy->gates->spec;
            one["training"] = spec.training;
            one["system"] = spec.policy;
            const int always = std::min(spec.sinks + spec.window, run.length);
            for (const double rows : r.rows) {
                const double beyond = std::max(0.0, rows / n - always);
                one["gate_density"].push_back(rounded(beyond / std::max(1, run.length - always)));
            }
        }
        for (const auto& [beta, recall] : r.recall) {
            nlohmann::json mean, chance;
            for (const kvpolicy::Recall& head : recall) {
                mean.push_back(rounded(head.mean / n));
                chance.push_back(rounded(head.chance_mean / n));
            }
            one["oracle_recall"][examples::beta_name(beta)] = {{"mean", mean}, {"chance", chance}};
        }
        all["results"].push_back(std::move(one));
    }
    examples::write_whole(file, all.dump() + '\n');
}

}  // namespace evaluate
