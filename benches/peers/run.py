#!/usr/bin/env python3
"""How fast files come to the device: warpfs, the machine's limits and the peers, in one run. `make bench-transfer`.

Every row has its limit measured in the same run; peers take turns with warpfs, load by load. What cannot run says why.
Settings, from the environment:
  WARPFS_BIN         the program (target/release/warpfs)
  DEVICE             cuda:N or host (host)
  SIZE_MIB           the large file (8192; host: 1024)
  FILES              small files, of 110 KB (20000; host: 2000)
  ROUNDS             loads of each row after a warm-up (5)
  OPTIONS            more words for `warpfs mount`
  CASES, PEERS       which rows and peers, with commas (all; PEERS= for none)
  PEER_PATH_name     a folder of Python packages for this peer alone, such as another version of safetensors
  WARPFS_BENCH_DIR   where the files go (/tmp); on a disk, or the rows of the disk say nothing
  JSON               a file for the results
"""

import json
import os
import platform
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import data
import limits
import peers
import subject

DEVICE = os.environ.get("DEVICE") or "host"
ON_GPU = DEVICE.startswith("cuda:")
ORDINAL = int(DEVICE.split(":")[1]) if ON_GPU else 0
SIZE = int(os.environ.get("SIZE_MIB") or (8192 if ON_GPU else 1024)) << 20
FILES = int(os.environ.get("FILES") or (20000 if ON_GPU else 2000))
SMALL = 110_000
ROUNDS = int(os.environ.get("ROUNDS") or 5)
BINARY = os.path.abspath(os.environ.get("WARPFS_BIN") or os.path.join(HERE, "../../target/release/warpfs"))
CASES = (os.environ.get("CASES") or "warm,tmpfs,cold,half,small,tiny,start,host,pinned").split(",")
PEERS = [name for name in os.environ.get("PEERS", ",".join(peers.NAMES)).split(",") if name]
OPTIONS = os.environ.get("OPTIONS", "").split()
PATIENCE = 120
# Seconds for the device to scrub what was freed: copies are slower meanwhile, whoever makes them.
REST = 0.5 if ON_GPU else 0
# A peer that takes so long is not asked for every round.
SLOW = 2.0


class Peer:
    """One peer's process."""

    def __init__(self, name, path):
        self.name, self.times, self.said = name, [], None
        environment = dict(os.environ)
        more = os.environ.get(f"PEER_PATH_{name}")
        if more:
            environment["PYTHONPATH"] = f"{more}:{os.environ.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen([sys.executable, os.path.join(HERE, "peers.py"), name, path, str(ORDINAL)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.answers = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        answer = self._hear()
        if not answer.get("ready"):
            self.said = answer.get("missing") and f"not installed ({answer['missing']})" or answer.get("failed")

    def _listen(self):
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def _hear(self):
        try:
            line = self.answers.get(timeout=PATIENCE)
            return json.loads(line) if line else {"failed": "it ended without a word"}
        except queue.Empty:
            return {"failed": f"no answer within {PATIENCE} s"}

    def load(self):
        if self.said or (len(self.times) >= 2 and min(self.times) > SLOW):
            return
        try:
            self.process.stdin.write("load\n")
            self.process.stdin.flush()
        except OSError as why:
            self.said = str(why)
            return
        answer = self._hear()
        if "seconds" in answer:
            self.times.append(answer["seconds"])
        else:
            self.said = answer.get("failed", "no answer")

    def close(self):
        self.process.kill()
        self.process.wait(timeout=30)


class Report:
    def __init__(self):
        self.rows, self.failed = [], 0

    def add(self, case, what, values, unit, target=None, met=None):
        """`values`: measured; `target` in words; `met` whether it is."""
        ordered = sorted(values)
        row = {"case": case, "what": what, "unit": unit, "median": statistics.median(ordered), "least": ordered[0],
               "most": ordered[-1], "values": values, "target": target, "met": met}
        self.rows.append(row)
        verdict = "" if met is None else (" met" if met else " MISSED")
        print(f"| {case} | {what} | {ordered[0]:.3g} / {row['median']:.4g} / {ordered[-1]:.4g} {unit} |"
              f" {target or ''}{verdict} |", flush=True)

    def say(self, case, what, words, failed=False):
        self.failed += failed
        self.rows.append({"case": case, "what": what, "said": words, "failed": failed})
        print(f"| {case} | {what} | {'FAILED: ' if failed else ''}{words} | |", flush=True)


