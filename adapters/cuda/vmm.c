/* Exportable memory for torch: the two functions that torch.cuda.memory.CUDAPluggableAllocator looks up by name.
 *
 * Each allocation is one physical chunk (cuMemCreate, to be exported as a POSIX file descriptor) at one range of addresses. torch's caching
 * allocator stands in front and asks for segments. Called with or without the GIL, from any thread; touches no Python.
 * The driver is loaded when the first allocation asks for it, and its interface is declared here: there are no CUDA headers where this
 * is built.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

/* ---- the part of the CUDA driver API that is used ---- */
typedef int Result;                         /* CUresult; 0: success */
typedef unsigned long long Address;         /* CUdeviceptr */
typedef unsigned long long Chunk;           /* CUmemGenericAllocationHandle */
typedef struct { int type, id; } Location;
typedef struct {                            /* CUmemAllocationProp, 32 bytes */
    int type;
    int handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} Properties;
typedef struct { Location location; int flags; } Access;     /* CUmemAccessDesc */

enum { PINNED = 1, POSIX_FD = 1, ON_DEVICE = 1, READ_WRITE = 3, GRANULARITY_MINIMUM = 0, CAPTURE_RELAXED = 2,
       ERROR_CAPTURE_IMPLICIT = 906 };

static struct {
    Result (*init)(unsigned);
    Result (*device_get)(int *, int);
    Result (*retain_primary)(void **, int);
    Result (*push)(void *);
    Result (*pop)(void **);
    Result (*capture_mode)(int *);
    Result (*is_capturing)(void *, int *);
    Result (*synchronize)(void *);
    Result (*granularity)(size_t *, const Properties *, int);
    Result (*create)(Chunk *, size_t, const Properties *, unsigned long long);
    Result (*release)(Chunk);
    Result (*reserve)(Address *, size_t, size_t, Address, unsigned long long);
    Result (*unreserve)(Address, size_t);
    Result (*map)(Address, size_t, size_t, Chunk, unsigned long long);
    Result (*unmap)(Address, size_t);
    Result (*set_access)(Address, size_t, const Access *, size_t);
} cu;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pid_t owner;                         /* the process that loaded the driver; 0: nobody could */

static int find(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return;
    if (find(library, "cuInit", &cu.init) && find(library, "cuDeviceGet", &cu.device_get)
        && find(library, "cuDevicePrimaryCtxRetain", &cu.retain_primary)
        && find(library, "cuCtxPushCurrent_v2", &cu.push) && find(library, "cuCtxPopCurrent_v2", &cu.pop)
        && find(library, "cuThreadExchangeStreamCaptureMode", &cu.capture_mode)
        && find(library, "cuStreamIsCapturing", &cu.is_capturing) && find(library, "cuStreamSynchronize", &cu.synchronize)
        && find(library, "cuMemGetAllocationGranularity", &cu.granularity)
        && find(library, "cuMemCreate", &cu.create) && find(library, "cuMemRelease", &cu.release)
        && find(library, "cuMemAddressReserve", &cu.reserve) && find(library, "cuMemAddressFree", &cu.unreserve)
        && find(library, "cuMemMap", &cu.map) && find(library, "cuMemUnmap", &cu.unmap)
        && find(library, "cuMemSetAccess", &cu.set_access) && cu.init(0) == 0)
        owner = getpid();
}

/* Whether the driver may be called: loaded, and by this process. A forked child owns no driver object. */
static int usable(void)
{
    pthread_once(&once, load);
    return owner != 0 && owner == getpid();
}

