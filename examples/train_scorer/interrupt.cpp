#include "interrupt.hpp"

namespace train {
namespace {

volatile std::sig_atomic_t received = 0;

void receive(int number) { received = number; }

}  // namespace

Interrupts::Interrupts() {
    received = 0;
    struct sigaction once {};
    once.sa_handler = receive;
    sigemptyset(&once.sa_mask);
    once.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &once, &interrupt_);
    sigaction(SIGTERM, &once, &terminate_);
}

Interrupts::~Interrupts() {
    sigaction(SIGINT, &interrupt_, nullptr);
    sigaction(SIGTERM, &terminate_, nullptr);
    received = 0;
}

int Interrupts::signal() { return received; }

}  // namespace train