report = Report()


def rate(seconds, size):
    return [size / value / 1e9 for value in seconds]


def verify(mount, path):
    done = mount.command("verify", path)
    if done.returncode:
        raise RuntimeError(f"verify: {done.stderr.strip()}")


def against_peers(case, mount, path, source, target):
    """First loads by turns; `target(median, bus, best peer)` says what is asked for and whether it is met."""
    size = os.stat(source).st_size
    data.warm(source)
    subject.first_load(path)
    verify(mount, path)
    subject.give_up(path)
    time.sleep(REST)
    found = []
    try:
        for name in PEERS if ON_GPU else []:
            found.append(Peer(name, source))
        bus = limits.Bus(ORDINAL) if ON_GPU else None
        ours, buses = [], []
        for _ in range(ROUNDS):
            for peer in found:
                warmed(source)
                peer.load()
            warmed(source)
            if bus:
                buses.append(bus.rate())
            ours.append(subject.load_once(path))
            # Freed memory is scrubbed by the device for a while: not while something is measured.
            subject.give_up(path)
            time.sleep(REST)
    finally:
        for peer in found:
            peer.close()
    rates = rate(ours, size)
    best = max((statistics.median(rate(peer.times, size)) for peer in found if peer.times and not peer.said), default=None)
    words, met = target(statistics.median(rates), buses and statistics.median(buses), best)
    report.add(case, f"warpfs, {size} bytes", rates, "GB/s", words, met)
    if buses:
        report.add(case, "limit: pinned memory to the device", buses, "GB/s")
    for peer in found:
        if peer.said:
            report.say(case, peer.name, peer.said)
        elif peer.times:
            report.add(case, peer.name, rate(peer.times, size), "GB/s")


def warmed(source):
    """Some peers take a file out of the page cache while they read it: what follows is to find it there all the same."""
    if data.cached(source) < 1:
        data.warm(source)


def warm(mount, folder):
    def target(ours, bus, best):
        if not bus:
            return "no bus", None
        words = f"{ours / bus:.3f} of the bus (0.93)"
        met = ours >= 0.93 * bus
        if best:
            words += f", {ours / best:.2f} of the best peer (1.05)"
            met = met and ours >= 1.05 * best
        return words, met
    against_peers("warm", mount, f"{mount.path}/large", f"{folder}/large", target)


def tmpfs(_mount, folder):
    where = f"{os.path.dirname(folder)}/tmpfs"
    os.makedirs(where)
    subprocess.run(["mount", "-t", "tmpfs", "none", where], check=True, timeout=30)
    try:
        data.safetensors_file(f"{where}/large", SIZE)
        with subject.Mount(BINARY, where, f"{os.path.dirname(folder)}/mount-tmpfs", DEVICE) as mount:
            subject.first_load(f"{mount.path}/large")
            against_peers("tmpfs", mount, f"{mount.path}/large", f"{where}/large",
                          lambda ours, *_: (f"{ours:.1f} of 48 GB/s" if ON_GPU else "", ours >= 48 if ON_GPU else None))
    finally:
        subprocess.run(["umount", "-l", where], timeout=30)


