#include "program.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>

namespace examples {

int run_program(const char* name, int (*run)(int argc, char** argv), int argc, char** argv) {
    // Line by line, so that a log says how far a program came that was killed.
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
    int status = 1;
    try {
        status = run(argc, argv);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        fmt::print(stderr, "{}: {}\n", name, error.what());
        return 1;
    }
    const bool failed = std::ferror(stdout) != 0;
    if (std::fflush(stdout) != 0 || failed) {
        fmt::print(stderr, "{}: standard output cannot be written: {}\n", name,
                   std::strerror(errno == 0 ? ENOSPC : errno));
        return 1;
    }
    return status;
}

}  // namespace examples
