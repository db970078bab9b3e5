/* Prints what the compiler made of warpfs.h, a fact a line: `KEY VALUE...`, numbers in decimal.
 *
 *   struct warpfs_fetch 8                     bytes of a struct
 *   struct.warpfs_fetch.allocation 0 8        where a field lies, and its bytes
 *   WARPFS_FRAME_LIMIT 65536                  a number
 *   WARPFS_HOST_UUID 77617270...              16 bytes, in hexadecimal
 *
 * tests/integration/header.rs compares each line with src/protocol.rs. */
#include <stddef.h>
#include <stdio.h>

#include "warpfs.h"

#define STRUCT(name) printf("struct %s %zu\n", #name, sizeof(struct name))
#define FIELD(name, field) \
    printf("struct.%s.%s %zu %zu\n", #name, #field, offsetof(struct name, field), sizeof(((struct name *)0)->field))
#define NUMBER(name) printf("%s %llu\n", #name, (unsigned long long)(name))

int main(void) {
    STRUCT(warpfs_version);
    FIELD(warpfs_version, protocol);
    FIELD(warpfs_version, pid);
    FIELD(warpfs_version, devices);
    FIELD(warpfs_version, reserved);
    FIELD(warpfs_version, socket);

    STRUCT(warpfs_materialize);
    FIELD(warpfs_materialize, secret);
    FIELD(warpfs_materialize, device);
    FIELD(warpfs_materialize, offset);
    FIELD(warpfs_materialize, length);
    FIELD(warpfs_materialize, flags);
    FIELD(warpfs_materialize, state);
    FIELD(warpfs_materialize, error);
    FIELD(warpfs_materialize, reserved);
    FIELD(warpfs_materialize, allocation);
    FIELD(warpfs_materialize, allocation_size);
    FIELD(warpfs_materialize, data_offset);
    FIELD(warpfs_materialize, data_length);
    FIELD(warpfs_materialize, generation);
    FIELD(warpfs_materialize, loaded);
    FIELD(warpfs_materialize, message);

    STRUCT(warpfs_status);
    FIELD(warpfs_status, device);
    FIELD(warpfs_status, state);
    FIELD(warpfs_status, holders);
    FIELD(warpfs_status, size);
    FIELD(warpfs_status, loaded);
    FIELD(warpfs_status, generation);
    FIELD(warpfs_status, error);
    FIELD(warpfs_status, reserved);
    FIELD(warpfs_status, message);

    STRUCT(warpfs_evict);
    FIELD(warpfs_evict, device);
    FIELD(warpfs_evict, freed);
    FIELD(warpfs_evict, held);

    STRUCT(warpfs_frame_header);
    FIELD(warpfs_frame_header, length);
    FIELD(warpfs_frame_header, kind);
    FIELD(warpfs_frame_header, reserved);
    FIELD(warpfs_frame_header, id);

    STRUCT(warpfs_hello);
    FIELD(warpfs_hello, magic);
    FIELD(warpfs_hello, version);
    FIELD(warpfs_hello, capabilities);

    STRUCT(warpfs_hello_reply);
    FIELD(warpfs_hello_reply, version);
    FIELD(warpfs_hello_reply, devices);
    FIELD(warpfs_hello_reply, capabilities);
    FIELD(warpfs_hello_reply, secret);

    STRUCT(warpfs_device_entry);
    FIELD(warpfs_device_entry, uuid);
    FIELD(warpfs_device_entry, kind);
    FIELD(warpfs_device_entry, ordinal);
    FIELD(warpfs_device_entry, label);

    STRUCT(warpfs_fetch);
    FIELD(warpfs_fetch, allocation);

    STRUCT(warpfs_fetch_reply);
    FIELD(warpfs_fetch_reply, allocation);
    FIELD(warpfs_fetch_reply, size);
    FIELD(warpfs_fetch_reply, device);

    STRUCT(warpfs_release);
    FIELD(warpfs_release, allocation);
    FIELD(warpfs_release, grants);

    STRUCT(warpfs_error_reply);
    FIELD(warpfs_error_reply, code);
    FIELD(warpfs_error_reply, error_number);

    NUMBER(WARPFS_PROTOCOL_VERSION);
    NUMBER(WARPFS_MESSAGE_SIZE);
    NUMBER(WARPFS_IOC_TYPE);
    NUMBER(WARPFS_IOC_VERSION);
    NUMBER(WARPFS_IOC_MATERIALIZE);
    NUMBER(WARPFS_IOC_STATUS);
    NUMBER(WARPFS_IOC_EVICT);
    NUMBER(WARPFS_MATERIALIZE_NOWAIT);
    NUMBER(WARPFS_MATERIALIZE_CANCEL);
    NUMBER(WARPFS_MATERIALIZE_FLAGS);
    NUMBER(WARPFS_MATERIALIZE_WAIT_MS);
    NUMBER(WARPFS_KIND_HELLO);
    NUMBER(WARPFS_KIND_FETCH);
    NUMBER(WARPFS_KIND_RELEASE);
    NUMBER(WARPFS_KIND_REPLY);
    NUMBER(WARPFS_KIND_ERROR);
    NUMBER(WARPFS_FRAME_LIMIT);
    NUMBER(WARPFS_HELLO_MAGIC);

    NUMBER(WARPFS_ERROR_NONE);
    NUMBER(WARPFS_ERROR_NOT_FOUND);
    NUMBER(WARPFS_ERROR_PERMISSION);
    NUMBER(WARPFS_ERROR_NOT_REGULAR);
    NUMBER(WARPFS_ERROR_TOO_LARGE);
    NUMBER(WARPFS_ERROR_OUT_OF_MEMORY);
    NUMBER(WARPFS_ERROR_CHANGING);
    NUMBER(WARPFS_ERROR_IO);
    NUMBER(WARPFS_ERROR_NO_DEVICE);
    NUMBER(WARPFS_ERROR_LOADER);
    NUMBER(WARPFS_ERROR_BAD_REQUEST);
    NUMBER(WARPFS_ERROR_WRONG_VERSION);
    NUMBER(WARPFS_ERROR_BAD_SESSION);
    NUMBER(WARPFS_ERROR_NOT_READABLE);
    NUMBER(WARPFS_ERROR_UNSUPPORTED);
    NUMBER(WARPFS_ERROR_STOPPING);
    NUMBER(WARPFS_ERROR_DEVICE);
    NUMBER(WARPFS_ERROR_NOT_HELD);
    NUMBER(WARPFS_ERROR_NOT_RUNNING);
    NUMBER(WARPFS_ERROR_NOT_WARPFS);
    NUMBER(WARPFS_STATE_ABSENT);
    NUMBER(WARPFS_STATE_LOADING);
    NUMBER(WARPFS_STATE_RESIDENT);
    NUMBER(WARPFS_DEVICE_HOST);
    NUMBER(WARPFS_DEVICE_CUDA);

    printf("WARPFS_HOST_UUID ");
    for (size_t i = 0; i < sizeof WARPFS_HOST_UUID; i++)
        printf("%02x", (unsigned char)WARPFS_HOST_UUID[i]);
    printf("\n");
    return 0;
}
