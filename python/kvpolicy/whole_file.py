"""Files that are whole or not there, and locks that keep a file for one process.

The same as examples/apps/support/whole_file.hpp, and the same names of temporary files and locks, so that
programs of either language keep out of each other's way. The standard library alone: tools use it, too."""

import contextlib
import fcntl
import os
import pathlib
import random
import re
import string
import tempfile

_LETTERS = string.ascii_lowercase + string.digits
_draw = random.SystemRandom()


@contextlib.contextmanager
def whole_path(path):
    """The path of a temporary file beside `path`, NAME.XXXXXX.part, for a writer that takes a path. At the
    end of the block its bytes are brought to the disk and it gets the name of `path`. After an error, a kill
    or on a full disk what had the name stays. OSError where it cannot be written."""
    path = pathlib.Path(os.path.realpath(path))
    while True:
        part = path.with_name(f"{path.name}.{''.join(_draw.choices(_LETTERS, k=6))}.part")
        try:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            break
        except FileExistsError:
            continue
    try:
        mode = part.stat().st_mode
        yield part
        os.chmod(part, mode)  # a writer may have made a file of its own
        _sync(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def whole_file(path, mode="w", **options):
    """The open file of whole_path; options as of open()."""
    with whole_path(path) as part, open(part, mode, **options) as file:
        yield file


@contextlib.contextmanager
def whole_files(folder):
    """A temporary folder beside `folder`, for a writer of several files. At the end of the block they are
    moved to `folder`, each of them whole."""
    folder = pathlib.Path(os.path.realpath(folder))
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.", suffix=".part") as part:
        yield pathlib.Path(part)
        folder.mkdir(exist_ok=True)
        for file in sorted(pathlib.Path(part).iterdir()):
            _sync(file)
            os.replace(file, folder / file.name)
        _sync(folder)


def write_whole(path, content):
    """Writes a file, of text in UTF-8 or of bytes."""
    with whole_path(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def output_lock(path, option="--out"):
    """Keeps `path` for this process: of two runs with one --out the later would replace the other's result.
    The lock is NAME.lock, which is removed at the end; after a kill the system gives it to the next run.
    Removes the temporary files that a killed run left. FileExistsError where another process holds it."""
    path = pathlib.Path(os.path.realpath(path))
    name = path.with_name(path.name + ".lock")
    while True:
        number = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(number), os.stat(name)):
                break
        except BlockingIOError:
            os.close(number)
            raise FileExistsError(
                f"{option}: {path} is being written by another process; it must end first, or another file "
                "is needed"
            ) from None
        except FileNotFoundError:
            pass  # its last holder removed it between open and flock
        os.close(number)
    try:
        for other in path.parent.iterdir():
            if re.fullmatch(re.escape(path.name) + r"\.[a-z0-9]{6}\.part", other.name):
                other.unlink(missing_ok=True)
        yield
    finally:
        os.unlink(name)
        os.close(number)


def _sync(path):
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
