// SIGINT and SIGTERM as a request to end between two steps.
#pragma once

#include <csignal>

namespace train {

/// While an object lives, the first SIGINT or SIGTERM only sets signal(); a second one ends the process, as
/// without an object. One object at a time.
class Interrupts {
  public:
    Interrupts();
    ~Interrupts();
    Interrupts(const Interrupts&) = delete;
    Interrupts& operator=(const Interrupts&) = delete;

    /// The signal that came; 0: none.
    static int signal();

  private:
    struct sigaction interrupt_ {
    }, terminate_{};  // what was there before
};

}  // namespace train
