// Files that are whole or not there, and locks that keep a file for one process. Errors are llama::Error with
// the file and the system's reason.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace examples {

/// A file of the system that is open; closes it.
class Descriptor {
  public:
    explicit Descriptor(int number = -1) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor();

    [[nodiscard]] int number() const { return number_; }
    [[nodiscard]] bool is_open() const { return number_ >= 0; }

  private:
    int number_;
};

/// Keeps a file for this process, from before the work to the end of it: of two runs with one --out the later
/// would replace the other's result. The lock is NAME.lock, which the destructor removes; after a kill the
/// system gives it to the next run. Removes the temporary files that a killed run left.
class OutputLock {
  public:
    /// Throws, with the option that named the file, where the file could not be written later (its folder is
    /// missing, it is a folder or a device) and where another process holds the lock.
    OutputLock(std::string_view option, const std::filesystem::path& file);
    OutputLock(OutputLock&&) noexcept = default;
    OutputLock& operator=(OutputLock&&) = delete;
    OutputLock(const OutputLock&) = delete;
    OutputLock& operator=(const OutputLock&) = delete;
    ~OutputLock();

  private:
    std::filesystem::path lock_;
    Descriptor held_;
};

/// Writes a file under a temporary name, NAME.XXXXXX.part with letters of its own. commit() gives it its name
/// once its bytes are on the disk. Until then, and after an error, a kill or a full disk, what had the name
/// stays as it was.
class WholeFile {
  public:
    explicit WholeFile(const std::filesystem::path& file);
    WholeFile(const WholeFile&) = delete;
    WholeFile& operator=(const WholeFile&) = delete;
    /// Removes a file that was not committed.
    ~WholeFile();

    void write(const void* bytes, std::size_t count);
    void commit();

  private:
    void flush();

    std::filesystem::path target_, part_;
    Descriptor file_;
    std::vector<char> buffer_;
};

void write_whole(const std::filesystem::path& file, std::string_view text);

/// Writes all bytes to an open file; `name` is for the error.
void write_all(int file, const void* bytes, std::size_t count, const std::filesystem::path& name);

/// Throws "NAME: cannot be written: REASON", of errno.
[[noreturn]] void fail_to_write(const std::filesystem::path& name);

}  // namespace examples