/* ---- contexts ---- */
enum { MAX_DEVICES = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;     /* guards what is below */
static void *contexts[MAX_DEVICES];

/* The primary context, retained once and kept: torch's, and what it freed last may come after torch. */
static void *primary(int device)
{
    int handle;
    void *context = NULL;
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    pthread_mutex_lock(&lock);
    if (contexts[device] == NULL && cu.device_get(&handle, device) == 0 && cu.retain_primary(&context, handle) == 0)
        contexts[device] = context;
    context = contexts[device];
    pthread_mutex_unlock(&lock);
    return context;
}

/* ---- sizes by address ---- */
typedef struct Block { Address address; size_t size; struct Block *next; } Block;
enum { BUCKETS = 1024 };
static Block *blocks[BUCKETS];

static Block **bucket(Address address)
{
    return &blocks[(address >> 21) % BUCKETS];
}

static void remember(Block *block)
{
    pthread_mutex_lock(&lock);
    block->next = *bucket(block->address);
    *bucket(block->address) = block;
    pthread_mutex_unlock(&lock);
}

static Block *forget(Address address)
{
    Block **at, *found;
    pthread_mutex_lock(&lock);
    for (at = bucket(address); *at != NULL && (*at)->address != address; at = &(*at)->next)
        ;
    found = *at;
    if (found != NULL)
        *at = found->next;
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- chunks ---- */
static int map(Block *block, int device, size_t size)
{
    Properties wanted = {.type = PINNED, .handle_types = POSIX_FD, .location = {ON_DEVICE, device}};
    Access access = {.location = {ON_DEVICE, device}, .flags = READ_WRITE};
    Chunk chunk;
    size_t step;
    if (cu.granularity(&step, &wanted, GRANULARITY_MINIMUM) != 0 || step == 0 || size > SIZE_MAX - step)
        return 0;
    block->size = (size + step - 1) / step * step;
    if (cu.create(&chunk, block->size, &wanted, 0) != 0)
        return 0;
    if (cu.reserve(&block->address, block->size, step, 0, 0) == 0) {
        if (cu.map(block->address, block->size, 0, chunk, 0) == 0) {
            if (cu.set_access(block->address, block->size, &access, 1) == 0) {
                cu.release(chunk);          /* the mapping keeps the memory */
                return 1;
            }
            cu.unmap(block->address, block->size);
        }
        cu.unreserve(block->address, block->size);
    }
    cu.release(chunk);
    return 0;
}

static void unmap(const Block *block, void *stream)
{
    int capturing = 0;
    /* What torch queued on the segment's stream may still use it. A stream that is captured, or the legacy one while another is, cannot be
     * waited for: then the memory stays, since to take it from under a kernel is the end of the context. torch frees nothing in a capture. */
    if (cu.is_capturing(stream, &capturing) == ERROR_CAPTURE_IMPLICIT || capturing != 0)
        return;
    cu.synchronize(stream);
    cu.unmap(block->address, block->size);
    cu.unreserve(block->address, block->size);
}

/* So many bytes on a device, or NULL: torch then empties its caches and asks again, and says that memory is out. */
EXPORTED void *interop_cuda_alloc(ptrdiff_t size, int device, void *stream)
{
    Block *block;
    void *context, *popped;
    int mode = CAPTURE_RELAXED, made = 0;
    (void)stream;
    if (size <= 0 || !usable() || (context = primary(device)) == NULL || (block = malloc(sizeof *block)) == NULL)
        return NULL;
    if (cu.push(context) == 0) {
        cu.capture_mode(&mode);             /* another thread may be capturing a graph */
        made = map(block, device, (size_t)size);
        cu.capture_mode(&mode);
        cu.pop(&popped);
    }
    if (!made) {
        free(block);
        return NULL;
    }
    remember(block);
    return (void *)(uintptr_t)block->address;
}

/* Give it back, once what `stream` has been given is done. What is not ours, or a forked child's, stays as it is. */
EXPORTED void interop_cuda_free(void *ptr, ptrdiff_t size, int device, void *stream)
{
    Block *block;
    void *context, *popped;
    int mode = CAPTURE_RELAXED;
    (void)size;
    if (ptr == NULL || !usable() || (context = primary(device)) == NULL || (block = forget((Address)(uintptr_t)ptr)) == NULL)
        return;
    if (cu.push(context) == 0) {
        cu.capture_mode(&mode);
        unmap(block, stream);
        cu.capture_mode(&mode);
        cu.pop(&popped);
    }
    free(block);
}

/* ---- a module, so that it is built and found like one ---- */
static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_vmm",
    .m_doc = "Nothing for Python: __file__ is the library that torch's CUDAPluggableAllocator loads.",
    .m_slots = slots,
};

EXPORTED PyMODINIT_FUNC PyInit__vmm(void);

PyMODINIT_FUNC PyInit__vmm(void)
{
    return PyModuleDef_Init(&module);
}
