#include "report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <string>

namespace train {

Report::Report(const Options& options) : options_(options) {
    if (!options.metrics.empty()) {
        file_.emplace(options.metrics, !options.resume.empty());
    }
}

void Report::add(std::int64_t step, const LossSums& since, double rate, double norm,
                 const std::vector<HeldOutNumbers>& held_out) {
    const double n = static_cast<double>(std::max<std::int64_t>(since.steps, 1));
    nlohmann::json line{{"step", step}};
    std::string text = fmt::format("step {:>5}:", step);
    if (since.steps > 0) {
        line["loss"] = since.loss / n;
        line["keep_share"] = since.keep_share();
        line["agreement"] = since.agreement();
        line["rate"] = rate;
        line["gradient_norm"] = norm;
        text += fmt::format(" loss {:.4f}, {:.1f}% keeps, {:.1f}% agree;", since.loss / n,
                            100 * since.keep_share(), 100 * since.agreement());
    }
    for (const HeldOutNumbers& h : held_out) {
        nlohmann::json by_layer = nlohmann::json::array();
        const std::size_t heads = h.recall.size() / static_cast<std::size_t>(options_.spec.layers);
        for (std::size_t l = 0; l < h.recall.size(); l += heads) {
            nlohmann::json by_head = nlohmann::json::array();
            for (std::size_t i = l; i < l + heads; ++i) {
                by_head.push_back(h.recall[i].mean);
            }
            by_layer.push_back(by_head);
        }
        line["held_out"].push_back({{"budget", h.budget},
                                    {"loss", h.loss.loss},
                                    {"keep_share", h.loss.keep_share()},
                                    {"agreement", h.loss.agreement()},
                                    {"examples", h.loss.count},
                                    {"recall", h.mean_recall()},
                                    {"chance", h.mean_chance()},
                                    {"recall_by_head", by_layer}});
    }
    if (!held_out.empty()) {
        text += " held-out loss";
        for (const HeldOutNumbers& h : held_out) {
            text += fmt::format(" {:.4f}", h.loss.loss);
        }
        text += ", oracle recall";
        for (const HeldOutNumbers& h : held_out) {
            text += fmt::format(" {:.3f} ({:.3f})", h.mean_recall(), h.mean_chance());
        }
    }
    fmt::print("{}\n", text);
    if (std::fflush(stdout) != 0) {
        examples::fail_to_write("standard output");
    }
    if (file_) {
        file_->add(line.dump());
    }
}

}  // namespace train
