/* A test double of cuFile, for the double of the CUDA driver beside it: it reads with pread(2) into that one's memory, and
 * says in its counters whatever it is told to say. It refuses what the real one was seen or is documented to refuse.
 *
 * cc -shared -fPIC -O1 -pthread -o libcufile.so.0 fake_cufile.c -ldl
 *   -DNO_READ         a library without cuFileRead
 *   -DNO_STATISTICS   a version that does not tell which way it reads (before 1.15), nor can be told about compatibility
 *
 * Environment:
 *   FAKE_CUFILE_WAY=nvfs|p2p|posix   what the counters say (nvfs); posix is refused unless compatibility mode is allowed
 *   FAKE_CUFILE_STUBBORN=1           posix is not refused
 *   FAKE_CUFILE_OPEN=code            the driver does not open
 *   FAKE_CUFILE_REGISTER=code        no file is taken
 *   FAKE_CUFILE_FAIL_AT=n            from the nth read on they fail with
 *   FAKE_CUFILE_FAIL=code            5001 and more: as cuFile's own error; less: as an errno
 *   FAKE_CUFILE_SHORT=1              a read brings half of what was asked for
 *   FAKE_CUFILE_CRASH_AT=n, FAKE_CUFILE_HANG_AT=n   at the nth read */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
typedef struct { int err, cu_err; } status;
typedef struct { int type; union { int fd; void *handle; } handle; const void *ops; } descriptor;
typedef struct { int fd, used; } file;

enum { NOT_INITIALIZED = 5001, NOT_SUPPORTED = 5008, POINTER = 5014, FILE_FLAGS = 5019, NO_DIRECT = 5020,
       INVALID = 5022, NOT_REGISTERED = 5027 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int opened, compat = 1, level, counting;
static long reads;
static uint64_t counts[3]; /* p2p, nvfs, posix */
static file files[1024];

static status done(int err) { return (status){err, 0}; }
static long setting(const char *name, long usual) {
    const char *text = getenv(name);
    return text ? atol(text) : usual;
}
static int way(void) {
    const char *word = getenv("FAKE_CUFILE_WAY");
    return !word || !strcmp(word, "nvfs") ? 1 : !strcmp(word, "p2p") ? 0 : 2;
}
/* Of the driver's double, which is in the process already. */
static void *of_driver(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? dlsym(driver, name) : NULL;
}
static int has_context(void) {
    int (*current)(void) = (int (*)(void))of_driver("fake_cuda_current");
    return current && current();
}
static int refused(void) { return way() == 2 && !compat && !setting("FAKE_CUFILE_STUBBORN", 0); }

API status cuFileDriverOpen(void) {
    /* Before a context exists it opens and works on nothing after (cudf 15293). */
    if (!has_context()) return (status){5011, 201};
    if (setting("FAKE_CUFILE_OPEN", 0)) return done((int)setting("FAKE_CUFILE_OPEN", 0));
    opened = 1;
    return done(0);
}
API status cuFileHandleRegister(void **out, descriptor *wanted) {
    if (!opened) return done(NOT_INITIALIZED);
    if (!wanted || wanted->type != 1) return done(INVALID);
    int flags = fcntl(wanted->handle.fd, F_GETFL);
    if (flags < 0 || (flags & (O_NONBLOCK | O_APPEND | O_NOFOLLOW))) return done(FILE_FLAGS);
    if (!(flags & O_DIRECT) && !compat) return done(NO_DIRECT);
    if (setting("FAKE_CUFILE_REGISTER", 0)) return done((int)setting("FAKE_CUFILE_REGISTER", 0));
    if (refused()) return done(NOT_SUPPORTED);
    pthread_mutex_lock(&lock);
    *out = NULL;
    for (int i = 0; i < 1024 && !*out; i++)
        if (!files[i].used) files[i] = (file){wanted->handle.fd, 1}, *out = &files[i];
    pthread_mutex_unlock(&lock);
    return done(*out ? 0 : INVALID);
}
API void cuFileHandleDeregister(void *raw) {
    file *f = raw;
    if (!f->used) abort();
    f->used = 0;
}
#ifndef NO_READ
API ssize_t cuFileRead(void *raw, void *base, size_t size, off_t offset, off_t at) {
    file *f = raw;
    if (!opened || !has_context()) return -NOT_INITIALIZED;
    if (!f || !f->used) return -NOT_REGISTERED;
    int (*may)(uint64_t, size_t) = (int (*)(uint64_t, size_t))of_driver("fake_cuda_writable");
    if (!may || !may((uint64_t)(uintptr_t)base + (uint64_t)at, size)) return -POINTER;
    long number = __atomic_add_fetch(&reads, 1, __ATOMIC_SEQ_CST);
    if (number == setting("FAKE_CUFILE_CRASH_AT", 0)) abort();
    if (number == setting("FAKE_CUFILE_HANG_AT", 0)) for (;;) pause();
    long from = setting("FAKE_CUFILE_FAIL_AT", 0), code = setting("FAKE_CUFILE_FAIL", 5030);
    if (from && number >= from) return code >= 5000 ? -code : (errno = (int)code, -1);
    if (setting("FAKE_CUFILE_SHORT", 0) && size >= 8192) size = size / 2 / 4096 * 4096;
    /* What is not in whole blocks goes around, as the real one has it. */
    int whole = !(size % 4096) && !(offset % 4096) && !(((uintptr_t)base + (size_t)at) % 4096);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", f->fd);
    int plain = open(path, O_RDONLY | O_CLOEXEC);
    /* The page cache stays as it was, or the next chunk would seem to be in it. */
    if (plain >= 0) posix_fadvise(plain, 0, 0, POSIX_FADV_RANDOM);
    ssize_t count = plain < 0 ? -1 : pread(plain, (char *)base + at, size, offset);
    if (plain >= 0) posix_fadvise(plain, offset, (off_t)size, POSIX_FADV_DONTNEED);
    if (plain >= 0) close(plain);
    if (counting && level >= 3) __atomic_add_fetch(&counts[whole ? way() : 2], 1, __ATOMIC_SEQ_CST);
    return count;
}
#endif
#ifndef NO_STATISTICS
API status cuFileGetVersion(int *version) { *version = 1150; return done(0); }
API status cuFileSetParameterBool(int which, _Bool value) {
    if (opened) return done(5026);
    if (which == 1) compat = value;
    return done(0);
}
API status cuFileSetStatsLevel(int wanted) { return level = wanted, done(0); }
API status cuFileStatsStart(void) { return counting = level > 0, done(0); }
API status cuFileGetStatsL3(void *out) {
    if (level < 3) return done(INVALID);
    int (*device_uuid)(char *, int) = (int (*)(char *, int))of_driver("cuDeviceGetUuid_v2");
    /* Where the devices' counters begin is different in each version. */
    char uuid[16];
    uint64_t *entry = (uint64_t *)out + 617;
    for (int device = 0; device < 4 && !device_uuid(uuid, device); device++, entry += 31) {
        memcpy(entry, uuid, sizeof uuid);
        if (device) continue;
        for (int i = 0; i < 3; i++) entry[2 + 5 + i] = __atomic_load_n(&counts[i], __ATOMIC_SEQ_CST);
    }
    return done(0);
}
#else
API status cuFileGetVersion(int *version) { *version = 1110; return done(0); }
#endif
