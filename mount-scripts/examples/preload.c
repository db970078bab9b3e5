/* preload FILE...: brings files of a warpfs mount into device memory.
 *
 * What a tool that knows nothing of GPUs has to do: open the file, and repeat one ioctl until it says "resident".
 *
 *   cc -std=c99 -I include -o preload mount-scripts/examples/preload.c */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "warpfs.h"

static int preload(const char *path) {
    struct warpfs_materialize request; /* no session secret: load the file, hold nothing */
    int result, error;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO must not keep us waiting */
    if (fd < 0) {
        fprintf(stderr, "preload: %s: %s\n", path, strerror(errno));
        return 1;
    }
    do {
        memset(&request, 0, sizeof request);
        result = ioctl(fd, WARPFS_IOC_MATERIALIZE, &request);
        error = errno;
    } while ((result == 0 && request.state == WARPFS_STATE_LOADING) || (result != 0 && error == EINTR));
    close(fd);

    if (result == 0 && request.state == WARPFS_STATE_RESIDENT) {
        printf("%s: resident, %llu bytes\n", path, (unsigned long long)request.data_length);
        return 0;
    }
    if (request.message[0] != '\0') /* the daemon's own words say more than errno can */
        fprintf(stderr, "preload: %s: %.*s\n", path, WARPFS_MESSAGE_SIZE, request.message);
    else if (result != 0)
        fprintf(stderr, "preload: %s: %s\n", path, error == ENOTTY ? "not on a warpfs mount" : strerror(error));
    else
        fprintf(stderr, "preload: %s: the daemon gave no reason (error %u)\n", path, (unsigned)request.error);
    return 1;
}

int main(int argc, char **argv) {
    int failed = 0;
    if (argc < 2) {
        fprintf(stderr, "usage: preload FILE...\n");
        return 2;
    }
    for (int i = 1; i < argc; i++)
        failed |= preload(argv[i]);
    return failed;
}
