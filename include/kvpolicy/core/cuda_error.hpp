// What a failed CUDA call becomes. Plain C++: callers without CUDA headers can catch it.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/error.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

#if KVPOLICY_EXCEPTIONS
#include <stdexcept>
#endif

namespace kvpolicy {

#if KVPOLICY_EXCEPTIONS
/// Thrown where a CUDA call or a launch fails. what() names the call, CUDA's own text, and file and line. An
/// error of work that runs later on the stream appears at a later call, as always in CUDA.
class cuda_error : public std::runtime_error {
  public:
    cuda_error(const std::string& message, int code, const char* call, const char* file, unsigned line)
        : std::runtime_error(message), code_(code), call_(call), file_(file), line_(line) {}

    /// The cudaError_t.
    [[nodiscard]] int code() const noexcept { return code_; }
    [[nodiscard]] const char* call() const noexcept { return call_; }
    [[nodiscard]] const char* file() const noexcept { return file_; }
    [[nodiscard]] unsigned line() const noexcept { return line_; }

  private:
    int code_;
    const char* call_;  // literals
    const char* file_;
    unsigned line_;
};
#endif

namespace detail {

/// Reports a failed CUDA call: throws cuda_error, or gives the same text to the handler of set_error_handler.
/// `call` and `file` must outlive the error.
[[noreturn]] inline void fail_cuda(const std::string& text, int code, const char* call, const char* file,
                                   unsigned line) {
    const std::string message =
        std::string(call) + " failed: " + text + " (" + file + ":" + std::to_string(line) + ")";
#if KVPOLICY_EXCEPTIONS
    throw cuda_error(message, code, call, file, line);
#else
    static_cast<void>(code);
    if (error_handler handler = installed_error_handler()) {
        handler(message.c_str());
    }
    std::fprintf(stderr, "kvpolicy: %s\n", message.c_str());
    std::abort();
#endif
}

}  // namespace detail

}  // namespace kvpolicy
