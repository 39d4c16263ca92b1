// A file of lines, such as JSON lines, that grows while a program runs.
#pragma once

#include "whole_file.hpp"

#include <cstdint>
#include <filesystem>
#include <string>

namespace examples {

/// Each line is there whole or not at all, and on the disk when add() returns. Errors are llama::Error.
class LineFile {
  public:
    /// `goes_on`: behind the lines that are there; half a line at the end, of a run that was killed, is cut
    /// off. Else the first line replaces what was there. A device or a pipe may be written, too.
    LineFile(std::filesystem::path file, bool goes_on);
    /// `line` has no newline at its end.
    void add(const std::string& line);

  private:
    void open(bool goes_on);

    std::filesystem::path name_;
    bool is_stream_;
    Descriptor file_;
    std::int64_t size_ = 0;
};

}  // namespace examples
