// JSON of strangers.
#pragma once
#include "error.hpp"

#include <nlohmann/json.hpp>

#include <string>

namespace llama {

/// A callback for the parser. Refuses a document that nests deeper than `max_depth` levels: functions that
/// recurse into such a document, to print it say, would take all of the stack.
inline auto depth_limit(const std::string& file, int max_depth) {
    return [&file, max_depth](int depth, nlohmann::json::parse_event_t event, nlohmann::json&) {
        using event_t = nlohmann::json::parse_event_t;
        const bool opens = event == event_t::object_start || event == event_t::array_start;
        if (opens && depth >= max_depth) fail("{}: nests deeper than {} levels", file, max_depth);
        return true;
    };
}

}  // namespace llama
