/* SPDX-License-Identifier: Apache-2.0
 *
 * warpfs.h: the warpfs protocol for C and C++ programs. Nothing has to be linked.
 *
 * A warpfs mount shows a directory; any program may ask that a file of it be brought into device (GPU) memory, where
 * every process that asks for the same file maps the same one copy. There are two ways to ask, and this header has
 * everything that both need:
 *
 *   Just load it.  open() a file on the mount for reading, ioctl(WARPFS_IOC_MATERIALIZE) with a zeroed struct until
 *                  the state is WARPFS_STATE_RESIDENT. That is a tool of one page: mount-scripts/examples/preload.c.
 *
 *   Use the copy.  1. Connect to the daemon's Unix stream socket (its path: WARPFS_IOC_VERSION, or read
 *                     MOUNT/.warpfs/socket) and exchange HELLO. The reply has a secret, and the devices.
 *                  2. WARPFS_IOC_MATERIALIZE with that secret: the session now holds the copy. The reply names the
 *                     allocation, and where in it the bytes are.
 *                  3. Once for each allocation: FETCH it over the socket. A descriptor comes with the reply
 *                     (SCM_RIGHTS): mmap() it for a host device, import it as
 *                     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR for a CUDA device. Map all of it, read-only.
 *                  4. When no longer needed: unmap, then RELEASE. The end of the process does the same; the end of
 *                     the connection alone does not, for what was fetched: it may still be mapped.
 *
 * All integers are little-endian, sizes and offsets are bytes. No struct has padding. Fill a struct with zeros before
 * use. The same definitions are in src/protocol.rs, and a test compares the two.
 */
#ifndef WARPFS_H
#define WARPFS_H

#include <stdint.h>
#include <sys/ioctl.h>
#include <linux/ioctl.h>

#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "warpfs runs on little-endian machines only"
#endif

#if defined(__cplusplus) && __cplusplus >= 201103L
#define WARPFS_ASSERT_SIZE(type, size) static_assert(sizeof(type) == (size), "layout of " #type)
#elif !defined(__cplusplus) && defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define WARPFS_ASSERT_SIZE(type, size) _Static_assert(sizeof(type) == (size), "layout of " #type)
#else
/* Older languages have no such assertion; an array of -1 elements ends their compilation too. Nothing is defined. */
#define WARPFS_ASSERT_SIZE(type, size) extern char warpfs_layout_check[sizeof(type) == (size) ? 1 : -1]
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Version of everything in this file; raised when a struct or a meaning changes. */
#define WARPFS_PROTOCOL_VERSION 1

/* Identifies the host device, on every machine: 16 bytes, of which the last is the string's NUL. A CUDA device has the
 * UUID that its driver reports (cuDeviceGetUuid). 16 zero bytes stand for the daemon's default device. */
#define WARPFS_HOST_UUID "warpfs-host-mem"

/* ---------------------------------------------------------------------------------------------------------- numbers */

/* What went wrong. Numbers keep their meaning between versions, and new ones may be added. In brackets: the errno
 * that goes with it where no system call gave a more precise one. */
