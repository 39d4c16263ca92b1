// Files that programs write: whole after a kill or on a full disk, and written by one process at a time.
#include "support.hpp"
#include "support/fingerprint.hpp"
#include "support/line_file.hpp"
#include "support/safetensors_writer.hpp"
#include "support/whole_file.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <thread>

using namespace examples;
using test::contains;
using test::message_of;

namespace {

std::string content(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

std::ptrdiff_t files_in(const test::Folder& folder) {
    return std::distance(std::filesystem::directory_iterator(folder.path()), {});
}

/// A process that runs `work`, and ends with 0 where it returns true.
template <class Work>
pid_t start(Work&& work) {
    const pid_t child = fork();
    if (child == 0) {
        bool good = false;
        try {
            good = work();
        } catch (...) {
        }
        _exit(good ? 0 : 1);
    }
    return child;
}

int status_of(pid_t child) {
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

/// Files of this process may have so many bytes: what a full disk is to a writer.
void limit_files(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
}

constexpr std::size_t mebibyte = std::size_t{1} << 20;

}  // namespace

TEST_CASE("kill -9 in the middle of writing leaves a whole file") {
    const test::Folder folder;
    const auto file = folder.path() / "out";
    const std::string texts[] = {std::string(3 * mebibyte, 'a'), std::string(2 * mebibyte + 1, 'b')};
    write_whole(file, texts[0]);
    std::mt19937 random(1);
    for (int round = 0; round < 30; ++round) {
        const pid_t child = start([&] {
            const OutputLock lock("--out", file);
            for (std::size_t i = 1;; ++i) {
                write_whole(file, texts[i % 2]);
            }
            return true;
        });
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
        kill(child, SIGKILL);
        CHECK(WIFSIGNALED(status_of(child)));
        const std::string now = content(file);
        const bool is_whole = now == texts[0] || now == texts[1];
        CHECK(is_whole);
    }
    {
        const OutputLock next("--out", file);  // the killed ones hold it no longer
        CHECK(files_in(folder) == 2);          // and what they left is gone
    }
    CHECK(files_in(folder) == 1);
}

TEST_CASE("a full disk leaves the old file") {
    const test::Folder folder;
    const auto file = folder.write("out", "old");
    const std::string text(4 * mebibyte, 'x');
    const pid_t child = start([&] {
        limit_files(mebibyte + 100);
        const bool refused =
            contains(message_of([&] { write_whole(file, text); }), "out: cannot be written: File too large");
        SafetensorsWriter writer(file, {{"x", llama::DType::f32, {1 << 20}}}, {});
        return refused && contains(message_of([&] {
                                       writer.write(std::vector<float>(1 << 20));
                                       writer.finish();
                                   }),
                                   "out: cannot be written: File too large");
    });
    CHECK(status_of(child) == 0);
    CHECK(content(file) == "old");
    CHECK(files_in(folder) == 1);
    CHECK(contains(message_of([&] { write_whole(folder.path() / "no" / "out", "x"); }),
                   "cannot be written: No such file"));
}

TEST_CASE("two writers of one name leave the file of one of them") {
    const test::Folder folder;
    const auto file = folder.path() / "out";
    const std::string texts[] = {std::string(2 * mebibyte, 'a'), std::string(2 * mebibyte, 'b')};
    const auto write = [&](std::size_t which) {
        return start([&, which] {
            for (int i = 0; i < 10; ++i) {
                write_whole(file, texts[which]);
            }
            return true;
        });
    };
    const pid_t a = write(0), b = write(1);
    CHECK(status_of(a) == 0);
    CHECK(status_of(b) == 0);
    const std::string now = content(file);
    const bool is_whole = now == texts[0] || now == texts[1];
    CHECK(is_whole);
    CHECK(files_in(folder) == 1);
}

TEST_CASE("a file is kept for one process") {
    const test::Folder folder;
    const auto file = folder.path() / "out";
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t child = start([&] {
        const OutputLock lock("--out", file);
        const ssize_t told = write(ready[1], "x", 1);
        pause();
        return told == 1;
    });
    char told = 0;
    REQUIRE(read(ready[0], &told, 1) == 1);
    CHECK(contains(message_of([&] { OutputLock("--out", file); }),
                   "--out: " + file.string() + " is being written by another process; it must end first"));
    CHECK(message_of([&] { OutputLock("--out", folder.path() / "other"); }) == "");
    kill(child, SIGKILL);
    status_of(child);
    CHECK(message_of([&] { OutputLock("--out", file); }) == "");
    CHECK(files_in(folder) == 0);
    close(ready[0]);
    close(ready[1]);

    CHECK(contains(message_of([&] { OutputLock("--out", folder.path()); }), "it is a folder or a device"));
    CHECK(contains(message_of([&] { OutputLock("--out", folder.path() / "no" / "out"); }),
                   "its folder must be there, and allow it: No such file"));
    // Only temporary files of this name are removed.
    for (const char* name :
         {"out.abc123.part", "out.part", "out.abc12.part", "out.ABC123.part", "x.abc123.part"}) {
        folder.write(name, "");
    }
    CHECK(message_of([&] { OutputLock("--out", file); }) == "");
    CHECK(files_in(folder) == 4);
    CHECK(!std::filesystem::exists(folder.path() / "out.abc123.part"));
}

TEST_CASE("a link stays, and a file is readable as the umask says") {
    const test::Folder folder;
    const auto file = folder.write("real", "old"), link = folder.path() / "link";
    std::filesystem::create_symlink("real", link);
    write_whole(link, "new");
    CHECK(std::filesystem::is_symlink(link));
    CHECK(content(file) == "new");
    const mode_t mask = umask(0);
    umask(mask);
    struct stat info {};
    REQUIRE(stat(file.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777u) == (0666u & ~mask));
}

TEST_CASE("lines are whole or not there") {
    const test::Folder folder;
    const auto file = folder.write("lines", "of an older run\n");
    {
        LineFile lines(file, false);
        CHECK(content(file) == "of an older run\n");  // until there is something new
        lines.add("one");
        lines.add("two");
        CHECK(content(file) == "one\ntwo\n");
    }
    folder.write("lines", "one\ntwo\nthr");  // killed in the middle
    {
        LineFile lines(file, true);
        lines.add("three");
    }
    CHECK(content(file) == "one\ntwo\nthree\n");
    const pid_t child = start([&] {
        limit_files(20);
        LineFile lines(file, true);
        return contains(message_of([&] { lines.add("a line of many bytes"); }),
                        "cannot be written: File too large");
    });
    CHECK(status_of(child) == 0);
    CHECK(content(file) == "one\ntwo\nthree\n");
    LineFile full("/dev/full", false);
    CHECK(contains(message_of([&] { full.add("x"); }),
                   "/dev/full: cannot be written: No space left on device"));
    CHECK(contains(message_of([&] { LineFile(folder.path() / "no" / "x", true); }),
                   "cannot be written: No such"));
}

TEST_CASE("a fingerprint depends on every byte and on where it ends") {
    const auto of = [](std::initializer_list<std::string> texts) {
        Fingerprint sum;
        for (const std::string& text : texts) {
            sum.add(text);
        }
        return sum.value();
    };
    const std::string text = "twenty bytes of text";
    for (std::size_t i = 0; i < text.size(); ++i) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string other = text;
            other[i] = static_cast<char>(other[i] ^ (1 << bit));
            CHECK(of({text}) != of({other}));
        }
    }
    CHECK(of({text}) == of({text}));
    CHECK(of({"ab", "c"}) != of({"a", "bc"}));
    CHECK(of({text}) != of({text + '\0'}));
    CHECK(of({text, ""}) != of({text}));
    CHECK(Fingerprint().text().size() == 16);
}
