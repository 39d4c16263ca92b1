// main() of the programs of this folder.
#pragma once

namespace examples {

/// Calls run(argc, argv) and returns its status. An exception is printed to standard error behind all that
/// the program has printed, in one log too, and gives 1; so does a standard output that could not be written.
int run_program(const char* name, int (*run)(int argc, char** argv), int argc, char** argv);

}  // namespace examples
