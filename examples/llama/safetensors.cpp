#include "safetensors.hpp"

#include "error.hpp"

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <unordered_set>

static_assert(std::endian::native == std::endian::little, "safetensors stores little-endian numbers");

namespace llama {
namespace {

using json = nlohmann::json;

// The limit of the format's own description; it bounds what a hostile header can make the JSON
// parser allocate.
constexpr std::uint64_t max_header_bytes = 100'000'000;

// root object > tensor's object > shape's array
constexpr int max_depth = 3;

struct FileHandle {
    int fd;
    ~FileHandle() {
        if (fd >= 0) ::close(fd);
    }
};

json parse_header(const std::string& file, std::string_view text) {
    // The parser keeps the last of two equal keys silently, so duplicates are caught while it runs.
    std::vector<std::unordered_set<std::string>> keys;
    auto check = [&](int depth, json::parse_event_t event, json& value) {
        if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
            if (depth >= max_depth) fail("{}: the header nests deeper than {} levels", file, max_depth);
            keys.resize(static_cast<std::size_t>(depth) + 1);
            keys.back().clear();
        } else if (event == json::parse_event_t::key) {
            const auto& key = value.get_ref<const std::string&>();
            if (!keys.at(static_cast<std::size_t>(depth) - 1).insert(key).second)
                fail("{}: {} appears twice in the header, names must be unique", file, printable(key));
        }
        return true;
    };
    try {
        json header = json::parse(text.begin(), text.end(), check);
        if (!header.is_object())
            fail("{}: the header is a JSON {}, it must be an object", file, header.type_name());
        return header;
    } catch (const json::parse_error& error) {
        fail("{}: the header is not valid JSON at byte {} of {}", file, error.byte, text.size());
    } catch (const json::exception&) {
        // e.g. a number that no type can hold
        fail("{}: the header is not valid JSON", file);
    }
}

/// What one entry of the header says, with error messages that know where they are.
struct Entry {
    const std::string& file;
    const std::string& name;
    const json& value;

    template <class... Args>
    [[noreturn]] void reject(fmt::format_string<Args...> format, Args&&... args) const {
        fail("{}: tensor {}: {}", file, printable(name), fmt::format(format, std::forward<Args>(args)...));
    }

    const json& field(const char* key) const {
        if (!value.is_object()) reject("its entry is a JSON {}, it must be an object", value.type_name());
        auto it = value.find(key);
        if (it == value.end())
            reject("its entry has no \"{}\"; dtype, shape and data_offsets are required", key);
        return *it;
    }

