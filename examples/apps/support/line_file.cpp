#include "line_file.hpp"

#include <fcntl.h>
#include <llama/error.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace examples {
namespace {

bool is_stream(const std::filesystem::path& file) {
    std::error_code ignored;
    const auto status = std::filesystem::status(file, ignored);
    return std::filesystem::exists(status) && !std::filesystem::is_regular_file(status);
}

/// Bytes up to the end of the last whole line.
std::int64_t whole_lines(int file, std::int64_t size) {
    char last = '\0';
    while (size > 0 && ::pread(file, &last, 1, size - 1) == 1 && last != '\n') {
        --size;
    }
    return size;
}

}  // namespace

LineFile::LineFile(std::filesystem::path file, bool goes_on)
    : name_(std::move(file)), is_stream_(is_stream(name_)) {
    if (is_stream_ || goes_on) {
        open(goes_on);
    }
}

void LineFile::open(bool goes_on) {
    file_ = Descriptor(
        ::open(name_.c_str(), (is_stream_ ? O_WRONLY : O_RDWR | O_CREAT) | O_APPEND | O_CLOEXEC, 0666));
    if (!file_.is_open()) {
        fail_to_write(name_);
    }
    if (is_stream_) {
        return;
    }
    struct stat info {};
    if (::fstat(file_.number(), &info) != 0) {
        fail_to_write(name_);
    }
    size_ = info.st_size;
    if (goes_on && whole_lines(file_.number(), size_) < size_) {
        size_ = whole_lines(file_.number(), size_);
        if (::ftruncate(file_.number(), size_) != 0) {
            fail_to_write(name_);
        }
    }
}

void LineFile::add(const std::string& line) {
    const std::string text = line + '\n';
    if (!file_.is_open()) {
        write_whole(name_, text);
        open(false);
        return;
    }
    try {
        write_all(file_.number(), text.data(), text.size(), name_);
        if (!is_stream_ && ::fdatasync(file_.number()) != 0) {
            fail_to_write(name_);
        }
    } catch (const llama::Error&) {
        // Where half a line stays, the next run cuts it off.
        const bool is_cut = is_stream_ || ::ftruncate(file_.number(), size_) == 0;
        static_cast<void>(is_cut);
        throw;
    }
    size_ += static_cast<std::int64_t>(text.size());
}

}  // namespace examples