enum warpfs_error_code {
    WARPFS_ERROR_NONE = 0,
    WARPFS_ERROR_NOT_FOUND = 1,     /* no such file, or the name is gone [ENOENT] */
    WARPFS_ERROR_PERMISSION = 2,    /* the caller may not read the file [EACCES] */
    WARPFS_ERROR_NOT_REGULAR = 3,   /* a directory, FIFO, socket, device or symbolic link [EISDIR, else EINVAL] */
    WARPFS_ERROR_TOO_LARGE = 4,     /* larger than the device's whole budget [EFBIG] */
    WARPFS_ERROR_OUT_OF_MEMORY = 5, /* no room now; the text says who holds it [ENOMEM] */
    WARPFS_ERROR_CHANGING = 6,      /* the file changed while it was loaded; try again [EAGAIN] */
    WARPFS_ERROR_IO = 7,            /* reading the file failed [EIO] */
    WARPFS_ERROR_NO_DEVICE = 8,     /* the daemon has no such device, or it is gone [ENODEV] */
    WARPFS_ERROR_LOADER = 9,        /* the loader process died or did not answer [EIO] */
    WARPFS_ERROR_BAD_REQUEST = 10,  /* the message or its arguments make no sense [EINVAL] */
    WARPFS_ERROR_WRONG_VERSION = 11, /* the peer speaks another protocol version [EPROTO] */
    WARPFS_ERROR_BAD_SESSION = 12,  /* the secret belongs to no session of the caller [EACCES] */
    WARPFS_ERROR_NOT_READABLE = 13, /* the descriptor is not open for reading [EBADF] */
    WARPFS_ERROR_UNSUPPORTED = 14,  /* this version of the daemon does not do that [EOPNOTSUPP] */
    WARPFS_ERROR_STOPPING = 15,     /* the daemon is shutting down [ESHUTDOWN] */
    WARPFS_ERROR_DEVICE = 16,       /* the device reported an error of its own [EIO] */
    WARPFS_ERROR_NOT_HELD = 17,     /* the session has no hold on that allocation (any more) [ENOLCK] */
    WARPFS_ERROR_NOT_RUNNING = 18,  /* no daemon answers at the socket; made by clients [ECONNREFUSED] */
    WARPFS_ERROR_NOT_WARPFS = 19    /* the path is not on a warpfs mount; made by clients [ENOTTY] */
};

/* Where a file stands on a device. */
enum warpfs_state {
    WARPFS_STATE_ABSENT = 0,
    WARPFS_STATE_LOADING = 1,
    WARPFS_STATE_RESIDENT = 2
};

/* What a device is. */
enum warpfs_device_kind {
    WARPFS_DEVICE_HOST = 1, /* shared memory: the descriptor is a sealed memfd, mmap() it with PROT_READ, MAP_SHARED */
    WARPFS_DEVICE_CUDA = 2  /* the descriptor is for cuMemImportFromShareableHandle */
};

/* Bytes of text in an ioctl's reply, with the NUL that always ends it. */
#define WARPFS_MESSAGE_SIZE 256

/* ------------------------------------------------------------------------------------------------------------ ioctl
 *
 * On a descriptor of a file of the mount. Each returns 0, or -1 with errno:
 *
 *   ENOTTY   not a warpfs mount (or an ioctl that its version does not know): read the file as ever
 *   EBADF    MATERIALIZE, STATUS and EVICT need a descriptor that is open for reading; O_WRONLY and O_PATH are not
 *   EISDIR   MATERIALIZE, STATUS and EVICT on a directory; EINVAL on anything else that is not a regular file
 *   EINVAL   flags that this version does not know, or a range that is not in the file
 *   ENODEV   the daemon does not serve the device that was asked for
 *   EINTR    a signal came first: call again
 *   EACCES   a secret that belongs to no session of this user
 *   ENOMEM, EFBIG, EAGAIN, EIO, ESHUTDOWN, EOPNOTSUPP: see enum warpfs_error_code
 *   ENOTCONN, ECONNABORTED: the daemon is gone
 *
 * Where the struct has `error` and `message` they say more than errno can; zero it first and look at them whether the
 * call returned 0 or -1: an empty message means that there is only errno. Open files with O_NONBLOCK where the name
 * could be a FIFO's: open() itself would wait for a writer otherwise, here as on any file system. */

/* VERSION: who serves this mount, and where its socket is. On directories too. */
struct warpfs_version {
    uint32_t protocol;   /* out: WARPFS_PROTOCOL_VERSION of the daemon */
    uint32_t pid;        /* out: the daemon's process id, in the daemon's PID namespace */
    uint32_t devices;    /* out: number of devices that the daemon serves */
    uint32_t reserved;
    char socket[112];    /* out: path of the socket, NUL-terminated. sun_path has 108 bytes: check the length */
};

