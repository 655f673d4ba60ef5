/* interop_native.h: what a DLPack capsule cannot say about a tensor's memory. For C99 and C++11, standard headers only.
 *
 * DLPack carries a handle, a device, a shape. It cannot carry the size of the memory behind the handle, the context in which the handle
 * is valid, the memory object below it, or when its contents are ready. This struct travels beside DLPack and says those.
 *
 * A Python object offers it with a method
 *
 *     obj.__interop_native__(*, max_version=(1, 0))
 *
 * which returns a PyCapsule named INTEROP_NATIVE_NAME around an InteropNativeV1 (or a mapping with the same field names). It describes the
 * memory; shape, dtype, strides and byte_offset come from obj.__dlpack__(). An implementation needs this file and nothing else of interop:
 * copying it into another project is how it is meant to be used.
 *
 * Ownership, in both directions:
 *   - The producer makes the struct and a capsule whose destructor calls `deleter` if, and only if, the name is still
 *     INTEROP_NATIVE_NAME.
 *   - A consumer first renames the capsule to INTEROP_NATIVE_USED_NAME; from then on it owns the struct and calls `deleter(self)` exactly
 *     once, also when it then refuses what it finds. `deleter` may be NULL: there is nothing to free.
 *   - Until `deleter` is called every handle in the struct is valid. A consumer that wants one for longer retains it by the API's own means
 *     (clRetainMemObject...) where there are such means, and otherwise keeps the struct.
 *   - No handle in here changes hands: a consumer destroys, releases and closes none of them.
 *
 * Versions: `version.major` 1 is this layout. Minor versions give names to words of `reserved`, for which zero will always mean "not said",
 * to new flag bits and to new kinds of readiness, and may append fields; so a consumer accepts any minor and any `struct_size` not below
 * INTEROP_NATIVE_V1_SIZE, and ignores what it does not know. Of another major only the head (up to and including `deleter`) keeps its
 * place: call `deleter` and read nothing else. A producer that is asked for a later max_version answers with the newest that it has.
 *
 * Zero means "unknown" or "none" in every handle, size and UUID. Integers have the machine's byte order.
 */
#ifndef INTEROP_NATIVE_H
#define INTEROP_NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#define INTEROP_NATIVE_MAJOR 1
#define INTEROP_NATIVE_MINOR 0

#define INTEROP_NATIVE_NAME "interop_native_v1"
#define INTEROP_NATIVE_USED_NAME "used_interop_native_v1"

#define INTEROP_NATIVE_V1_SIZE 264      /* bytes of version 1.0, the least that `struct_size` may say */

/* ---- InteropNativeV1.flags: a bit that is not set promises nothing ---- */
#define INTEROP_NATIVE_READ_ONLY         ((uint64_t)1 << 0) /* nobody may write through the handle */
#define INTEROP_NATIVE_HOST_VISIBLE      ((uint64_t)1 << 1) /* the host can map it, or the pointer is a host address (VK HOST_VISIBLE) */
#define INTEROP_NATIVE_COHERENT          ((uint64_t)1 << 2) /* no flush or invalidate around host access (VK HOST_COHERENT) */
#define INTEROP_NATIVE_CACHED            ((uint64_t)1 << 3) /* host reads are cached, so not slow (VK HOST_CACHED) */
#define INTEROP_NATIVE_DEDICATED         ((uint64_t)1 << 4) /* `memory` is a dedicated allocation for `handle`: an import must say so */
#define INTEROP_NATIVE_HANDLE_IS_POINTER ((uint64_t)1 << 5) /* `handle` is an address that may be added to, not an opaque handle */
#define INTEROP_NATIVE_PARTIAL           ((uint64_t)1 << 6) /* `nbytes` is what the producer knows of; there may be more */
#define INTEROP_NATIVE_HAS_DEVICE_UUID   ((uint64_t)1 << 7) /* `device_uuid` is set */
#define INTEROP_NATIVE_HAS_DRIVER_UUID   ((uint64_t)1 << 8) /* `driver_uuid` is set */

/* ---- InteropNativeV1.ready_kind: when the contents may be used ---- */
#define INTEROP_NATIVE_READY      0u    /* now: nothing is pending */
#define INTEROP_NATIVE_HOST_WAIT  1u    /* once `wait` says so; no native object */
#define INTEROP_NATIVE_TIMELINE   2u    /* ready_handle: VkSemaphore (timeline), reached at ready_value */
#define INTEROP_NATIVE_CL_EVENT   3u    /* ready_handle: cl_event of `context` */
#define INTEROP_NATIVE_CUDA_EVENT 4u    /* ready_handle: CUevent or cudaEvent_t */
#define INTEROP_NATIVE_BY_STREAM  5u    /* in the order of `queue`: ask obj.__dlpack__(stream=...), which orders it for your stream */

