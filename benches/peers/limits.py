"""What the machine can do: the rates that nothing which loads a file can pass."""

import ctypes
import mmap
import os
import threading
import time

CUDA_OK = 0


class Bus:
    """Copies from pinned memory to the device, by the driver alone."""

    def __init__(self, ordinal, size=512 << 20):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.size = size
        self._ok("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._ok("cuDeviceGet", ctypes.byref(device), ordinal)
        self._ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._ok("cuCtxSetCurrent", context)
        self.memory = mmap.mmap(-1, size)
        for at in range(0, size, 4096):
            self.memory[at] = 1
        self.view = (ctypes.c_char * size).from_buffer(self.memory)
        self.address = ctypes.c_void_p(ctypes.addressof(self.view))
        self._ok("cuMemHostRegister_v2", self.address, ctypes.c_size_t(size), 0)
        self.device = ctypes.c_uint64()
        self._ok("cuMemAlloc_v2", ctypes.byref(self.device), ctypes.c_size_t(size))
        self.stream = ctypes.c_void_p()
        self._ok("cuStreamCreate", ctypes.byref(self.stream), 1)

    def _ok(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code != CUDA_OK:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def rate(self):
        """GB/s of eight copies of the whole memory."""
        begun = time.perf_counter()
        for _ in range(8):
            for at in range(0, self.size, 64 << 20):
                self._ok("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(self.device.value + at),
                         ctypes.c_void_p(self.address.value + at), ctypes.c_size_t(64 << 20), self.stream)
        self._ok("cuStreamSynchronize", self.stream)
        return 8 * self.size / (time.perf_counter() - begun) / 1e9


def _spread(path, flags, piece, threads, seconds, target=None):
    """GB/s of `threads` that read pieces of the file one after the other, until it or the time is over."""
    size = os.stat(path).st_size
    lock, state = threading.Lock(), {"next": 0, "bytes": 0}
    end = time.perf_counter() + seconds

    def work():
        file = os.open(path, flags)
        memory = None if target is not None else mmap.mmap(-1, piece)
        done = 0
        while time.perf_counter() < end:
            with lock:
                at, state["next"] = state["next"], state["next"] + piece
            if at + piece > size:
                break
            into = memory if target is None else memoryview(target)[at:at + piece]
            done += os.preadv(file, [into], at)
        os.close(file)
        with lock:
            state["bytes"] += done

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return state["bytes"] / (time.perf_counter() - begun) / 1e9


def ways_to_disk(path, chill, count=2, seconds=0.8):
    """The best ways of direct reads, as a short look tells: (threads, bytes a read); None where the file system has none."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return None
    seen = []
    for piece in (1 << 20, 4 << 20):
        for threads in (1, 4, 16, 36, 64):
            chill(path)
            seen.append((_spread(path, os.O_RDONLY | os.O_DIRECT, piece, threads, seconds), (threads, piece)))
    return [way for _, way in sorted(seen, reverse=True)[:count]]


def disk(path, way):
    """GB/s of direct reads of the whole file."""
    threads, piece = way
    return _spread(path, os.O_RDONLY | os.O_DIRECT, piece, threads, 120)


def memory(path, threads):
    """GB/s of reading the cached file into fresh memory, as who has no loader would."""
    size = os.stat(path).st_size
    with mmap.mmap(-1, size) as target:
        return _spread(path, os.O_RDONLY, 4 << 20, threads, 60, target)
