/* A library with "device memory" of its own, written against interop_native.h and Python's capsule API alone: both ends of the side
 * channel without interop. tests/test_native.py compiles it.
 *
 * A `Device` is a block of bytes that is known to the outside by an opaque handle (its address is not told), with counters of what was
 * done to it. Producing: make_native, make_dlpack. Consuming: consume_native.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "interop_native.h"

#define EXPORTED __attribute__((visibility("default")))

/* ---- DLPack 1.x, as far as it is needed here ---- */
typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct { void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape, *strides; uint64_t byte_offset; } DLTensor;
typedef struct Managed {
    struct { uint32_t major, minor; } version;
    void *manager_ctx;
    void (*deleter)(struct Managed *);
    uint64_t flags;
    DLTensor dl_tensor;
    int64_t dims[2];
} Managed;

/* ---- the device ---- */
typedef struct Device {
    int references;                     /* of the application, of native structs, of DLPack structs */
    int done;                           /* the queue has finished */
    int natives_deleted, tensors_deleted, waits;
    uint64_t nbytes;
} Device;

static int add(int *n, int by) { return __atomic_add_fetch(n, by, __ATOMIC_ACQ_REL); }
static int get(const int *n) { return __atomic_load_n(n, __ATOMIC_ACQUIRE); }
static uint64_t handle_of(const Device *d) { return (uint64_t)(uintptr_t)d ^ 0x5A5A000000000000u; }    /* not an address */

EXPORTED Device *device_new(uint64_t nbytes, int done) {
    Device *d = calloc(1, sizeof *d);
    if (!d) abort();
    d->references = 1;
    d->done = done;
    d->nbytes = nbytes;
    return d;
}

EXPORTED uint64_t device_handle(const Device *d) { return handle_of(d); }
EXPORTED void device_finish(Device *d) { __atomic_store_n(&d->done, 1, __ATOMIC_RELEASE); }
EXPORTED void device_fail(Device *d) { __atomic_store_n(&d->done, -1, __ATOMIC_RELEASE); }
EXPORTED int device_references(const Device *d) { return get(&d->references); }
EXPORTED int device_natives_deleted(const Device *d) { return get(&d->natives_deleted); }
EXPORTED int device_tensors_deleted(const Device *d) { return get(&d->tensors_deleted); }
EXPORTED int device_waits(const Device *d) { return get(&d->waits); }
EXPORTED void device_free(Device *d) { free(d); }       /* the test has read its counters */

/* ---- producing ---- */
static int wait_for(void *ctx, int64_t timeout_ns) {
    Device *d = ctx;
    struct timespec pause = {0, 200000};
    add(&d->waits, 1);
    for (;;) {
        int done = get(&d->done);
        if (done) return done > 0 ? INTEROP_NATIVE_WAIT_DONE : INTEROP_NATIVE_WAIT_FAILED;
        if (timeout_ns >= 0 && (timeout_ns -= pause.tv_nsec) < 0) return INTEROP_NATIVE_WAIT_TIMEOUT;
        nanosleep(&pause, NULL);
    }
}

static void delete_native(InteropNativeV1 *self) {
    Device *d = self->owner;
    memset(self, 0xDD, sizeof *self);
    free(self);
    add(&d->natives_deleted, 1);
    add(&d->references, -1);
}

static void native_gone(PyObject *capsule) {
    InteropNativeV1 *n;
    if (!PyCapsule_IsValid(capsule, INTEROP_NATIVE_NAME)) return;       /* somebody has taken it */
    n = PyCapsule_GetPointer(capsule, INTEROP_NATIVE_NAME);
    if (n->deleter) n->deleter(n);
}

EXPORTED PyObject *make_native(Device *d) {
    InteropNativeV1 *n = malloc(sizeof *n);
    if (!n) return PyErr_NoMemory();
    interop_native_init(n);
    n->owner = d;
    n->deleter = delete_native;
    n->device_type = 12; /* kDLExtDev */
    n->flags = INTEROP_NATIVE_DEDICATED | INTEROP_NATIVE_HAS_DEVICE_UUID;
    n->handle = handle_of(d);
    n->nbytes = d->nbytes;
    n->memory = 0xABC;
    n->memory_nbytes = d->nbytes + 4096;
    n->memory_offset = 256;
    n->memory_type = 3;
    n->queue_family = 1;
    n->context = 0xC0;
    memcpy(n->device_uuid, "0123456789abcdef", 16);
    if (!get(&d->done)) n->ready_kind = INTEROP_NATIVE_HOST_WAIT;
    n->wait = wait_for;
    n->wait_ctx = d;
    add(&d->references, 1);
    return PyCapsule_New(n, INTEROP_NATIVE_NAME, native_gone);
}

static void delete_tensor(Managed *m) {
    Device *d = m->manager_ctx;
    free(m);
    add(&d->tensors_deleted, 1);
    add(&d->references, -1);
}

static void tensor_gone(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        Managed *m = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        m->deleter(m);
    }
}

/* `elements` floats from `byte_offset` */
EXPORTED PyObject *make_dlpack(Device *d, int64_t elements, uint64_t byte_offset) {
    Managed *m = calloc(1, sizeof *m);
    if (!m) return PyErr_NoMemory();
    m->version.major = 1;
    m->manager_ctx = d;
    m->deleter = delete_tensor;
    m->dl_tensor.data = (void *)(uintptr_t)handle_of(d);
    m->dl_tensor.device.device_type = 12;
    m->dl_tensor.ndim = 1;
    m->dl_tensor.dtype.code = 2;
    m->dl_tensor.dtype.bits = 32;
    m->dl_tensor.dtype.lanes = 1;
    m->dl_tensor.shape = m->dims;
    m->dl_tensor.strides = m->dims + 1;
    m->dims[0] = elements;
    m->dims[1] = 1;
    m->dl_tensor.byte_offset = byte_offset;
    add(&d->references, 1);
    return PyCapsule_New(m, "dltensor_versioned", tensor_gone);
}

