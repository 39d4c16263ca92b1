// Progress on a terminal: one line, overwritten; nothing where the output is a file.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <string>

namespace examples {

class Progress {
  public:
    void show(const std::string& text) const {
        if (terminal_) {
            fmt::print(stderr, "\r{:<78}", text);
            std::fflush(stderr);
        }
    }
    void done() const {
        if (terminal_) {
            fmt::print(stderr, "\r{:<78}\r", "");
        }
    }

  private:
    bool terminal_ = isatty(STDERR_FILENO) == 1;
};

}  // namespace examples
