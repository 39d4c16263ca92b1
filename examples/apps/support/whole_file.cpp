#include "whole_file.hpp"

#include <fcntl.h>
#include <llama/error.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>

namespace examples {
namespace {

constexpr std::string_view part_suffix = ".part", letters = "abcdefghijklmnopqrstuvwxyz0123456789";
constexpr std::size_t letter_count = 6, buffer_bytes = std::size_t{1} << 20;

/// The file itself where the name is a link, so that the link stays.
std::filesystem::path target_of(const std::filesystem::path& file) {
    std::error_code ignored;
    return std::filesystem::is_symlink(file, ignored) ? std::filesystem::weakly_canonical(file, ignored)
                                                      : file;
}

std::filesystem::path folder_of(const std::filesystem::path& file) {
    return file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
}

bool is_part_of(const std::string& name, const std::string& of) {
    if (name.size() != of.size() + 1 + letter_count + part_suffix.size() || !name.starts_with(of + ".") ||
        !name.ends_with(part_suffix)) {
        return false;
    }
    const std::string_view own = std::string_view(name).substr(of.size() + 1, letter_count);
    return own.find_first_not_of(letters) == own.npos;
}

void remove_parts_of(const std::filesystem::path& file) {
    std::error_code ignored;
    const std::string name = file.filename().string();
    for (const auto& entry : std::filesystem::directory_iterator(folder_of(file), ignored)) {
        if (is_part_of(entry.path().filename().string(), name)) {
            std::filesystem::remove(entry.path(), ignored);
        }
    }
}

/// Opens NAME.XXXXXX.part, which no other process has.
Descriptor open_part(const std::filesystem::path& target, std::filesystem::path& part) {
    std::random_device random;
    for (int attempt = 0; attempt < 100; ++attempt) {
        std::string own(letter_count, ' ');
        std::ranges::generate(own, [&] { return letters[random() % letters.size()]; });
        part = target.string() + "." + own + std::string(part_suffix);
        Descriptor file(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
        if (file.is_open() || errno != EEXIST) {
            return file;
        }
    }
    return Descriptor();
}

/// A new name is on the disk once its folder is. File systems that cannot sync a folder say EINVAL.
void sync_folder(const std::filesystem::path& file) {
    const Descriptor folder(::open(folder_of(file).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!folder.is_open() || (::fsync(folder.number()) != 0 && errno != EINVAL)) {
        fail_to_write(file);
    }
}

}  // namespace

Descriptor::~Descriptor() {
    if (is_open()) {
        ::close(number_);
    }
}

void fail_to_write(const std::filesystem::path& name) {
    llama::fail("{}: cannot be written: {}", name.string(), std::strerror(errno));
}

void write_all(int file, const void* bytes, std::size_t count, const std::filesystem::path& name) {
    const char* at = static_cast<const char*>(bytes);
    while (count > 0) {
        const ssize_t written = ::write(file, at, count);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            errno = written == 0 ? ENOSPC : errno;
            fail_to_write(name);
        }
        at += written;
        count -= static_cast<std::size_t>(written);
    }
}

OutputLock::OutputLock(std::string_view option, const std::filesystem::path& file) {
    std::error_code ignored;
    const auto status = std::filesystem::status(file, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
        llama::fail("{}: {} cannot be written; it is a folder or a device, not a file", option,
                    file.string());
    }
    const std::filesystem::path target = target_of(file);
    lock_ = target.string() + ".lock";
    while (true) {
        Descriptor lock(::open(lock_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
        if (!lock.is_open()) {
            llama::fail("{}: {} cannot be written; its folder must be there, and allow it: {}", option,
                        file.string(), std::strerror(errno));
        }
        if (::flock(lock.number(), LOCK_EX | LOCK_NB) != 0) {
            if (errno == EWOULDBLOCK) {
                llama::fail(
                    "{}: {} is being written by another process; it must end first, or another "
                    "file is needed",
                    option, file.string());
            }
            llama::fail("{}: {} cannot be locked: {}", option, lock_.string(), std::strerror(errno));
        }
        // The file may have been removed by its last holder between open and flock.
        struct stat here {
        }, named{};
        if (::fstat(lock.number(), &here) == 0 && ::stat(lock_.c_str(), &named) == 0 &&
            here.st_ino == named.st_ino && here.st_dev == named.st_dev) {
            held_ = std::move(lock);
            break;
        }
    }
    remove_parts_of(target);
}

OutputLock::~OutputLock() {
    if (held_.is_open()) {
        ::unlink(lock_.c_str());  // before the lock is given up
    }
}

WholeFile::WholeFile(const std::filesystem::path& file)
    : target_(target_of(file)), file_(open_part(target_, part_)) {
    if (!file_.is_open()) {
        fail_to_write(target_);
    }
    buffer_.reserve(buffer_bytes);
}

WholeFile::~WholeFile() {
    if (file_.is_open()) {
        ::unlink(part_.c_str());
    }
}

void WholeFile::flush() {
    write_all(file_.number(), buffer_.data(), buffer_.size(), target_);
    buffer_.clear();
}

void WholeFile::write(const void* bytes, std::size_t count) {
    if (buffer_.size() + count > buffer_bytes) {
        flush();
    }
    if (count >= buffer_bytes) {
        write_all(file_.number(), bytes, count, target_);
        return;
    }
    const char* const from = static_cast<const char*>(bytes);
    buffer_.insert(buffer_.end(), from, from + count);
}

void WholeFile::commit() {
    flush();
    if (::fsync(file_.number()) != 0 || ::rename(part_.c_str(), target_.c_str()) != 0) {
        fail_to_write(target_);
    }
    file_ = Descriptor();
    sync_folder(target_);
}

void write_whole(const std::filesystem::path& file, std::string_view text) {
    WholeFile whole(file);
    whole.write(text.data(), text.size());
    whole.commit();
}

}  // namespace examples
