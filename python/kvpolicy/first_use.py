"""Policies without an instance in the extension modules, compiled at their first use into a cache folder: one
library for build_mask, and one per kind and storage type of a cache."""

import ctypes
import fcntl
import functools
import hashlib
import importlib.resources
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import torch

from kvpolicy.whole_file import write_whole

# The mask of one policy as a C function. It returns 0, or 1 with the message of an error. Without a workspace
# it writes the bytes that the call needs.
_MASK = """
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/eviction_gate.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/masks/cuda/dispatch_build_mask.cuh>
#endif
#include <cstring>

using namespace kvpolicy;

@PARTS@

namespace kvpolicy_python {

struct Call {
    std::uintptr_t stream;  // on the CPU: threads
    std::int32_t device, batch, heads, length, segments;
    const float* scores;
    std::int64_t scores_batch_stride, scores_head_stride;
    expiry_t* expiry;
    const std::int32_t *lengths, *cu_seqlens;
    const std::int32_t *sinks, *windows, *budgets;
    const float *thresholds, *log_gammas;
    std::int32_t number_of[5];
    void* workspace;
    std::size_t bytes;
    char message[1024];
};

template <class T>
PerHead<T> numbers(const Call& call, const T* values, int which) {
    return call.number_of[which] == 1 ? PerHead<T>(*values) : per_head(values, 1, call.number_of[which]);
}

void build(Call& call) {
    const auto sinks = numbers(call, call.sinks, 0), windows = numbers(call, call.windows, 1);
    const auto budgets = numbers(call, call.budgets, 2);
    const auto thresholds = numbers(call, call.thresholds, 3), log_gammas = numbers(call, call.log_gammas, 4);
    static_cast<void>(budgets), static_cast<void>(thresholds), static_cast<void>(log_gammas);
    const kvpolicy::Policy<@TYPES@> policy{@VALUES@};
    const Sequences sequences{.batch = call.batch,
                              .length = call.length,
                              .lengths = call.lengths,
                              .cu_seqlens = call.cu_seqlens,
                              .segments = call.segments};
#if defined(__CUDACC__)
    const kvpolicy::cuda ctx{reinterpret_cast<CUstream_st*>(call.stream), call.device};
#else
    const host ctx(static_cast<int>(call.stream));
#endif
    if (call.workspace == nullptr) {
        call.bytes = build_mask_workspace_bytes(ctx, policy, sequences, call.heads);
        return;
    }
    plane_view<const float> scores;
    if constexpr (decltype(policy)::ranked) {
        scores = {call.scores, call.batch, call.heads, call.length, call.scores_batch_stride,
                  call.scores_head_stride};
    }
    build_mask(ctx, policy, scores, sequences, view_bhs(call.expiry, call.batch, call.heads, call.length),
               {call.workspace, call.bytes});
}

}  // namespace kvpolicy_python

extern "C" __attribute__((visibility("default"))) int kvpolicy_build_mask(kvpolicy_python::Call* call) {
    try {
        kvpolicy_python::build(*call);
        return 0;
    } catch (const std::exception& error) {
        std::strncpy(call->message, error.what(), sizeof(call->message) - 1);
        return 1;
    } catch (...) {
        std::strncpy(call->message, "a part threw what is no std::exception", sizeof(call->message) - 1);
        return 1;
    }
}
"""