/* ---- consuming ---- */
typedef struct Seen {
    int32_t device_type, device_id, memory_type;
    uint32_t ready_kind, queue_family;
    uint64_t flags, handle, nbytes, memory, memory_nbytes, memory_offset, context, struct_size;
    int looked, waited;                 /* what wait returned: with timeout 0, then without end */
    uint8_t first, last;                /* bytes of the memory, where it has an address */
} Seen;

static void *delete_there(void *n) {
    ((InteropNativeV1 *)n)->deleter(n);
    return NULL;
}

/* Ask `x`, take the struct, look, wait, read, and call the deleter: without the GIL, on a thread that Python does not know if
 * `elsewhere`. Returns None, or NULL with an error. */
EXPORTED PyObject *consume_native(PyObject *x, Seen *seen, int elsewhere) {
    PyObject *method = PyObject_GetAttrString(x, "__interop_native__"), *arguments = NULL, *keywords = NULL, *capsule = NULL;
    InteropNativeV1 *n;
    if (method && (arguments = PyTuple_New(0)) && (keywords = Py_BuildValue("{s:(ii)}", "max_version", 1, 0)))
        capsule = PyObject_Call(method, arguments, keywords);
    Py_XDECREF(method);
    Py_XDECREF(arguments);
    Py_XDECREF(keywords);
    if (!capsule) return NULL;
    n = PyCapsule_GetPointer(capsule, INTEROP_NATIVE_NAME);
    if (!n || PyCapsule_SetName(capsule, INTEROP_NATIVE_USED_NAME)) {
        Py_DECREF(capsule);
        return NULL;
    }
    Py_DECREF(capsule);                 /* empty now: the struct is ours */
    if (!interop_native_readable(n)) {
        n->deleter(n);
        PyErr_SetString(PyExc_BufferError, "another version");
        return NULL;
    }
    seen->device_type = n->device_type;
    seen->device_id = n->device_id;
    seen->memory_type = n->memory_type;
    seen->queue_family = n->queue_family;
    seen->ready_kind = n->ready_kind;
    seen->flags = n->flags;
    seen->handle = n->handle;
    seen->nbytes = n->nbytes;
    seen->memory = n->memory;
    seen->memory_nbytes = n->memory_nbytes;
    seen->memory_offset = n->memory_offset;
    seen->context = n->context;
    seen->struct_size = n->struct_size;
    seen->looked = interop_native_wait(n, 0);
    Py_BEGIN_ALLOW_THREADS
    seen->waited = interop_native_wait(n, -1);
    if (n->flags & INTEROP_NATIVE_HANDLE_IS_POINTER && n->flags & INTEROP_NATIVE_HOST_VISIBLE && n->nbytes) {
        const uint8_t *bytes = (const uint8_t *)(uintptr_t)n->handle;
        seen->first = bytes[0];
        seen->last = bytes[n->nbytes - 1];
    }
    if (elsewhere) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, delete_there, n)) abort();
        pthread_join(thread, NULL);
    } else {
        n->deleter(n);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Call wait with an error pending and the GIL held: the error must still be there. Returns what wait returned; the error is raised. */
EXPORTED int wait_with_error(const InteropNativeV1 *n, int64_t timeout_ns) {
    int rc;
    PyErr_SetString(PyExc_LookupError, "pending");
    rc = n->wait(n->wait_ctx, timeout_ns);
    if (!PyErr_ExceptionMatches(PyExc_LookupError)) abort();
    PyErr_Clear();
    return rc;
}

/* ---- the layout, as this compiler sees it ---- */
EXPORTED const char *native_layout(void) {
    static char text[2048];
    size_t n = 0;
#define AT(field) n += (size_t)snprintf(text + n, sizeof text - n, #field "=%zu ", offsetof(InteropNativeV1, field))
    AT(version); AT(struct_size); AT(owner); AT(deleter); AT(device_type); AT(device_id); AT(flags); AT(handle); AT(nbytes);
    AT(memory); AT(memory_nbytes); AT(memory_offset); AT(memory_type); AT(queue_family); AT(context); AT(physical_device); AT(instance);
    AT(queue); AT(device_uuid); AT(driver_uuid); AT(ready_kind); AT(ready_padding); AT(ready_handle); AT(ready_value); AT(wait);
    AT(wait_ctx); AT(reserved);
    snprintf(text + n, sizeof text - n, "sizeof=%zu", sizeof(InteropNativeV1));
    return text;
}

/* Its constants, in the same form. */
EXPORTED const char *native_constants(void) {
    static char text[1024];
    size_t n = 0;
#define IS(name) n += (size_t)snprintf(text + n, sizeof text - n, #name "=%lld ", (long long)(INTEROP_NATIVE_##name))
    IS(READ_ONLY); IS(HOST_VISIBLE); IS(COHERENT); IS(CACHED); IS(DEDICATED); IS(HANDLE_IS_POINTER); IS(PARTIAL);
    IS(HAS_DEVICE_UUID); IS(HAS_DRIVER_UUID);
    IS(READY); IS(HOST_WAIT); IS(TIMELINE); IS(CL_EVENT); IS(CUDA_EVENT); IS(BY_STREAM);
    IS(WAIT_DONE); IS(WAIT_TIMEOUT); IS(WAIT_FAILED); IS(WAIT_INTERRUPTED); IS(MAJOR); IS(MINOR); IS(V1_SIZE);
    return text;
}
