/* A client in C with nothing but warpfs.h and the CUDA driver, loaded at run time: holds the copy of a file, maps it
 * read-only, and runs a kernel on it that loads from it, or stores to it.
 *
 *   kernel FILE load|store
 *
 * Prints what the driver said: "mapped BYTES", "kernel CODE", "afterwards CODE WORD" (the file's first word, read back),
 * and exits with 0 unless it could not get that far. A store has to end in CUDA_ERROR_ILLEGAL_ADDRESS (700), in this
 * process's context only. */
#define _GNU_SOURCE
#include "warpfs.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef unsigned long long device_pointer;
struct access { int type, id, flags; };

static const char ptx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry load(.param .u64 from, .param .u64 to) {\n"
    " .reg .u64 %a; .reg .u64 %b; .reg .u32 %v;\n"
    " ld.param.u64 %a, [from]; ld.param.u64 %b, [to]; ld.global.u32 %v, [%a]; st.global.u32 [%b], %v; ret; }\n"
    ".visible .entry store(.param .u64 from, .param .u64 to) {\n"
    " .reg .u64 %a; .reg .u32 %v;\n"
    " ld.param.u64 %a, [from]; mov.u32 %v, 57005; st.global.u32 [%a], %v; ret; }\n";

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void check(int code, const char *what)
{
    if (code != 0) {
        fprintf(stderr, "%s: CUDA error %d\n", what, code);
        exit(1);
    }
}

/* Sends a frame and receives its reply's body; returns the descriptor that came with it, or -1. */
static int ask(int s, uint16_t kind, const void *body, size_t length, void *reply, size_t reply_length)
{
    struct warpfs_frame_header header = {0};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {&header, sizeof header};
    struct msghdr message = {0};
    int descriptor = -1;
    char rest[4096];

    header.length = (uint32_t)length;
    header.kind = kind;
    header.id = 1;
    if (write(s, &header, sizeof header) != sizeof header || write(s, body, length) != (ssize_t)length)
        fail("write");
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    if (recvmsg(s, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) != sizeof header)
        fail("recvmsg");
    if (CMSG_FIRSTHDR(&message) != NULL)
        memcpy(&descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof descriptor);
    if (header.kind != (kind | WARPFS_KIND_REPLY) || header.length < reply_length || header.length > sizeof rest) {
        fprintf(stderr, "the daemon answered with kind %u\n", header.kind);
        exit(1);
    }
    if (header.length > 0 && recv(s, rest, header.length, MSG_WAITALL) != (ssize_t)header.length)
        fail("recv");
    memcpy(reply, rest, reply_length);
    return descriptor;
}

int main(int argc, char **argv)
{
    struct warpfs_version version = {0};
    struct warpfs_materialize place = {0};
    struct warpfs_hello hello = {WARPFS_HELLO_MAGIC, WARPFS_PROTOCOL_VERSION, 0};
    struct warpfs_hello_reply greeting;
    struct warpfs_fetch fetch = {0};
    struct warpfs_fetch_reply fetched;
    struct sockaddr_un address = {0};
    struct access access = {1, 0, 1}; /* a device, number 0, read-only */
    int file, s, memory, device = -1, count = 0, code, i;
    void *library, *context, *module, *function;
    unsigned long long handle;
    device_pointer base, out;
    uint32_t word = 0;

    if (argc != 3) {
        fprintf(stderr, "usage: kernel FILE load|store\n");
        return 2;
    }
    file = open(argv[1], O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0 || ioctl(file, WARPFS_IOC_VERSION, &version) != 0)
        fail(argv[1]);
    s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sun_family = AF_UNIX;
    if (strlen(version.socket) >= sizeof address.sun_path)
        return 1;
    strcpy(address.sun_path, version.socket);
    if (s < 0 || connect(s, (struct sockaddr *)&address, sizeof address) != 0)
        fail(version.socket);
    ask(s, WARPFS_KIND_HELLO, &hello, sizeof hello, &greeting, sizeof greeting);
    do {
        memset(&place, 0, sizeof place);
        memcpy(place.secret, greeting.secret, sizeof place.secret);
        if (ioctl(file, WARPFS_IOC_MATERIALIZE, &place) != 0)
            fail(place.message);
    } while (place.state != WARPFS_STATE_RESIDENT);
    fetch.allocation = place.allocation;
    memory = ask(s, WARPFS_KIND_FETCH, &fetch, sizeof fetch, &fetched, sizeof fetched);

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
#define DRIVER(name, arguments) \
    int (*name) arguments; \
    *(void **)&name = dlsym(library, #name); \
    if (name == NULL) { fprintf(stderr, "no %s\n", #name); return 1; }
    DRIVER(cuInit, (unsigned))
    DRIVER(cuDeviceGetCount, (int *))
    DRIVER(cuDeviceGetUuid_v2, (uint8_t *, int))
    DRIVER(cuDevicePrimaryCtxRetain, (void **, int))
    DRIVER(cuCtxSetCurrent, (void *))
    DRIVER(cuCtxSynchronize, (void))
    DRIVER(cuMemImportFromShareableHandle, (unsigned long long *, void *, int))
    DRIVER(cuMemAddressReserve, (device_pointer *, size_t, size_t, device_pointer, unsigned long long))
    DRIVER(cuMemMap, (device_pointer, size_t, size_t, unsigned long long, unsigned long long))
    DRIVER(cuMemSetAccess, (device_pointer, size_t, const struct access *, size_t))
    DRIVER(cuMemAlloc_v2, (device_pointer *, size_t))
    DRIVER(cuMemcpyDtoH_v2, (void *, device_pointer, size_t))
    DRIVER(cuModuleLoadData, (void **, const void *))
    DRIVER(cuModuleGetFunction, (void **, void *, const char *))
    DRIVER(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))

    check(cuInit(0), "cuInit");
    check(cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (i = 0; i < count; i++) {
        uint8_t uuid[16];
        if (cuDeviceGetUuid_v2(uuid, i) == 0 && memcmp(uuid, fetched.device, sizeof uuid) == 0)
            device = i;
    }
    if (device < 0) {
        fprintf(stderr, "this process does not see the device\n");
        return 1;
    }
    access.id = device;
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)memory, 1), "cuMemImportFromShareableHandle");
    check(cuMemAddressReserve(&base, fetched.size, 0, 0, 0), "cuMemAddressReserve");
    check(cuMemMap(base, fetched.size, 0, handle, 0), "cuMemMap");
    check(cuMemSetAccess(base, fetched.size, &access, 1), "cuMemSetAccess");
    printf("mapped %llu\n", (unsigned long long)place.data_length);

    check(cuMemAlloc_v2(&out, 4), "cuMemAlloc");
    check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&function, module, argv[2]), "cuModuleGetFunction");
    base += place.data_offset;
    {
        void *arguments[] = {&base, &out};
        check(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL), "cuLaunchKernel");
    }
    printf("kernel %d\n", cuCtxSynchronize());
    code = cuMemcpyDtoH_v2(&word, out, sizeof word);
    printf("afterwards %d %u\n", code, word);
    return 0;
}