/* MATERIALIZE: bring this descriptor's file into device memory, or say where it already is.
 *
 * Waits at most WARPFS_MATERIALIZE_WAIT_MS; a signal may have to wait as long. A load that takes longer goes on by
 * itself: the call returns 0 with WARPFS_STATE_LOADING, and calling again with the same struct waits on. Requests for
 * the same bytes, from anyone who shares the copy, join the same load.
 *
 * Without a secret nothing is held: the file is loaded, and may be evicted again as soon as others need the room; the
 * allocation's number is then of no use to the caller. With a session's secret each reply that says RESIDENT is one
 * grant: the copy stays where it is until as many grants are given back (RELEASE), or the session's process ends. A hold whose
 * allocation is never fetched lapses after 10 seconds.
 *
 * The bytes at data_offset never change while they are held. If the file changes, a later MATERIALIZE answers with a
 * new copy, under another generation. */
struct warpfs_materialize {
    uint8_t secret[16];       /* in: the session that shall hold the copy; zeros: no hold, just load */
    uint8_t device[16];       /* in: the device's UUID; zeros: the daemon's default device */
    uint64_t offset;          /* in: first byte of the range */
    uint64_t length;          /* in: bytes of the range; 0: to the end of the file */
    uint32_t flags;           /* in: WARPFS_MATERIALIZE_* */
    uint32_t state;           /* out: enum warpfs_state */
    uint32_t error;           /* out: enum warpfs_error_code where the ioctl failed, else 0 */
    uint32_t reserved;
    uint64_t allocation;      /* out, resident: number of the allocation; 0: an empty range, nothing to map */
    uint64_t allocation_size; /* out, resident: bytes of the whole allocation, as it has to be mapped */
    uint64_t data_offset;     /* out, resident: where the range begins in the allocation */
    uint64_t data_length;     /* out: bytes of the range */
    uint64_t generation;      /* out: number of this version of the file; another version has another number */
    uint64_t loaded;          /* out, loading: bytes that have arrived, of data_length */
    char message[WARPFS_MESSAGE_SIZE]; /* out: what went wrong, NUL-terminated */
};

/* Only start the load, and return at once. */
#define WARPFS_MATERIALIZE_NOWAIT 1u
/* Starts nothing: ends the file's load, unless another program wants it too. state says what is left. */
#define WARPFS_MATERIALIZE_CANCEL 2u
/* Every flag that this version knows; others are refused (EINVAL). */
#define WARPFS_MATERIALIZE_FLAGS (WARPFS_MATERIALIZE_NOWAIT | WARPFS_MATERIALIZE_CANCEL)
/* Milliseconds for which MATERIALIZE keeps its caller at most. */
#define WARPFS_MATERIALIZE_WAIT_MS 1000

/* STATUS: where the file stands on a device. Starts nothing. */
struct warpfs_status {
    uint8_t device[16];  /* in: the device's UUID; zeros: the daemon's default device */
    uint32_t state;      /* out: enum warpfs_state */
    uint32_t holders;    /* out: sessions that hold the copy */
    uint64_t size;       /* out: bytes of the file */
    uint64_t loaded;     /* out: bytes that have arrived */
    uint64_t generation; /* out: the copy's generation; 0: there is none */
    uint32_t error;      /* out: why the last load failed, where nothing is resident, else 0 */
    uint32_t reserved;
    char message[WARPFS_MESSAGE_SIZE]; /* out: text to `error`, NUL-terminated */
};

/* EVICT: give the file's copy up, as far as this user and the users in its namespaces share it. Memory that a session
 * holds stays until it lets go; nobody is handed that copy any more. */
struct warpfs_evict {
    uint8_t device[16]; /* in: the device's UUID; zeros: every device */
    uint64_t freed;     /* out: bytes freed at once; small files share memory, which is free with the last of them */
    uint64_t held;      /* out: bytes that will be free when their holders let go */
};

#define WARPFS_IOC_TYPE 0xF7
#define WARPFS_IOC_VERSION _IOR(WARPFS_IOC_TYPE, 0, struct warpfs_version)
#define WARPFS_IOC_MATERIALIZE _IOWR(WARPFS_IOC_TYPE, 1, struct warpfs_materialize)
#define WARPFS_IOC_STATUS _IOWR(WARPFS_IOC_TYPE, 2, struct warpfs_status)
#define WARPFS_IOC_EVICT _IOWR(WARPFS_IOC_TYPE, 3, struct warpfs_evict)

