#include "whole_file.hpp"

#include <llama/error.hpp>

#include <fstream>
#include <system_error>

namespace examples {

std::filesystem::path part_of(const std::filesystem::path& file) { return file.string() + ".part"; }

void check_can_write(std::string_view option, const std::filesystem::path& file) {
    std::error_code ignored;
    const auto status = std::filesystem::status(file, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
        llama::fail("{}: {} cannot be written; it is a folder or a device, not a file", option,
                    file.string());
    }
    const std::filesystem::path part = part_of(file);
    const bool was_there = std::filesystem::exists(part, ignored);
    if (!std::ofstream(part, std::ios::app)) {
        llama::fail("{}: {} cannot be written; its folder must be there, and allow it", option,
                    file.string());
    }
    if (!was_there) {
        std::filesystem::remove(part, ignored);
    }
}

void name_whole(const std::filesystem::path& file) {
    std::error_code error;
    std::filesystem::rename(part_of(file), file, error);
    if (error) {
        llama::fail("{}: cannot be written: {}", file.string(), error.message());
    }
}

void write_whole(const std::filesystem::path& file, std::string_view text) {
    std::ofstream stream(part_of(file), std::ios::binary | std::ios::trunc);
    stream << text;
    stream.close();
    if (!stream) {
        llama::fail("{}: cannot be written; is the disk full?", part_of(file).string());
    }
    name_whole(file);
}

}  // namespace examples
