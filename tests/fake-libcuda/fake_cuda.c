/* A test double of the CUDA driver: not CUDA, and of no use but to test warpfs where there is no GPU. It serves exactly the
 * driver calls that warpfs makes, from memfds, and refuses what the real driver was seen to refuse. Copies run late and out
 * of step on purpose, so that a slot that is filled again too early corrupts data and is caught.
 *
 * cc -shared -fPIC -O1 -pthread -o libcuda.so.1 fake_cuda.c      (-DOMIT_CUMEMMAP: an old driver without cuMemMap)
 *
 * Environment, read at the first use:
 *   FAKE_CUDA_NO_INIT=1          cuInit fails with CUDA_ERROR_NO_DEVICE
 *   FAKE_CUDA_DEVICES=n          number of devices (1)
 *   FAKE_CUDA_TOTAL=bytes        memory of each device (256 MiB)
 *   FAKE_CUDA_STATE=file         counts the bytes in use here, for all processes (else for each process alone)
 *   FAKE_CUDA_OOM_AT=n           the nth cuMemCreate of a process fails with CUDA_ERROR_OUT_OF_MEMORY
 *   FAKE_CUDA_STICKY_AT=n        the nth copy of a process, and every call after it, fails with CUDA_ERROR_ILLEGAL_ADDRESS
 *   FAKE_CUDA_UNKNOWN_AT=n       the nth copy of a process fails with a number that nobody knows
 *   FAKE_CUDA_NO_LENDING=1       no memory can be registered read-only
 *   FAKE_CUDA_COPY_DELAY_US=n    each copy starts after a random time of up to n microseconds */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801, NOBODY_KNOWS = 77777,
};
#define API __attribute__((visibility("default")))
#define GRANULARITY ((size_t)2 << 20)
#define MOST 4096

typedef uint64_t ptr;
typedef uint64_t handle;
typedef struct { int type, id; } location;
typedef struct { unsigned type, handles; location where; void *win32; unsigned char flags[8]; } properties;
typedef struct { location where; int flags; } access_description;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised, retained, sticky;
static long creates, copies;
static uint64_t own_use;
static __thread int current;

static struct { int used, fd, created; size_t size; } handles[MOST];
static struct { int used, mapped, access; char *at; size_t size; } ranges[MOST];
/* `kept`: of memory that was registered read-only, its pages as they were then, for the processor may not be able to read
 * them later as a device could. */
static struct { int used; char *at, *kept; size_t size; } pins[MOST];

static long setting(const char *name, long usual) {
    const char *text = getenv(name);
    return text ? atol(text) : usual;
}

/* What nearly every call asks first. */
static int ready(int context) {
    if (!initialised) return NOT_INITIALIZED;
    if (context && !current) return INVALID_CONTEXT;
    if (context && __atomic_load_n(&sticky, __ATOMIC_SEQ_CST)) return ILLEGAL_ADDRESS;
    return OK;
}
#define READY(context) do { int r_ = ready(context); if (r_) return r_; } while (0)

/* Adds to the bytes in use; fails where that is more than there is. */
static int account(int64_t change) {
    uint64_t total = (uint64_t)setting("FAKE_CUDA_TOTAL", 256L << 20), used = 0;
    const char *state = getenv("FAKE_CUDA_STATE");
    int fd = -1;
    if (state) {
        fd = open(state, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0) return INVALID_VALUE;
        flock(fd, LOCK_EX);
        if (pread(fd, &used, sizeof used, 0) != sizeof used) used = 0;
    } else {
        used = own_use;
    }
    int fits = change <= 0 || used + (uint64_t)change <= total;
    if (fits) used += (uint64_t)change;
    if (state) {
        if (pwrite(fd, &used, sizeof used, 0) != sizeof used) fits = 0;
        close(fd);
    } else {
        own_use = used;
    }
    return fits ? OK : OUT_OF_MEMORY;
}

/* ------------------------------------------------------------------------------------------------------------ devices */

API int cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (setting("FAKE_CUDA_NO_INIT", 0)) return NO_DEVICE;
    initialised = 1;
    return OK;
}
API int cuDriverGetVersion(int *version) { *version = 12080; return OK; }
API int cuGetErrorName(int code, const char **name) {
    switch (code) {
    case OK: *name = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
    case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *name = NULL; return INVALID_VALUE;
    }
    return OK;
}
static int devices(void) { return (int)setting("FAKE_CUDA_DEVICES", 1); }
static int is_device(int device) { return device >= 0 && device < devices(); }
#define DEVICE(device) do { READY(0); if (!is_device(device)) return INVALID_DEVICE; } while (0)

