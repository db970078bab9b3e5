"""warpfs as its users have it: a mount, ioctls on a descriptor, control files."""

import fcntl
import glob
import json
import os
import signal
import struct
import subprocess
import time

MESSAGE = 256
# struct warpfs_materialize: secret, device, offset, length, flags, state, error, reserved, six numbers, message
MATERIALIZE = struct.Struct(f"<16s16sQQIIIIQQQQQQ{MESSAGE}s")
EVICT = struct.Struct("<16sQQ")
RESIDENT = 2


def number(size, command):
    """_IOWR(0xF7, command, size)"""
    return 3 << 30 | size << 16 | 0xF7 << 8 | command


class Mount:
    """A mounted folder. Unmounted by `close`, which never waits for ever."""

    def __init__(self, binary, source, mountpoint, device, options=(), cpus=None):
        os.makedirs(mountpoint, exist_ok=True)
        self.binary, self.path = binary, mountpoint
        words = [binary, "mount", source, mountpoint, "--device", device, *options]
        prepare = (lambda: os.sched_setaffinity(0, cpus)) if cpus else None
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=prepare)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        self.pid = self.stats()["pid"]

    def close(self):
        try:
            done = subprocess.run([self.binary, "umount", self.path], capture_output=True, timeout=30)
            if done.returncode == 0:
                return
        except subprocess.TimeoutExpired:
            pass
        subprocess.run(["umount", "-l", self.path], capture_output=True, timeout=30)
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def stats(self):
        with open(os.path.join(self.path, ".warpfs/stats")) as file:
            return json.load(file)

    def device(self):
        return self.stats()["devices"][0]

    def loads(self):
        """Files that were loaded so far. Unlike the statistics, the metrics name no files: asking costs little."""
        with open(os.path.join(self.path, ".warpfs/metrics")) as file:
            return sum(int(line.split()[-1]) for line in file if line.startswith("warpfs_loads_total"))

    def command(self, *words, timeout=300):
        return subprocess.run([self.binary, *words], capture_output=True, text=True, timeout=timeout)

    def loader(self):
        """The loader's process id, if there is one."""
        for path in glob.glob("/proc/[0-9]*/stat"):
            try:
                with open(path) as file:
                    name, rest = file.read().rsplit(")", 1)
            except OSError:
                continue
            if "(loader" in name and int(rest.split()[1]) == self.pid:
                return int(path.split("/")[2])
        return None

    def end_loader(self):
        """As after a minute without work, without waiting for it."""
        pid = self.loader()
        if pid:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while self.loader() and time.monotonic() < deadline:
            time.sleep(0.01)


def evict(file):
    fcntl.ioctl(file, number(EVICT.size, 3), bytearray(EVICT.size))


def load(file, limit=120):
    """Seconds until the file is resident."""
    begun = time.perf_counter()
    while True:
        message = bytearray(MATERIALIZE.size)
        fcntl.ioctl(file, number(MATERIALIZE.size, 1), message)
        if MATERIALIZE.unpack(message)[5] == RESIDENT:
            return time.perf_counter() - begun
        if time.perf_counter() - begun > limit:
            raise TimeoutError("the load does not end")


def load_once(path):
    """Seconds for a file, from its open on."""
    begun = time.perf_counter()
    file = os.open(path, os.O_RDONLY)
    try:
        load(file)
        return time.perf_counter() - begun
    finally:
        os.close(file)


def give_up(path):
    """Takes the file off the device."""
    file = os.open(path, os.O_RDONLY)
    evict(file)
    os.close(file)


def first_load(path):
    """Seconds for a file that is not resident."""
    file = os.open(path, os.O_RDONLY)
    try:
        evict(file)
        return load(file)
    finally:
        os.close(file)
