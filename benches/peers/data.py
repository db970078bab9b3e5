"""Files of noise, and where their pages are."""

import ctypes
import json
import mmap
import os
import random
import struct
import subprocess
import sys

PAGE = 4096
BLOCK = 1 << 24
TENSORS = 32


def _fill(path, begin, end):
    """Writes noise to bytes begin..end of a file; no two pages are alike."""
    base = random.Random(begin).randbytes(BLOCK + PAGE)
    with open(path, "r+b", buffering=0) as file:
        at = begin
        while at < end:
            size = min(BLOCK, end - at)
            shift = (at // BLOCK * 8 + 8) % PAGE
            piece = bytearray(base[shift:shift + size])
            for page in range(0, size - 7, PAGE):
                struct.pack_into("<Q", piece, page, at + page)
            os.pwrite(file.fileno(), piece, at)
            at += size


def safetensors_file(path, size):
    """A safetensors file of about `size` bytes (TENSORS equal tensors of bytes), written by several processes."""
    each = size // TENSORS // PAGE * PAGE
    header = {f"t{i}": {"dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each]}
              for i in range(TENSORS)}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 8)
    begin = 8 + len(text)
    total = begin + each * TENSORS
    with open(path, "wb") as file:
        file.truncate(total)
    workers = min(8, os.cpu_count() or 1)
    step = -(-total // workers // BLOCK) * BLOCK
    code = "import sys; sys.path.insert(0, sys.argv[1]); import data; data._fill(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
    running = [subprocess.Popen([sys.executable, "-c", code, os.path.dirname(os.path.abspath(__file__)), path,
                                 str(at), str(min(at + step, total))]) for at in range(0, total, step)]
    for process in running:
        if process.wait(timeout=300):
            raise RuntimeError(f"could not write {path}")
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        os.fsync(file.fileno())
    return total


def small_files(folder, count, size):
    """Files of `size` bytes of noise; their names."""
    os.makedirs(folder, exist_ok=True)
    noise = random.Random(1).randbytes(size + PAGE * 64)
    names = []
    for i in range(count):
        name = f"f{i:06d}"
        with open(os.path.join(folder, name), "wb") as file:
            file.write(struct.pack("<Q", i) + noise[i % (PAGE * 64):][:size - 8])
        names.append(name)
    return names


def warm(path):
    """Brings the file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        piece = bytearray(BLOCK)
        while file.readinto(piece):
            pass


def cached(path, begin=0, end=None):
    """The part of the bytes that is in the page cache, from 0 to 1 (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin, length = begin // PAGE * PAGE, (end or size) - begin // PAGE * PAGE
        with mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE,
                       offset=begin) as view:
            pages = -(-length // PAGE)
            seen = (ctypes.c_ubyte * pages)()
            address = (ctypes.c_char * length).from_buffer(view)
            result = libc.mincore(ctypes.c_void_p(ctypes.addressof(address)), ctypes.c_size_t(length), seen)
            del address
            if result:
                raise OSError(ctypes.get_errno(), "mincore")
            return sum(byte & 1 for byte in bytes(seen)) / pages


def chill(path, begin=0, end=0):
    """Takes the pages of the file (or of the bytes begin..end) out of the page cache, and sees to it that they are."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), begin, end - begin if end else 0, os.POSIX_FADV_DONTNEED)
    left = cached(path, begin, end or None)
    if left > 0.01:
        raise RuntimeError(f"{path}: {left:.0%} of the pages stay in the page cache")