/* ---- what `wait` returns ---- */
#define INTEROP_NATIVE_WAIT_DONE        0
#define INTEROP_NATIVE_WAIT_TIMEOUT     1   /* not yet */
#define INTEROP_NATIVE_WAIT_FAILED      (-1) /* it never will be: the work failed or the device is lost. Every negative value is a failure ... */
#define INTEROP_NATIVE_WAIT_INTERRUPTED (-2) /* ... but this one: a signal came in; return to your caller, waiting again is possible */

#define INTEROP_NATIVE_UNKNOWN_MEMORY_TYPE (-1)
#define INTEROP_NATIVE_UNKNOWN_QUEUE_FAMILY ((uint32_t)0xFFFFFFFFu)

typedef struct InteropNativeVersion {
    uint32_t major;
    uint32_t minor;
} InteropNativeVersion;

typedef struct InteropNativeV1 {
    /* -- head: keeps its place in every major version -- */
    InteropNativeVersion version;       /* of the layout: INTEROP_NATIVE_MAJOR, INTEROP_NATIVE_MINOR */
    uint64_t struct_size;               /* bytes that the producer wrote, counted from `version`; not below INTEROP_NATIVE_V1_SIZE */
    void *owner;                        /* the producer's own; a consumer neither reads nor writes it */
    void (*deleter)(struct InteropNativeV1 *self);
                                        /* frees the struct and lets go of the memory. Called once, from any thread, with or without
                                         * Python's GIL, also while an error is pending. NULL: nothing to free */

    /* -- where -- */
    int32_t device_type;                /* DLPack's DLDeviceType; equal to what __dlpack_device__ says */
    int32_t device_id;                  /* DLPack's device_id; which physical device that is, the UUIDs say */
    uint64_t flags;                     /* INTEROP_NATIVE_READ_ONLY ...; unknown bits are ignored */

    /* -- the memory that the handle stands for -- */
    uint64_t handle;                    /* host, CUDA, ROCm: address of the first byte. OpenCL: cl_mem. Vulkan: VkBuffer. Others: what DLPack's
                                         * `data` is there. The tensor's own offset is DLPack's byte_offset, never added in here */
    uint64_t nbytes;                    /* bytes from the first byte of `handle` to its end: the size of the whole allocation, CL_MEM_SIZE,
                                         * VkBufferCreateInfo::size. Not of the tensor, which lies within */

    /* -- the memory object below it, for an API that keeps one: what is exported, imported or mapped -- */
    uint64_t memory;                    /* Vulkan: VkDeviceMemory that the buffer is bound to. OpenCL: the parent cl_mem of a sub-buffer. CUDA:
                                         * CUmemGenericAllocationHandle, where there is one */
    uint64_t memory_nbytes;             /* its size: VkMemoryAllocateInfo::allocationSize. What an import must be told */
    uint64_t memory_offset;             /* where in it `handle` begins: memoryOffset of vkBindBufferMemory, CL_MEM_OFFSET */
    int32_t memory_type;                /* Vulkan: memoryTypeIndex. INTEROP_NATIVE_UNKNOWN_MEMORY_TYPE: not said */

    /* -- where the handles are valid -- */
    uint32_t queue_family;              /* Vulkan: queue family that owns the buffer. INTEROP_NATIVE_UNKNOWN_QUEUE_FAMILY: not said */
    uint64_t context;                   /* Vulkan: VkDevice. OpenCL: cl_context. CUDA: CUcontext. ROCm: hipCtx_t */
    uint64_t physical_device;           /* Vulkan: VkPhysicalDevice. OpenCL: cl_device_id */
    uint64_t instance;                  /* Vulkan: VkInstance. OpenCL: cl_platform_id */
    uint64_t queue;                     /* the queue that used the memory last: VkQueue, cl_command_queue; CUDA, ROCm: the stream as the array
                                         * API numbers it. Submitting to a VkQueue takes its owner's lock */
    uint8_t device_uuid[16];            /* VkPhysicalDeviceIDProperties::deviceUUID, CL_DEVICE_UUID_KHR, cuDeviceGetUuid: equal means the same
                                         * physical device. Meaningful with HAS_DEVICE_UUID; all zeros is unknown even then */
    uint8_t driver_uuid[16];            /* driverUUID, CL_DRIVER_UUID_KHR: equal means that opaque memory objects are understood */

    /* -- when -- */
    uint32_t ready_kind;                /* INTEROP_NATIVE_READY ...; of a kind that you do not know, use `wait` */
    uint32_t ready_padding;             /* zero */
    uint64_t ready_handle;              /* see ready_kind; borrowed, like every handle here */
    uint64_t ready_value;               /* see ready_kind */
    int (*wait)(void *wait_ctx, int64_t timeout_ns);
                                        /* blocks until ready, at most so long (0: only looks, negative: for ever). From any thread, with or
                                         * without Python's GIL; release the GIL before waiting for long. Not NULL, except with READY and
                                         * BY_STREAM. Not after `deleter`, nor while it runs */
    void *wait_ctx;                     /* the first argument of `wait`; the producer's own */

    uint64_t reserved[8];               /* zero. Words for later minor versions */
} InteropNativeV1;