# The cache of one policy. The extension module calls what kvpolicy_make_cache makes, if kvpolicy_cache_layout
# says that both were compiled with the same headers.
_CACHE = """
#if defined(__CUDACC__)
#define KVPOLICY_PYTHON_CUDA
#define KVPOLICY_PYTHON_CUDA_TYPES float
#include <kvpolicy/cuda.cuh>
#endif
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <typed_cache.hpp>

using namespace kvpolicy;

@PARTS@

namespace kvpolicy::python {
namespace {

using OwnPolicy = kvpolicy::Policy<@TYPES@>;
OwnPolicy make_policy(const CacheArgs& args) {
    static_cast<void>(args);
    return OwnPolicy{@VALUES@};
}
// A FixedBudgetCache holds what has a budget by head and keeps no key for good.
constexpr bool pooled = @POOLED@ || !OwnPolicy::has_budget || OwnPolicy::has_keep || OwnPolicy::grows ||
                        OwnPolicy::has_selection || OwnPolicy::shares_budget;
constexpr bool given = OwnPolicy::ranked && OwnPolicy::scorer_type::when == score_time::given;

template <class P>
AnyCache* make(const CacheArgs& args) {
    if constexpr (pooled) {
        return new TypedCache<DualCache, P, @TYPE@>(args, make_policy);
    } else {
        return new TypedCache<FixedBudgetCache, P, @TYPE@>(args, make_policy);
    }
}

}  // namespace
}  // namespace kvpolicy::python

#define KVPOLICY_EXPORTED extern "C" __attribute__((visibility("default")))
KVPOLICY_EXPORTED std::uint64_t kvpolicy_cache_layout() { return kvpolicy::python::cache_layout(); }
KVPOLICY_EXPORTED int kvpolicy_cache_traits() {
    return (kvpolicy::python::pooled ? 1 : 0) + (kvpolicy::python::given ? 2 : 0);
}
KVPOLICY_EXPORTED kvpolicy::python::AnyCache* kvpolicy_make_cache(const kvpolicy::python::CacheArgs& args) {
    return kvpolicy::python::make<kvpolicy::python::OwnPolicy>(args);
}
"""

# The package's parts by their C++ types: the arrays of their numbers.
_ARRAYS = {
    "Sink<>": "sinks",
    "Window<>": "windows",
    "TopKBudget<>": "budgets",
    "LayerBudget": "budgets",
    "Decay<1>": "log_gammas",
}
_STORAGE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float", torch.float64: "double"}