/* ----------------------------------------------------------------------------------------------------------- socket
 *
 * A stream of frames: a header, then `length` bytes. The client asks, and the daemon answers each request with
 * its kind | WARPFS_KIND_REPLY, or with WARPFS_KIND_ERROR, and the same id. The first request is HELLO. A frame that
 * makes no sense ends the connection. With the connection end the holds that were never fetched; fetched ones last
 * until the process ends, since it may have them mapped. */

#define WARPFS_KIND_HELLO 1
#define WARPFS_KIND_FETCH 2
#define WARPFS_KIND_RELEASE 3
#define WARPFS_KIND_REPLY 0x8000
#define WARPFS_KIND_ERROR 0xFFFF

/* Bytes that may follow a header; more end the connection. */
#define WARPFS_FRAME_LIMIT 65536u

struct warpfs_frame_header {
    uint32_t length; /* bytes that follow */
    uint16_t kind;   /* WARPFS_KIND_* */
    uint16_t reserved;
    uint64_t id;     /* chosen by the client, returned in the reply */
};

/* "wfs", 1 as they lie in memory. */
#define WARPFS_HELLO_MAGIC 0x01736677u

struct warpfs_hello {
    uint32_t magic;        /* WARPFS_HELLO_MAGIC */
    uint32_t version;      /* WARPFS_PROTOCOL_VERSION */
    uint64_t capabilities; /* none are defined yet: 0 */
};

/* Followed by `devices` times struct warpfs_device_entry; the first is the default device. */
struct warpfs_hello_reply {
    uint32_t version;
    uint32_t devices;
    uint64_t capabilities;
    uint8_t secret[16]; /* for WARPFS_IOC_MATERIALIZE; whoever has it and your user id can make holds in your name */
};

struct warpfs_device_entry {
    uint8_t uuid[16];
    uint32_t kind;     /* enum warpfs_device_kind */
    uint32_t ordinal;  /* the daemon's number for it: yours may differ, so look the device up by its UUID */
    char label[24];    /* "host" or "cuda:N", padded with NULs */
};

/* Asks for the descriptor of an allocation of which the session holds a copy. */
struct warpfs_fetch {
    uint64_t allocation;
};

/* The descriptor comes as SCM_RIGHTS with the first byte of the reply's header: use recvmsg from there on. Receive it with MSG_CMSG_CLOEXEC; close it once it is mapped. */
struct warpfs_fetch_reply {
    uint64_t allocation;
    uint64_t size; /* bytes, all of which have to be mapped */
    uint8_t device[16];
};

/* Gives back `grants` of the holds that MATERIALIZE granted on an allocation. With the last one the lease ends, and the
 * memory may be used for something else: unmap it first. The reply is an empty frame. */
struct warpfs_release {
    uint64_t allocation;
    uint64_t grants;
};

/* Body of a WARPFS_KIND_ERROR frame; the rest of the frame is text, without a NUL. `error_number` is called errno
 * elsewhere, which in C is a macro. */
struct warpfs_error_reply {
    uint32_t code; /* enum warpfs_error_code */
    int32_t error_number;
};

WARPFS_ASSERT_SIZE(struct warpfs_version, 128);
WARPFS_ASSERT_SIZE(struct warpfs_materialize, 368);
WARPFS_ASSERT_SIZE(struct warpfs_status, 312);
WARPFS_ASSERT_SIZE(struct warpfs_evict, 32);
WARPFS_ASSERT_SIZE(struct warpfs_frame_header, 16);
WARPFS_ASSERT_SIZE(struct warpfs_hello, 16);
WARPFS_ASSERT_SIZE(struct warpfs_hello_reply, 32);
WARPFS_ASSERT_SIZE(struct warpfs_device_entry, 48);
WARPFS_ASSERT_SIZE(struct warpfs_fetch, 8);
WARPFS_ASSERT_SIZE(struct warpfs_fetch_reply, 32);
WARPFS_ASSERT_SIZE(struct warpfs_release, 16);
WARPFS_ASSERT_SIZE(struct warpfs_error_reply, 8);

#ifdef __cplusplus
}
#endif

#endif /* WARPFS_H */