def cold(mount, folder):
    source = f"{folder}/large"
    ways = limits.ways_to_disk(source, data.chill)
    if ways is None:
        return report.say("cold", "warpfs", "no direct reads on this file system")
    # A disk's rate varies from minute to minute: by turns, and each over the whole file.
    times, plain = [], {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            data.chill(source)
            plain[way].append(limits.disk(source, way))
        data.chill(source)
        times.append(subject.first_load(f"{mount.path}/large"))
    left = data.cached(source)
    verify(mount, f"{mount.path}/large")
    best = max(plain, key=lambda way: statistics.median(plain[way]))
    rates = rate(times, os.stat(source).st_size)
    part = statistics.median(rates) / statistics.median(plain[best])
    report.add("cold", "warpfs", rates, "GB/s", f"{part:.3f} of the best direct read (0.97)", part >= 0.97)
    report.add("cold", f"limit: {best[0]} reads of {best[1] >> 20} MiB", plain[best], "GB/s")
    report.say("cold", "of the file in the page cache after", f"{left:.1%}")


def half(mount, folder):
    source, middle = f"{folder}/large", os.stat(f"{folder}/large").st_size // 2 // (4 << 20) * (4 << 20)
    alone, both = [], []
    if not os.path.exists(f"{folder}/half"):
        with open(source, "rb") as whole, open(f"{folder}/half", "wb") as part:
            shutil.copyfileobj(Limited(whole, middle), part, 16 << 20)
    for _ in range(ROUNDS):
        data.chill(f"{folder}/half")
        alone.append(subject.first_load(f"{mount.path}/half"))
        data.warm(source)
        data.chill(source, 0, middle)
        both.append(subject.first_load(f"{mount.path}/large"))
    verify(mount, f"{mount.path}/large")
    part = statistics.median(both) / statistics.median(alone)
    report.add("half", "warpfs, half of it in the page cache", both, "s", f"{part:.3f} of the cold half alone (1.05)",
               part <= 1.05)
    report.add("half", "the cold half alone", alone, "s")


class Limited:
    def __init__(self, file, left):
        self.file, self.left = file, left

    def read(self, size):
        piece = self.file.read(min(size, self.left))
        self.left -= len(piece)
        return piece


def small(mount, folder):
    names = data.small_files(f"{folder}/small", FILES, SMALL)
    for name in names:
        with open(f"{folder}/small/{name}", "rb") as file:
            file.read()
    lines = "".join(f"small/{name}\n" for name in names).encode()

    def by_control():
        begun = time.perf_counter()
        control = os.open(f"{mount.path}/.warpfs/preload", os.O_WRONLY)
        at = 0
        while at < len(lines):
            at += os.write(control, lines[at:at + (128 << 10)])
        while mount.loads() < loads + len(names):
            if time.perf_counter() - begun > PATIENCE:
                raise TimeoutError(f"{mount.loads() - loads} of {len(names)} files")
            time.sleep(0.002)
        took = time.perf_counter() - begun
        os.close(control)
        return took

    def gone():
        mount.command("evict", f"{mount.path}/small")
        time.sleep(REST)

    by_lines, by_command = [], []
    for turn in range(min(ROUNDS, 3) + 1):
        gone()
        loads = mount.loads()
        took = by_control()
        gone()
        begun = time.perf_counter()
        done = mount.command("preload", f"{mount.path}/small")
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-300:])
        if turn:
            by_lines.append(took)
            by_command.append(time.perf_counter() - begun)
    verify(mount, f"{mount.path}/small")
    total, device = FILES * SMALL, mount.device()
    rates = rate(by_lines, total)
    met = statistics.median(rates) >= 20 if ON_GPU else None
    report.add("small", f"warpfs, {FILES} files of {SMALL} bytes, by a control file", rates, "GB/s",
               "20 GB/s" if ON_GPU else None, met)
    report.add("small", "the same by warpfs preload", rate(by_command, total), "GB/s")
    report.say("small", "slack", f"{device['slack_bytes'] / device['used']:.1%} of {device['used']} bytes in use")
    gone()


def tiny(mount, folder):
    def row(what):
        file, times = os.open(f"{mount.path}/tiny", os.O_RDONLY), []
        for turn in range(250):
            subject.evict(file)
            took = subject.load(file)
            if turn >= 50:
                times.append(took * 1e6)
        os.close(file)
        report.add("tiny", what, times, "us", "200 us", statistics.median(times) < 200 if ON_GPU else None)

    for name in ("tiny", "tiny2"):
        with open(f"{folder}/{name}", "wb") as file:
            file.write(os.urandom(4096))
    row("warpfs, 4 KiB, loader running, nothing else resident in its slab")
    verify(mount, f"{mount.path}/tiny")
    # With something else in it, the slab stays.
    subject.first_load(f"{mount.path}/tiny2")
    row("the same beside another small file")