API int cuDeviceGetCount(int *count) { READY(0); *count = devices(); return OK; }
API int cuDeviceGet(int *device, int ordinal) { DEVICE(ordinal); *device = ordinal; return OK; }
API int cuDeviceGetName(char *name, int length, int device) {
    DEVICE(device);
    snprintf(name, (size_t)length, "Fake GPU %d", device);
    return OK;
}
API int cuDeviceGetPCIBusId(char *id, int length, int device) {
    DEVICE(device);
    snprintf(id, (size_t)length, "0000:%02X:00.0", 0xF0 + device);
    return OK;
}
API int cuDeviceGetUuid_v2(char *uuid, int device) {
    DEVICE(device);
    memcpy(uuid, "fake-cuda-uuid\0", 16);
    uuid[15] = (char)(device + 1);
    return OK;
}
API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    DEVICE(device);
    *bytes = (size_t)setting("FAKE_CUDA_TOTAL", 256L << 20);
    return OK;
}
API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    DEVICE(device);
    *value = attribute == 103; /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    return OK;
}
API int cuDevicePrimaryCtxRetain(void **context, int device) {
    DEVICE(device);
    __atomic_add_fetch(&retained, 1, __ATOMIC_SEQ_CST);
    *context = (void *)(intptr_t)(device + 1);
    return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int device) {
    DEVICE(device);
    if (__atomic_sub_fetch(&retained, 1, __ATOMIC_SEQ_CST) < 0) return INVALID_CONTEXT;
    return OK;
}
API int cuCtxSetCurrent(void *context) {
    READY(0);
    if (context && __atomic_load_n(&retained, __ATOMIC_SEQ_CST) == 0) return INVALID_CONTEXT;
    current = (int)(intptr_t)context;
    return OK;
}

/* ------------------------------------------------------------------------------------------------------------- memory */

API int cuMemGetAllocationGranularity(size_t *bytes, const properties *p, int option) {
    READY(0);
    if (!p || p->where.type != 1 || !is_device(p->where.id) || option < 0 || option > 1) return INVALID_VALUE;
    *bytes = GRANULARITY;
    return OK;
}
static int keep(handle *out, int fd, size_t size, int created) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (handles[i].used) continue;
        handles[i].used = 1, handles[i].fd = fd, handles[i].size = size, handles[i].created = created;
        pthread_mutex_unlock(&lock);
        *out = (handle)i + 1;
        return OK;
    }
    pthread_mutex_unlock(&lock);
    close(fd);
    return OUT_OF_MEMORY;
}
static int is_handle(handle h) { return h >= 1 && h <= MOST && handles[h - 1].used; }

API int cuMemCreate(handle *out, size_t size, const properties *p, unsigned long long flags) {
    READY(0);
    if (flags || size == 0 || size % GRANULARITY) return INVALID_VALUE;
    if (!p || p->type != 1 || p->handles != 1 || p->where.type != 1 || !is_device(p->where.id)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int result = ++creates == setting("FAKE_CUDA_OOM_AT", 0) ? OUT_OF_MEMORY : account((int64_t)size);
    pthread_mutex_unlock(&lock);
    if (result) return result;
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
    /* Fresh device memory holds whatever was there before. */
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) {
        memset(at, 0xA5, size);
        munmap(at, size);
    }
    return keep(out, fd, size, 1);
}
API int cuMemRelease(handle h) {
    READY(0);
    pthread_mutex_lock(&lock);
    int known = is_handle(h);
    if (known) {
        close(handles[h - 1].fd);
        if (handles[h - 1].created) account(-(int64_t)handles[h - 1].size);
        handles[h - 1].used = 0;
    }
    pthread_mutex_unlock(&lock);
    return known ? OK : INVALID_VALUE;
}
API int cuMemExportToShareableHandle(void *out, handle h, unsigned type, unsigned long long flags) {
    READY(0);
    if (type != 1 || flags || !is_handle(h)) return INVALID_VALUE;
    int fd = dup(handles[h - 1].fd);
    if (fd < 0) return OUT_OF_MEMORY;
    *(int *)out = fd;
    return OK;
}
API int cuMemImportFromShareableHandle(handle *out, void *value, unsigned type) {
    READY(1);
    struct stat st;
    int theirs = (int)(intptr_t)value;
    if (type != 1 || fstat(theirs, &st)) return INVALID_VALUE;
    int fd = fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return OUT_OF_MEMORY;
    return keep(out, fd, (size_t)st.st_size, 0);
}