class _Call(ctypes.Structure):
    _fields_ = [
        ("stream", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("device", "batch", "heads", "length", "segments")),
        ("scores", ctypes.c_void_p),
        ("scores_batch_stride", ctypes.c_int64),
        ("scores_head_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("expiry", "lengths", "cu_seqlens")),
        *((name, ctypes.c_void_p) for name in ("sinks", "windows", "budgets", "thresholds", "log_gammas")),
        ("number_of", ctypes.c_int32 * 5),
        ("workspace", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("message", ctypes.c_char * 1024),
    ]


# ---- building ----------------------------------------------------------------------------------------------


@functools.cache
def headers():
    """The folders of the library's headers and of those around a cache: in the package, or beside it in a
    source tree."""
    package = pathlib.Path(str(importlib.resources.files("kvpolicy")))
    inside, tree = package / "include", package.parents[1]
    library = inside if inside.is_dir() else tree / "include"
    around = inside / "kvpolicy_python"
    return library, around if around.is_dir() else tree / "python" / "src"


@functools.cache
def _fingerprint():
    """The bytes of all headers, since a cache folder outlives an installation."""
    sums = hashlib.sha256()
    for folder in headers():
        for path in sorted(folder.rglob("*.[hc][pu]*")):
            sums.update(path.read_bytes())
    return sums.digest()


def cache_folder():
    """KVPOLICY_CACHE, or kvpolicy in the user's cache folder."""
    given, base = os.environ.get("KVPOLICY_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if given:
        return pathlib.Path(given).absolute()
    return (pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache") / "kvpolicy"


def _compiler(device):
    """The compiler and its options, by KIND of device. Raises NotImplementedError where there is none."""
    if device.type == "cuda":
        given, others = os.environ.get("CUDACXX"), ("nvcc", "/usr/local/cuda/bin/nvcc")
        major, minor = torch.cuda.get_device_capability(device)
        target = f"{major}{minor}{'a' if major == 9 else ''}"
        options = ["-O3", "-x", "cu", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        options += ["-gencode", f"arch=compute_{target},code=sm_{target}"]
        suffix = ".cu"
    else:
        given, others = os.environ.get("CXX"), ("g++", "clang++", "c++")
        options, suffix = ["-O2", "-fPIC", "-fvisibility=hidden", "-pthread"], ".cpp"
    for name in (given,) if given else others:
        path = shutil.which(name)
        if path:
            return path, ["-std=c++20", "-shared", *options], suffix
    names = given or " or ".join(others)
    raise NotImplementedError(
        f"Policy: an expression without a compiled instance is not allowed here; {names} was not found to "
        "compile one"
    )


@functools.cache
def _version_of(compiler):
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


@functools.cache
def _library(source, device):
    """The compiled source: from the cache folder, or compiled into it. A lock keeps processes from compiling
    the same source at once; a file is renamed into place when it is whole, and compiled again where it is not
    what its sum says."""
    compiler, options, suffix = _compiler(device)
    key = hashlib.sha256(_fingerprint() + _version_of(compiler))
    key.update("\0".join((compiler, *options, source)).encode())
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(
            f"KVPOLICY_CACHE: {folder} is not allowed; it must be a folder that others cannot write to"
        )
    name = key.hexdigest()[:32]
    target = folder / f"{name}.so"
    if not _is_whole(target):
        with open(folder / f"{name}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _compile(compiler, options, source, folder / f"{name}{suffix}", target)
    return ctypes.CDLL(str(target))


def _is_whole(target):
    try:
        said = target.with_suffix(".sum").read_text(encoding="utf-8")
        return said == hashlib.sha256(target.read_bytes()).hexdigest()
    except (FileNotFoundError, UnicodeDecodeError):
        return False


def _compile(compiler, options, source, path, target):
    """Prints the time that it took to stderr."""
    path.write_text(source, encoding="utf-8")
    unfinished = target.with_suffix(f".{os.getpid()}")
    folders = [f"-I{folder}" for folder in headers()]
    start = time.monotonic()
    ran = subprocess.run(
        [compiler, *options, *folders, str(path), "-o", str(unfinished)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        unfinished.unlink(missing_ok=True)
        log = target.with_suffix(".log")
        log.write_text(ran.stderr or ran.stdout, encoding="utf-8")
        found = re.search(r"^.*\berror\b.*$", ran.stderr or ran.stdout, re.M)
        error = found.group(0).strip() if found else f"{compiler} ended with status {ran.returncode}"
        raise RuntimeError(
            f"Policy: {error} (the compiler's first error of {log}) is not allowed; the parts must be those "
            "of docs/extend.md"
        )
    whole = hashlib.sha256(unfinished.read_bytes()).hexdigest()
    size = unfinished.stat().st_size
    unfinished.rename(target)
    write_whole(target.with_suffix(".sum"), whole)
    print(
        f"kvpolicy: compiled a policy with {os.path.basename(compiler)} in {time.monotonic() - start:.1f} s, "
        f"{size / 1024:.0f} KiB in {target}",
        file=sys.stderr,
    )


# ---- expressions -------------------------------------------------------------------------------------------


class Expression(NamedTuple):
    """A policy in C++: its user's sources, and the types and values of its parts, None for a value that an
    array of numbers gives."""

    sources: tuple
    types: tuple
    values: tuple


def expression_of(own_parts, gate, budget, decay, sources=()):
    """own_parts: CppPart and Stride; gate, budget, decay: C++ types, or None, with `sources` that define
    them."""
    package = ["Sink<>", "Window<>", *(kind for kind in (gate, budget, decay) if kind)]
    own = [f"std::remove_cvref_t<decltype({part.expression})>" for part in own_parts]
    values = [None] * len(package) + [part.expression for part in own_parts]
    return Expression((*(part.source for part in own_parts), *sources), (*package, *own), tuple(values))


def _filled(template, expression, value_of, **others):
    """A template with the parts of a policy. Errors in a user's source name its part and line."""
    parts = "\n".join(
        f'#line 1 "part {number}"\n{source}' for number, source in enumerate(expression.sources, 1) if source
    )
    values = [value_of(kind) if value is None else value for kind, value in zip(*expression[1:])]
    texts = others | {
        "PARTS": f'{parts}\n#line 1 "policy"',
        "TYPES": ", ".join(expression.types),
        "VALUES": ", ".join(values),
    }
    return re.sub("@([A-Z]+)@", lambda found: texts[found[1]], template)


def mask_source(expression):
    return _filled(_MASK, expression, lambda kind: f"{kind}{{{_ARRAYS.get(kind, 'thresholds')}}}")


class CacheLibrary(NamedTuple):
    """Addresses of functions of a library, whether its cache takes pages, and whether the caller gives
    scores."""

    factory: int
    layout: int
    pooled: bool
    given: bool


def cache_library(expression, pooled, dtype, device):
    """The library of a cache with the policy `expression`; `pooled` where its budgets are too large for a
    FixedBudgetCache."""
    source = _filled(
        _CACHE,
        expression,
        lambda kind: f"part_of<{kind}>(args)",
        POOLED="true" if pooled else "false",
        TYPE=_STORAGE[dtype],
    )
    library = _library(source, device)
    traits = library.kvpolicy_cache_traits()
    addresses = [
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.kvpolicy_make_cache, library.kvpolicy_cache_layout)
    ]
    return CacheLibrary(*addresses, bool(traits & 1), bool(traits & 2))


# ---- masks -------------------------------------------------------------------------------------------------


def _pointer(tensor, name, like, count):
    """The address of an int32 tensor, or None."""
    if tensor is None:
        return None
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name}: {str(tensor.dtype)[6:]} is not allowed; it must be int32")
    if tensor.device != like.device or (count is not None and tensor.numel() != count):
        allowed = f"{count or 'the edges as'} numbers on {like.device}"
        raise ValueError(
            f"{name}: {tuple(tensor.shape)} on {tensor.device} is not allowed; it must be {allowed}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: a tensor with gaps is not allowed; it must be contiguous")
    return tensor.data_ptr()


def build_mask(source, policy, scores, lengths, cu_seqlens, expiry):
    """Writes expiry [B, Hkv, S] from scores of its shape, float32, with a contiguous last dimension. `policy`
    is (instance, sinks, windows, budgets, thresholds, log_gammas)."""
    function = _library(source, scores.device).kvpolicy_build_mask
    call = _Call(device=-1, stream=torch.get_num_threads())
    if scores.device.type == "cuda":
        call.device = scores.device.index
        call.stream = torch._C._cuda_getCurrentRawStream(scores.device.index)
    call.batch, call.heads, call.length = scores.shape
    call.scores, call.expiry = scores.data_ptr(), expiry.data_ptr()
    call.scores_batch_stride, call.scores_head_stride = scores.stride()[:2]
    call.lengths = _pointer(lengths, "lengths", scores, scores.shape[0])
    call.cu_seqlens = _pointer(cu_seqlens, "cu_seqlens", scores, None)
    call.segments = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    kept = []
    for at, (name, values) in enumerate(
        zip(("sinks", "windows", "budgets", "thresholds", "log_gammas"), policy[1:])
    ):
        array = ((ctypes.c_int32 if at < 3 else ctypes.c_float) * len(values))(*values)
        kept.append(array)
        setattr(call, name, ctypes.addressof(array))
        call.number_of[at] = len(values)

    def run():
        if function(ctypes.byref(call)) != 0:
            raise ValueError(call.message.decode())

    run()
    workspace = torch.empty(max(1, call.bytes), dtype=torch.uint8, device=scores.device)
    call.workspace, call.bytes = workspace.data_ptr(), workspace.numel()
    run()
