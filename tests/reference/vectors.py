"""Committed test vectors: named arrays in one plain little-endian file, the "kvpv1" container.

    bytes       content
    8           "kvpv1", then three zero bytes
    uint32      number of arrays
    then for each array:
    uint32      length of its name in bytes, 1..255
    n           its name, ASCII
    uint32      element type: 0 int32, 1 float32, 2 float64
    uint32      number of dimensions, 0..8
    int64 each  dimensions, outermost first
    n           elements, row-major, as they are in memory: infinities, NaN payloads and -0 are kept exactly

Nothing is padded and nothing follows the last array. tests/support/vectors.hpp reads the same file from C++.
"""

import struct

import numpy as np

MAGIC = b"kvpv1\0\0\0"
TYPES = [np.dtype("<i4"), np.dtype("<f4"), np.dtype("<f8")]


def stored_type(array):
    """The element type an array is written with. Integers must fit int32; other types are refused,
    not converted."""
    if array.dtype.kind in "iub":
        if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
            raise ValueError("an integer does not fit int32")
        return 0
    for code, dtype in enumerate(TYPES):
        if array.dtype == dtype:
            return code
    raise ValueError(f"type {array.dtype} has no place in a kvpv1 file")


def dumps(arrays):
    """The bytes of a file with these arrays, {name: array}, in the order given."""
    parts = [MAGIC, struct.pack("<I", len(arrays))]
    for name, value in arrays.items():
        array = np.asarray(value)
        code = stored_type(array)
        encoded = name.encode("ascii")
        if not 1 <= len(encoded) <= 255 or array.ndim > 8:
            raise ValueError(f"array {name!r}: its name or its rank is out of range")
        parts += [struct.pack("<I", len(encoded)), encoded, struct.pack("<II", code, array.ndim)]
        parts += [struct.pack("<q", size) for size in array.shape]
        parts.append(np.ascontiguousarray(array, dtype=TYPES[code]).tobytes())
    return b"".join(parts)


def loads(data):
    """The arrays of a file's bytes. Refuses anything malformed."""
    position = 0

    def take(count):
        nonlocal position
        if count < 0 or position + count > len(data):
            raise ValueError(f"kvpv1: the file ends at byte {len(data)}, {count} bytes wanted at {position}")
        position += count
        return data[position - count : position]

    def integer(form):
        return struct.unpack(form, take(struct.calcsize(form)))[0]

    if take(8) != MAGIC:
        raise ValueError("kvpv1: wrong magic bytes")
    arrays = {}
    for _ in range(integer("<I")):
        length = integer("<I")
        name = take(length).decode("ascii")
        code, rank = integer("<I"), integer("<I")
        if not name or length > 255 or name in arrays or code >= len(TYPES) or rank > 8:
            raise ValueError(f"kvpv1: bad header of array {name!r}")
        shape = [integer("<q") for _ in range(rank)]
        if any(size < 0 for size in shape):
            raise ValueError(f"kvpv1: array {name!r} has a negative dimension")
        count = 1
        for size in shape:
            count *= size
        raw = take(count * TYPES[code].itemsize)
        arrays[name] = np.frombuffer(raw, dtype=TYPES[code]).reshape(shape)
    if position != len(data):
        raise ValueError("kvpv1: bytes follow the last array")
    return arrays


def save(path, arrays):
    with open(path, "wb") as file:
        file.write(dumps(arrays))


def load(path):
    with open(path, "rb") as file:
        return loads(file.read())