/* ---- the layout, checked by whoever compiles this ---- */
#if defined(__cplusplus)
#define INTEROP_NATIVE_ASSERT_(name, holds) static_assert(holds, #name)
#elif defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L
#define INTEROP_NATIVE_ASSERT_(name, holds) _Static_assert(holds, #name)
#else
#define INTEROP_NATIVE_ASSERT_(name, holds) typedef char interop_native_assert_##name[(holds) ? 1 : -1]
#endif
#define INTEROP_NATIVE_AT_(field, offset) INTEROP_NATIVE_ASSERT_(field##_is_at_##offset, offsetof(InteropNativeV1, field) == offset)

INTEROP_NATIVE_ASSERT_(pointers_have_64_bits, sizeof(void *) == 8 && sizeof(void (*)(void)) == 8);
INTEROP_NATIVE_ASSERT_(size_is_v1, sizeof(InteropNativeV1) == INTEROP_NATIVE_V1_SIZE);
INTEROP_NATIVE_AT_(version, 0);
INTEROP_NATIVE_AT_(struct_size, 8);
INTEROP_NATIVE_AT_(owner, 16);
INTEROP_NATIVE_AT_(deleter, 24);
INTEROP_NATIVE_AT_(device_type, 32);
INTEROP_NATIVE_AT_(device_id, 36);
INTEROP_NATIVE_AT_(flags, 40);
INTEROP_NATIVE_AT_(handle, 48);
INTEROP_NATIVE_AT_(nbytes, 56);
INTEROP_NATIVE_AT_(memory, 64);
INTEROP_NATIVE_AT_(memory_nbytes, 72);
INTEROP_NATIVE_AT_(memory_offset, 80);
INTEROP_NATIVE_AT_(memory_type, 88);
INTEROP_NATIVE_AT_(queue_family, 92);
INTEROP_NATIVE_AT_(context, 96);
INTEROP_NATIVE_AT_(physical_device, 104);
INTEROP_NATIVE_AT_(instance, 112);
INTEROP_NATIVE_AT_(queue, 120);
INTEROP_NATIVE_AT_(device_uuid, 128);
INTEROP_NATIVE_AT_(driver_uuid, 144);
INTEROP_NATIVE_AT_(ready_kind, 160);
INTEROP_NATIVE_AT_(ready_padding, 164);
INTEROP_NATIVE_AT_(ready_handle, 168);
INTEROP_NATIVE_AT_(ready_value, 176);
INTEROP_NATIVE_AT_(wait, 184);
INTEROP_NATIVE_AT_(wait_ctx, 192);
INTEROP_NATIVE_AT_(reserved, 200);

#undef INTEROP_NATIVE_AT_
#undef INTEROP_NATIVE_ASSERT_

/* ---- three small helpers; using them is optional ---- */

/* A struct that says nothing yet: fill in device_type, device_id, handle, nbytes, and what else is known. */
static inline void interop_native_init(InteropNativeV1 *n) {
    memset(n, 0, sizeof *n);
    n->version.major = INTEROP_NATIVE_MAJOR;
    n->version.minor = INTEROP_NATIVE_MINOR;
    n->struct_size = sizeof *n;
    n->memory_type = INTEROP_NATIVE_UNKNOWN_MEMORY_TYPE;
    n->queue_family = INTEROP_NATIVE_UNKNOWN_QUEUE_FAMILY;
}

/* Whether the fields behind the head may be read. Not zero: yes. */
static inline int interop_native_readable(const InteropNativeV1 *n) {
    return n->version.major == INTEROP_NATIVE_MAJOR && n->struct_size >= INTEROP_NATIVE_V1_SIZE;
}

/* Wait on the host, whatever the kind; BY_STREAM cannot be waited for here and fails. */
static inline int interop_native_wait(const InteropNativeV1 *n, int64_t timeout_ns) {
    if (n->ready_kind == INTEROP_NATIVE_READY) return INTEROP_NATIVE_WAIT_DONE;
    return n->wait ? n->wait(n->wait_ctx, timeout_ns) : INTEROP_NATIVE_WAIT_FAILED;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* INTEROP_NATIVE_H */
