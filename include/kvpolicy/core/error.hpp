// Errors are part of the interface: a bad argument is refused with one sentence that names the argument, its
// value and what is allowed, before anything is launched or written.
//
// With exceptions a refusal throws kvpolicy::invalid_argument. Without them (-fno-exceptions) the same text
// reaches the handler that set_error_handler installed; the handler must not return to the library. If it
// does, or none is installed, the process prints the text and aborts.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

#if KVPOLICY_EXCEPTIONS
#include <stdexcept>
#endif

namespace kvpolicy {

#if KVPOLICY_EXCEPTIONS
/// Thrown for every refused argument. what() is one sentence: argument, value, what is allowed.
class invalid_argument : public std::invalid_argument {
  public:
    using std::invalid_argument::invalid_argument;
};
#endif

/// Receives the text of a refusal in builds without exceptions. It must not return.
using error_handler = void (*)(const char* message);

namespace detail {

inline error_handler& installed_error_handler() noexcept {
    static error_handler handler = nullptr;
    return handler;
}

/// The text of a value inside a message.
inline std::string text_of(const std::string& value) { return value; }
inline std::string text_of(const char* value) { return value; }
template <class Value>
requires std::is_arithmetic_v<Value> std::string text_of(Value value) {
    if constexpr (std::is_same_v<Value, bool>) {
        return value ? "true" : "false";
    } else if constexpr (std::is_floating_point_v<Value>) {
        char buffer[40];
        std::snprintf(buffer, sizeof buffer, "%g", static_cast<double>(value));
        return buffer;
    } else {
        return std::to_string(value);
    }
}

/// A text that is made only when it is needed: [&] { return "at least " + std::to_string(n); }. Calls on the
/// fast path use it, since they must not allocate.
template <class Make>
requires std::is_invocable_v<const Make&> std::string text_of(const Make& make) { return make(); }

/// The texts of several values, one after another: text("at least ", rows). (Sums of strings that begin with
/// a literal draw false warnings from g++ 12, and so would from our users' builds.)
template <class... Parts>
std::string text(const Parts&... parts) {
    std::string joined;
    (joined.append(text_of(parts)), ...);
    return joined;
}

/// Refuses with a finished text: throws, or calls the handler. Never returns.
[[noreturn]] inline void refuse(const std::string& message) {
#if KVPOLICY_EXCEPTIONS
    throw invalid_argument(message);
#else
    if (error_handler handler = installed_error_handler()) {
        handler(message.c_str());
    }
    std::fprintf(stderr, "kvpolicy: %s\n", message.c_str());
    std::abort();
#endif
}

/// Refuses `argument`: "argument: value is not allowed; it must be ...".
template <class Value>
[[noreturn]] void refuse(const char* argument, const Value& value, const std::string& allowed) {
    refuse(text(argument, ": ", value, " is not allowed; it must be ", allowed));
}

/// The usual check. The message is built only when the check fails; `argument` and `allowed` are
/// texts, or make them.
template <class Argument, class Value, class Allowed>
void require(bool condition, const Argument& argument, const Value& value, const Allowed& allowed) {
    if (!condition) [[unlikely]] {
        refuse(text_of(argument).c_str(), value, text_of(allowed));
    }
}

}  // namespace detail

/// Installs the handler that receives refusals in builds without exceptions, and returns the previous one. It
/// has no effect on builds with exceptions. Not synchronized: call it once at start-up.
inline error_handler set_error_handler(error_handler handler) noexcept {
    error_handler previous = detail::installed_error_handler();
    detail::installed_error_handler() = handler;
    return previous;
}

}  // namespace kvpolicy