/* The range that holds [at, at + size); -1: none. */
static int range_of(ptr at, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].used && at >= (ptr)(uintptr_t)ranges[i].at && size <= ranges[i].size
            && at - (ptr)(uintptr_t)ranges[i].at <= ranges[i].size - size) return i;
    return -1;
}
static int exact(ptr at, size_t size) {
    int i = range_of(at, size);
    return i >= 0 && (ptr)(uintptr_t)ranges[i].at == at && ranges[i].size == size ? i : -1;
}
API int cuMemAddressReserve(ptr *out, size_t size, size_t alignment, ptr wish, unsigned long long flags) {
    READY(1);
    (void)wish;
    if (size == 0 || size % GRANULARITY || flags || alignment % GRANULARITY) return INVALID_VALUE;
    char *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++) {
        if (ranges[i].used) continue;
        ranges[i].used = 1, ranges[i].mapped = 0, ranges[i].access = 0, ranges[i].at = at, ranges[i].size = size;
        pthread_mutex_unlock(&lock);
        *out = (ptr)(uintptr_t)at;
        return OK;
    }
    pthread_mutex_unlock(&lock);
    munmap(at, size);
    return OUT_OF_MEMORY;
}
API int cuMemAddressFree(ptr at, size_t size) {
    READY(0);
    pthread_mutex_lock(&lock);
    int i = exact(at, size), result = i < 0 || ranges[i].mapped ? INVALID_VALUE : OK;
    if (!result) {
        munmap(ranges[i].at, size);
        ranges[i].used = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
#ifndef OMIT_CUMEMMAP
API int cuMemMap(ptr at, size_t size, size_t offset, handle h, unsigned long long flags) {
    READY(1);
    if (offset) return NOT_SUPPORTED;
    pthread_mutex_lock(&lock);
    int i = exact(at, size), result = OK;
    if (flags || i < 0 || ranges[i].mapped || !is_handle(h) || handles[h - 1].size != size) result = INVALID_VALUE;
    else if (mmap(ranges[i].at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[h - 1].fd, 0) == MAP_FAILED)
        result = OUT_OF_MEMORY;
    else ranges[i].mapped = 1;
    pthread_mutex_unlock(&lock);
    return result;
}
#endif
API int cuMemUnmap(ptr at, size_t size) {
    READY(0);
    pthread_mutex_lock(&lock);
    int i = exact(at, size), result = i < 0 || !ranges[i].mapped ? INVALID_VALUE : OK;
    if (!result) {
        /* A copy that still runs into it must be seen: it faults. */
        mmap(ranges[i].at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        ranges[i].mapped = ranges[i].access = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API int cuMemSetAccess(ptr at, size_t size, const access_description *d, size_t count) {
    READY(1);
    if (count != 1 || d->where.type != 1 || (d->flags != 1 && d->flags != 3)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int i = exact(at, size), result = i < 0 || !ranges[i].mapped ? INVALID_VALUE : OK;
    if (!result && mprotect(ranges[i].at, size, d->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ)) result = INVALID_VALUE;
    if (!result) ranges[i].access = d->flags;
    pthread_mutex_unlock(&lock);
    return result;
}
static int may(ptr at, size_t size, int access) {
    pthread_mutex_lock(&lock);
    int i = range_of(at, size), good = i >= 0 && ranges[i].mapped && (ranges[i].access & access) == access;
    pthread_mutex_unlock(&lock);
    return good;
}
/* For the double of cuFile. */
API int fake_cuda_current(void) { return current; }
API int fake_cuda_writable(ptr at, size_t size) { return may(at, size, 3); }
API int cuMemsetD8_v2(ptr at, unsigned char value, size_t size) {
    READY(1);
    if (!may(at, size, 3)) return INVALID_VALUE;
    memset((void *)(uintptr_t)at, value, size);
    return OK;
}
API int cuMemcpyDtoH_v2(void *out, ptr at, size_t size) {
    READY(1);
    if (!may(at, size, 1)) return INVALID_VALUE;
    memcpy(out, (void *)(uintptr_t)at, size);
    return OK;
}
API int cuMemcpyDtoD_v2(ptr to, ptr from, size_t size) {
    READY(1);
    if (!may(from, size, 1) || !may(to, size, 3)) return INVALID_VALUE;
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
    return OK;
}
API int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    READY(1);
    const unsigned read_only = 8;
    if (!at || !size || (flags & ~read_only)) return INVALID_VALUE;
    if (flags && setting("FAKE_CUDA_NO_LENDING", 0)) return NOT_SUPPORTED;
    char *kept = NULL;
    if (flags) {
        kept = malloc(size);
        struct iovec to = {kept, size}, from = {at, size};
        if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != (ssize_t)size) return free(kept), INVALID_VALUE;
    }
    pthread_mutex_lock(&lock);
    int result = OUT_OF_MEMORY;
    for (int i = 0; i < MOST && result; i++)
        if (!pins[i].used) pins[i].used = 1, pins[i].at = at, pins[i].kept = kept, pins[i].size = size, result = OK;
    pthread_mutex_unlock(&lock);
    if (result) free(kept);
    return result;
}
API int cuMemHostUnregister(void *at) {
    READY(1);
    int result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST; i++)
        if (pins[i].used && pins[i].at == at) pins[i].used = 0, free(pins[i].kept), result = OK;
    pthread_mutex_unlock(&lock);
    return result;
}
/* Where the device finds the bytes; NULL: they are not pinned. */
static const void *pinned(const void *at, size_t size) {
    const void *found = NULL;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MOST && !found; i++)
        if (pins[i].used && (char *)at >= pins[i].at && (char *)at + size <= pins[i].at + pins[i].size)
            found = pins[i].kept ? pins[i].kept + ((char *)at - pins[i].at) : at;
    pthread_mutex_unlock(&lock);
    return found;
}

/* ------------------------------------------------------------------------------------------------------------ streams */

typedef struct operation { struct operation *next; void *to; const void *from; size_t size; } operation;
typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    operation *first, *last;
    uint64_t queued, finished; /* operations, ever */
    int ending;
} stream;
typedef struct { stream *in; uint64_t mark; } event;

static void *work(void *argument) {
    stream *s = argument;
    unsigned seed = (unsigned)getpid() ^ (unsigned)(uintptr_t)s;
    long delay = setting("FAKE_CUDA_COPY_DELAY_US", 0);
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->ending) pthread_cond_wait(&s->changed, &s->lock);
        operation *o = s->first;
        if (!o) break;
        pthread_mutex_unlock(&s->lock);
        if (delay > 0) usleep((useconds_t)(rand_r(&seed) % (delay + 1)));
        memcpy(o->to, o->from, o->size);
        pthread_mutex_lock(&s->lock);
        s->first = o->next;
        if (!s->first) s->last = NULL;
        s->finished++;
        free(o);
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
static void wait_for(stream *s, uint64_t mark) {
    pthread_mutex_lock(&s->lock);
    while (s->finished < mark) pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
}
API int cuStreamCreate(void **out, unsigned flags) {
    READY(1);
    if (flags > 1) return INVALID_VALUE;
    stream *s = calloc(1, sizeof *s);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, work, s)) return OUT_OF_MEMORY;
    *out = s;
    return OK;
}
API int cuStreamSynchronize(void *raw) {
    if (!initialised) return NOT_INITIALIZED;
    if (raw) wait_for(raw, ((stream *)raw)->queued); /* also where the context is lost: the memcpy is real */
    READY(1);
    return OK;
}
API int cuStreamDestroy_v2(void *raw) {
    stream *s = raw;
    if (!initialised) return NOT_INITIALIZED;
    pthread_mutex_lock(&s->lock);
    s->ending = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    return OK;
}
API int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t size, void *raw) {
    READY(1);
    if (!raw || !may(to, size, 3) || !(from = pinned(from, size))) return INVALID_VALUE;
    long number = __atomic_add_fetch(&copies, 1, __ATOMIC_SEQ_CST);
    if (number == setting("FAKE_CUDA_UNKNOWN_AT", 0)) return NOBODY_KNOWS;
    if (number == setting("FAKE_CUDA_STICKY_AT", 0)) __atomic_store_n(&sticky, 1, __ATOMIC_SEQ_CST);
    READY(1);
    stream *s = raw;
    operation *o = calloc(1, sizeof *o);
    o->to = (void *)(uintptr_t)to, o->from = from, o->size = size;
    pthread_mutex_lock(&s->lock);
    if (s->last) s->last->next = o;
    else s->first = o;
    s->last = o;
    s->queued++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return OK;
}
API int cuEventCreate(void **out, unsigned flags) {
    READY(1);
    (void)flags;
    *out = calloc(1, sizeof(event));
    return *out ? OK : OUT_OF_MEMORY;
}
API int cuEventRecord(void *raw, void *in) {
    READY(1);
    event *e = raw;
    if (!in) return INVALID_HANDLE;
    e->in = in;
    pthread_mutex_lock(&e->in->lock);
    e->mark = e->in->queued;
    pthread_mutex_unlock(&e->in->lock);
    return OK;
}
API int cuEventSynchronize(void *raw) {
    READY(1);
    event *e = raw;
    if (e->in) wait_for(e->in, e->mark);
    READY(1);
    return OK;
}
API int cuEventDestroy_v2(void *raw) {
    if (!initialised) return NOT_INITIALIZED;
    free(raw);
    return OK;
}
