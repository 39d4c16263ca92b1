// Calls both libraries, each of them before and after the other.
#include <cstdio>
#include <cstring>

extern "C" int kvpolicy_now(char* text, std::size_t size);
extern "C" int kvpolicy_next(char* text, std::size_t size);

int main() {
    int faults = 0;
    for (int round = 0; round < 2; ++round) {
        char now[200] = "", next[200] = "";
        const int now_rows = kvpolicy_now(now, sizeof now), next_rows = kvpolicy_next(next, sizeof next);
        std::printf("%d rows, %s\n%d rows, %s\n", now_rows, now, next_rows, next);
        faults += now_rows != 8 || next_rows != 8 || std::strstr(now, "it must be") == nullptr ||
                  std::strstr(next, "it has to be") == nullptr || std::strncmp(next, "99.", 3) != 0;
    }
    return faults;
}
