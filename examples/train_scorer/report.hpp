// What a training run says of itself: lines of text, and JSON lines for --metrics.
#pragma once

#include "numbers.hpp"
#include "options.hpp"
#include "support/line_file.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace train {

class Report {
  public:
    /// A run that resumes goes on in its file of metrics.
    explicit Report(const Options& options);

    /// `since`: sums over the steps since the last report; `rate` and `norm` are the last step's. Throws
    /// where standard output or the file cannot be written.
    void add(std::int64_t step, const LossSums& since, double rate, double norm,
             const std::vector<HeldOutNumbers>& held_out);

  private:
    const Options& options_;
    std::optional<examples::LineFile> file_;
};

}  // namespace train