def start(mount, folder):
    data.warm(f"{folder}/large")
    for name, limit in (("large", 0.55), ("tiny", 0.4)):
        if name == "tiny" and not os.path.exists(f"{folder}/tiny"):
            with open(f"{folder}/tiny", "wb") as file:
                file.write(os.urandom(4096))
        times = []
        for _ in range(ROUNDS):
            file = os.open(f"{mount.path}/{name}", os.O_RDONLY)
            subject.evict(file)
            mount.end_loader()
            times.append(subject.load(file))
            os.close(file)
        met = statistics.median(times) < limit if ON_GPU else None
        report.add("start", f"warpfs, {name}, with the start of a loader", times, "s", f"{limit} s", met)


def host(_mount, folder):
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    name = "half" if os.path.exists(f"{folder}/half") else "large"
    source = f"{folder}/{name}"
    size = os.stat(source).st_size
    data.warm(source)
    own = os.sched_getaffinity(0)
    ours, plain = [], []
    with subject.Mount(BINARY, folder, f"{os.path.dirname(folder)}/mount-host", "host", ["--budget", str(size + (64 << 20))], cpus) as mount:
        subject.first_load(f"{mount.path}/{name}")
        for _ in range(ROUNDS):
            ours.append(subject.first_load(f"{mount.path}/{name}"))
            os.sched_setaffinity(0, cpus)
            plain.append(limits.memory(source, 2))
            os.sched_setaffinity(0, own)
        verify(mount, f"{mount.path}/{name}")
    rates = rate(ours, size)
    part = statistics.median(rates) / statistics.median(plain)
    report.add("host", "warpfs, host memory, 2 cores", rates, "GB/s", f"{part:.3f} of a plain read (0.9)", part >= 0.9)
    report.add("host", "limit: 2 threads read into fresh memory", plain, "GB/s")


def pinned(mount, folder):
    data.warm(f"{folder}/large")
    subject.first_load(f"{mount.path}/large")
    pid = mount.loader()
    with open(f"/proc/{pid}/status") as file:
        status = {line.split(":")[0]: line.split(":")[1].strip() for line in file if line.startswith("Vm")}
    with open(f"{mount.path}/.warpfs/config") as file:
        ring = next(int(line.split("=")[1]) for line in file if line.startswith("pinned"))
    seen = ", ".join(f"{name} {status[name]}" for name in ("VmPin", "VmLck", "VmRSS") if name in status)
    report.say("pinned", "the loader after loads", f"ring of {ring >> 20} MiB ({'met' if ring <= 256 << 20 else 'MISSED'}: 256); {seen}")


def machine():
    words = [f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Linux {platform.release()}"]
    if ON_GPU:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current",
                                "--format=csv,noheader", "-i", str(ORDINAL)], capture_output=True, text=True, timeout=60)
        words.append(asked.stdout.strip() or "nvidia-smi does not answer")
    words.append(subprocess.run([BINARY, "--version"], capture_output=True, text=True, timeout=60).stdout.strip())
    from importlib import metadata
    for name in ("kvikio-cu13", "safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer", "flashpack", "torch"):
        try:
            words.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            pass
    return "; ".join(words)


def main():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    base = tempfile.mkdtemp(prefix="warpfs-bench-", dir=os.environ.get("WARPFS_BENCH_DIR") or "/tmp")
    where = machine()
    print(where, flush=True)
    print("| case | what | least / median / most | target |\n|---|---|---|---|", flush=True)
    folder = os.path.join(base, "source")
    os.makedirs(folder)
    try:
        data.safetensors_file(f"{folder}/large", SIZE)
        budget = ["--budget", str(3 * SIZE + FILES * SMALL * 2), *OPTIONS] if ON_GPU else OPTIONS
        with subject.Mount(BINARY, folder, os.path.join(base, "mount"), DEVICE, budget) as mount:
            for case in CASES:
                try:
                    globals()[case](mount, folder)
                except Exception as why:  # one case is not all
                    report.say(case, "", f"{type(why).__name__}: {why}"[:300], failed=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        if os.environ.get("JSON"):
            with open(os.environ["JSON"], "w") as file:
                json.dump({"machine": where, "rows": report.rows}, file, indent=1)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
