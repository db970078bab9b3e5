/* Disks as they are on bad days, under one process: loaded with LD_PRELOAD, it answers pread(2) itself where the
 * environment says so, and leaves every other read to the system. Reads by io_uring do not come through here.
 *
 *   FAULT_DIRECT=einval|short|eio   what reads of descriptors with O_DIRECT answer (short: half of what was asked for)
 *   FAULT_FROM=N                    the first N of them are left alone
 *   FAULT_EIO_AT=OFFSET             reads through the page cache that touch this byte answer EIO
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long direct_reads;

static ssize_t real(int fd, void *buffer, size_t count, off_t offset) {
    return syscall(SYS_pread64, fd, buffer, count, offset);
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) {
    const char *direct = getenv("FAULT_DIRECT"), *from = getenv("FAULT_FROM"), *at = getenv("FAULT_EIO_AT");
    int flags = fcntl(fd, F_GETFL);
    if (flags != -1 && (flags & O_DIRECT)) {
        if (direct && atomic_fetch_add(&direct_reads, 1) >= (from ? atol(from) : 0)) {
            if (!strcmp(direct, "einval"))
                return errno = EINVAL, -1;
            if (!strcmp(direct, "eio"))
                return errno = EIO, -1;
            size_t half = count / 2 / 4096 * 4096;
            return real(fd, buffer, half ? half : count, offset);
        }
    } else if (at) {
        long byte = atol(at);
        if (offset <= byte && byte < offset + (off_t)count)
            return errno = EIO, -1;
    }
    return real(fd, buffer, count, offset);
}

ssize_t pread64(int fd, void *buffer, size_t count, off_t offset) {
    return pread(fd, buffer, count, offset);
}
