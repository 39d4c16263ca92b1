// Files that have their name only once they are whole: until then, and after an error, they are NAME.part.
#pragma once

#include <filesystem>
#include <string_view>

namespace examples {

std::filesystem::path part_of(const std::filesystem::path& file);

/// Before work whose result goes to this file: throws llama::Error, with the option that named it, where it
/// could not be written later, since its folder is missing for instance. Leaves nothing behind.
void check_can_write(std::string_view option, const std::filesystem::path& file);

/// NAME.part gets its name. Throws llama::Error where that is not possible.
void name_whole(const std::filesystem::path& file);

/// Writes all of a file; what had the name before stays until then. Throws llama::Error.
void write_whole(const std::filesystem::path& file, std::string_view text);

}  // namespace examples
