// CHECK_REFUSED(expression, "text"): the expression is refused, and the sentence contains the text. With
// exceptions that is kvpolicy::invalid_argument; without them the installed handler jumps back here.
// Include after doctest.
#pragma once

#include <kvpolicy/core/error.hpp>

#include <string>

#if !KVPOLICY_EXCEPTIONS
#include <csetjmp>
#endif

namespace test {

#if KVPOLICY_EXCEPTIONS

/// The sentence that `call` is refused with; empty where it is not refused.
template <class Call>
std::string refusal_of(Call&& call) {
    try {
        call();
    } catch (const kvpolicy::invalid_argument& refused) {
        return refused.what();
    }
    return {};
}

#else

inline std::jmp_buf& refusal_point() {
    static std::jmp_buf point;
    return point;
}
inline std::string& refusal_text() {
    static std::string text;
    return text;
}

/// The jump skips destructors between the refusal and here: a leak at most, which these builds of
/// the tests accept.
template <class Call>
std::string refusal_of(Call&& call) {
    const kvpolicy::error_handler previous = kvpolicy::set_error_handler([](const char* message) {
        refusal_text() = message;
        std::longjmp(refusal_point(), 1);
    });
    refusal_text().clear();
    if (setjmp(refusal_point()) == 0) {
        call();
    }
    kvpolicy::set_error_handler(previous);
    return refusal_text();
}

#endif

}  // namespace test

#define CHECK_REFUSED(expression, text)                                                         \
    do {                                                                                        \
        const std::string refusal = ::test::refusal_of([&] { static_cast<void>(expression); }); \
        CAPTURE(refusal);                                                                       \
        CHECK_MESSAGE(!refusal.empty(), "not refused: " #expression);                           \
        CHECK(refusal.find(text) != std::string::npos);                                         \
    } while (false)