    std::uint64_t integer(const json& number, const char* what) const {
        if (!number.is_number_unsigned())
            reject("{} is {}, it must be an integer from 0 to 2^63 - 1", what, clipped(number.dump()));
        const auto n = number.get<std::uint64_t>();
        if (n > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
            reject("{} is {}, it must be an integer from 0 to 2^63 - 1", what, n);
        return n;
    }

    DType dtype() const {
        const json& text = field("dtype");
        if (text == "F32") return DType::f32;
        if (text == "F16") return DType::f16;
        if (text == "BF16") return DType::bf16;
        reject("dtype is {}, allowed are F32, F16 and BF16",
               text.is_string() ? printable(text.get_ref<const std::string&>()) : text.type_name());
    }
};

Tensor read_entry(const Entry& entry, const std::byte* data, std::size_t data_bytes,
                  std::pair<std::uint64_t, std::uint64_t>& range) {
    Tensor tensor;
    tensor.name = entry.name;
    tensor.dtype = entry.dtype();

    const json& shape = entry.field("shape");
    if (!shape.is_array()) entry.reject("shape is a JSON {}, it must be an array", shape.type_name());
    std::uint64_t bytes = bytes_of(tensor.dtype);
    bool empty = false;
    for (const json& dim : shape) {
        const std::uint64_t n = entry.integer(dim, "a dimension of its shape");
        tensor.shape.push_back(static_cast<std::int64_t>(n));
        empty = empty || n == 0;
        // Also beside a dimension of 0: the product of the others must not wrap for whoever multiplies them.
        if (n != 0 && bytes > std::numeric_limits<std::uint64_t>::max() / n)
            entry.reject("shape {} has more bytes than 64 bits can count", shape_text(tensor.shape));
        if (n != 0) bytes *= n;
    }
    if (empty) bytes = 0;

    const json& offsets = entry.field("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2)
        entry.reject("data_offsets must be an array of two integers");
    const std::uint64_t begin = entry.integer(offsets[0], "data_offsets[0]");
    const std::uint64_t end = entry.integer(offsets[1], "data_offsets[1]");
    if (begin > end)
        entry.reject("data_offsets are [{}, {}], the first must not exceed the second", begin, end);
    if (end > data_bytes)
        entry.reject(
            "data_offsets end at byte {}, but only {} bytes follow the header: the file is truncated or the "
            "header is wrong",
            end, data_bytes);
    if (end - begin != bytes)
        entry.reject("data_offsets [{}, {}] hold {} bytes, but {} of shape {} needs {}", begin, end,
                     end - begin, name_of(tensor.dtype), shape_text(tensor.shape), bytes);

    range = {begin, end};
    tensor.numel = static_cast<std::size_t>(bytes / bytes_of(tensor.dtype));
    tensor.data = data + begin;
    return tensor;
}

float half_to_float(std::uint16_t half) noexcept {
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t rest = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
    // Shifted into place, the exponent is too small by 127 - 15. A multiplication by 2^112 corrects it
    // exactly and makes subnormals normal; infinity and NaN need their all-ones exponent set by hand.
    float value = std::bit_cast<float>(rest) * 0x1p112f;
    if (rest >= 0x7c00u << 13) value = std::bit_cast<float>(rest | 0x7f800000u);
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | sign);
}

}  // namespace

std::string_view name_of(DType type) noexcept {
    return type == DType::f32 ? "F32" : type == DType::f16 ? "F16" : "BF16";
}

std::size_t bytes_of(DType type) noexcept { return type == DType::f32 ? 4 : 2; }

Safetensors::Safetensors(const std::filesystem::path& path) : path_(path.string()) {
    FileHandle file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
    struct stat info {};
    if (file.fd < 0 || ::fstat(file.fd, &info) != 0)
        fail("{}: cannot be opened: {}", path_, std::strerror(errno));
    if (!S_ISREG(info.st_mode)) fail("{}: is not a regular file", path_);
    const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
    if (file_bytes < 8)
        fail("{}: is {} bytes long, too short for a safetensors file's 8-byte length", path_, file_bytes);

    void* mapped = ::mmap(nullptr, file_bytes, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (mapped == MAP_FAILED) fail("{}: cannot be mapped: {}", path_, std::strerror(errno));
    // A constructor that throws runs no destructor, so the mapping has an owner of its own until the end.
    auto unmap = [file_bytes](void* p) { ::munmap(p, file_bytes); };
    std::unique_ptr<void, decltype(unmap)> owner(mapped, unmap);
    const auto* bytes = static_cast<const std::byte*>(mapped);

    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes, 8);
    if (header_bytes > max_header_bytes)
        fail("{}: the header's length is {}, at most {} is allowed", path_, header_bytes, max_header_bytes);
    if (header_bytes > file_bytes - 8)
        fail(
            "{}: the header's length is {}, but only {} bytes follow it: the file is truncated or no "
            "safetensors file",
            path_, header_bytes, file_bytes - 8);
    const json header = parse_header(
        path_, {reinterpret_cast<const char*>(bytes) + 8, static_cast<std::size_t>(header_bytes)});

    struct Placed {
        std::pair<std::uint64_t, std::uint64_t> range;
        Tensor tensor;
    };
    std::vector<Placed> placed;
    const std::byte* data = bytes + 8 + header_bytes;
    const std::size_t data_bytes = file_bytes - 8 - header_bytes;
    for (const auto& [name, value] : header.items()) {
        if (name == "__metadata__") {  // free text about the file; what is no text is of no use
            if (value.is_object())
                for (const auto& [key, text] : value.items())
                    if (text.is_string()) metadata_.emplace(key, text.get<std::string>());
            continue;
        }
        Placed& next = placed.emplace_back();
        next.tensor = read_entry({path_, name, value}, data, data_bytes, next.range);
    }

    // The format wants the tensors to cover the data exactly: an overlap or a gap means a wrong or a
    // doctored header.
    std::ranges::sort(placed, {}, &Placed::range);
    std::uint64_t covered = 0;
    for (Placed& next : placed) {
        const auto [begin, end] = next.range;
        if (begin < covered)
            fail("{}: tensor {} begins at byte {}, inside tensor {}, which ends at byte {}", path_,
                 printable(next.tensor.name), begin, printable(tensors_.back().name), covered);
        if (begin > covered)
            fail("{}: bytes {} to {} of the data belong to no tensor", path_, covered, begin);
        covered = end;
        tensors_.push_back(std::move(next.tensor));
    }
    if (covered != data_bytes)
        fail("{}: bytes {} to {} of the data belong to no tensor", path_, covered, data_bytes);

    for (std::size_t i = 0; i < tensors_.size(); ++i) by_name_.emplace(tensors_[i].name, i);
    mapped_ = owner.release();
    mapped_bytes_ = file_bytes;
}

Safetensors::~Safetensors() { ::munmap(mapped_, mapped_bytes_); }

const Tensor* Safetensors::find(std::string_view name) const noexcept {
    const auto it = by_name_.find(name);
    return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

void to_float(const Tensor& tensor, std::span<float> out) {
    if (out.size() != tensor.numel)
        fail("to_float: out holds {} elements, tensor {} has {}", out.size(), printable(tensor.name),
             tensor.numel);
    if (tensor.dtype == DType::f32) {
        if (!out.empty()) std::memcpy(out.data(), tensor.data, out.size_bytes());
        return;
    }
    for (std::size_t i = 0; i < out.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, tensor.data + 2 * i, 2);
        out[i] = tensor.dtype == DType::f16 ? half_to_float(bits)
                                            : std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
    }
}

}  // namespace llama
