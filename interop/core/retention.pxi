# What is released later or elsewhere: the fork counter, the queue of retired references, releases that wait for queued work.

# ---- fork ----
cdef extern from *:
    """
    #include <pthread.h>
    #include <unistd.h>
    static unsigned int interop_generation = 0;        /* counts forks seen from inside: the child owns no driver object */
    static int interop_n_entries = 0;                  /* of the ledger: leases and Points of the parent do not bind the child */
    static int interop_wake_fd = -1;                   /* an eventfd that the thread which releases waits at */
    static void interop_forked(void) { interop_generation++; interop_n_entries = 0; interop_wake_fd = -1; }
    static void interop_watch_fork(void) { pthread_atfork(NULL, NULL, interop_forked); }

    /* Objects that cannot be released where they are: pushed from any thread, with or without the GIL, never blocking. */
    typedef struct interop_node { struct interop_node *next; PyObject *object; } interop_node;
    static interop_node *interop_retired = NULL;
    static int (*interop_drain_call)(void *) = NULL;     /* set below */
    static void interop_retire(PyObject *o) {
        interop_node *n = (interop_node *)malloc(sizeof *n);
        if (!n) return;                                  /* leaks one reference rather than run code here */
        n->object = o;
        n->next = __atomic_load_n(&interop_retired, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(&interop_retired, &n->next, n, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {}
        if (interop_wake_fd >= 0) {
            uint64_t one = 1;
            if (write(interop_wake_fd, &one, sizeof one) == sizeof one) return;
        }
        if (interop_drain_call && Py_IsInitialized() && !interop_finalizing()) Py_AddPendingCall(interop_drain_call, NULL);
    }
    static void interop_retire_second(void *of, PyObject *o) { (void)of; interop_retire(o); }
    static interop_node *interop_take_retired(void) { return __atomic_exchange_n(&interop_retired, NULL, __ATOMIC_ACQUIRE); }
    """
    unsigned int interop_generation
    int interop_wake_fd
    int _n_entries "interop_n_entries"
    int (*interop_drain_call)(void*) noexcept
    void interop_watch_fork()
    ctypedef struct interop_node:
        interop_node* next
        PyObject* object
    void interop_retire(PyObject*) noexcept nogil
    void interop_retire_second(void*, PyObject*) noexcept nogil
    interop_node* interop_take_retired() noexcept nogil

interop_watch_fork()


cdef int drain_call(void* unused) noexcept:
    # A pending call of the interpreter, on its main thread.
    try:
        drain()
    except BaseException as e:
        _report(e)
    return 0


def report(e):
    """Show an error that nobody can be given, as Python shows those of finalizers."""
    _report(e)


cdef _report(e):
    cdef PyObject* a = NULL
    cdef PyObject* b = NULL
    cdef PyObject* c = NULL
    kind = type(e)
    trace = e.__traceback__
    PyErr_Fetch(&a, &b, &c)
    Py_INCREF(kind)
    Py_INCREF(e)
    if trace is not None:
        Py_INCREF(trace)
    PyErr_Restore(<PyObject*>kind, <PyObject*>e, <PyObject*>trace if trace is not None else NULL)
    PyErr_WriteUnraisable("interop, while releasing")
    PyErr_Restore(a, b, c)


interop_drain_call = drain_call


def drain():
    """Give back what was retired from threads that could not. Returns how many references."""
    cdef interop_node* n = interop_take_retired()
    cdef interop_node* next
    cdef int count = 0
    while n != NULL:
        next = n.next
        Py_DECREF(<object>n.object)
        free(n)
        n = next
        count += 1
    return count


_start_releasing = None          # shutdown.start_releasing: a thread that waits at an eventfd and drains


def set_release_thread(start):
    """`start()` returns the eventfd; called once, when memory first has something to tell its owner."""
    global _start_releasing
    _start_releasing = start


def retire_address(int argument=0):
    """Address of ``void retire(PyObject *)``: takes over one reference, from any thread, without the GIL. For drivers' callbacks.

    `argument` 1: of ``void retire(void *, PyObject *)``, for callbacks that say first what they are about.
    """
    return <uintptr_t>&interop_retire_second if argument else <uintptr_t>&interop_retire


def generation():
    """How many forks this process is away from the one that imported interop."""
    return interop_generation


cdef begin_releasing():
    global interop_wake_fd
    interop_wake_fd = _start_releasing()


cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() nogil      # in C: at the end of the process the names of a module are gone

cdef list _releasing = []        # (Context, thread) of the releases that run now


cdef release_allocation(Allocation a):
    """Once: imports first, then the owner is told, then let go. What is still used by queued work waits for it."""
    if a.closed:
        return
    a.closed = True
    if a.context is None or interop_finalizing():
        give_back(a)
        return
    mark = a.context, PyThread_get_thread_ident()
    _releasing.append(mark)
    try:
        give_back(a)
    finally:
        _releasing.remove(mark)


cdef give_back(Allocation a):
    cdef object release
    if interop_finalizing() or (a.generation != interop_generation
                                and (a.dies_at_fork or a.adapter is not None or a.on_release is not None)):
        # the parent's, whose second release this would be; or too late for anybody's driver: leaks on purpose
        if a.owner is not None:
            Py_INCREF(a.owner)
        if a.context is not None:
            Py_INCREF(a.context)
        return
    if a.lender is not None:
        a.lender.lent -= 1
        a.lender = None
    pending = []
    for id, _, p in ledger_find(*a.span(), READ_POINT | WRITE_POINT):
        if not is_over(p):
            pending.append(p)
        elif not a.foreign and not a.imported:
            ledger_remove(id)    # the bytes that it speaks of are gone
    key = (a.dl.device_type, a.dl.device_id, a.value)
    if a.owns_space and not pending:
        from_space(a.space)
    if key in _handles and not any([other is not a and not other.is_closed for other in list(_handles[key])]):
        _handles.pop(key, None)
    imports = list(a.imports.values())
    a.imports.clear()
    release = a.on_release
    a.on_release = None
    work = _Release(imports, release, a.owner, a.context, pending)
    a.owner = None
    if pending:
        if a.owns_space:
            work.handle, work.place = (key, a.adapter), (a.space, a.origin)
        _later.append(work)
        for p in pending:        # whichever is last runs it; a look at the others costs little
            p.add_done_callback(_release_later)
    elif interop_foreign_thread:
        # a thread that Python does not know: no callback of the user's runs here
        Py_INCREF(work)
        interop_retire(<PyObject*>work)
    else:
        work.run()


class _Release:
    """What has to happen when memory goes: in order, exactly once, never raising into whoever dropped the last reference."""
    __slots__ = ("imports", "callback", "owner", "context", "points", "done", "generation", "handle", "place")

    def __init__(self, imports, callback, owner, context, points):
        self.imports, self.callback, self.owner, self.context, self.points, self.done = imports, callback, owner, context, points, False
        self.generation = interop_generation
        self.handle = self.place = None      # whose space it was: who wraps the handle again meanwhile comes after the same Points

    def ready(self):
        return all([is_over(p) for p in self.points])

    def run(self):
        if self.done:
            return
        if self.generation != interop_generation:
            self.done = True     # in a forked child: the parent runs it
            Py_INCREF(self)      # and nothing that it holds is finalized here
            return
        self.done = True
        mark = self.context, PyThread_get_thread_ident()
        _releasing.append(mark)
        try:
            self.give_back()
        finally:
            _releasing.remove(mark)

    def give_back(self):
        for i in reversed(self.imports):
            try:
                i.close()
            except BaseException as e:
                _report(e)
        self.imports = ()
        if self.callback is not None:
            try:
                self.callback()
            except BaseException as e:
                _report(e)
        self.callback = self.owner = self.context = None
        for point in self.points:
            ledger_strike(point, None)
        self.points = ()

    def __del__(self):
        self.run()


cdef list _later = []            # releases that wait for queued work


def _release_later(point):
    release_ready()


def waiting_in(context):
    """How many releases of a Context wait for queued work."""
    return len([w for w in _later if w.context is context])


def releasing_in(context):
    """How many releases of a Context other threads are in the midst of."""
    me = PyThread_get_thread_ident()
    return len([None for of, thread in list(_releasing) if of is context and thread != me])


def release_ready():
    """Run the releases whose work has finished; how many still wait."""
    for w in list(_later):       # whoever is first to take one off runs it; asking runs Python, so others may be at it too
        if w.generation != interop_generation:
            take_off(w)          # the parent's: neither asked nor run here
        elif w.ready() and take_off(w):
            w.run()
    return len(_later)


cdef bint take_off(w):
    cdef int i
    for i in range(len(_later)):
        if _later[i] is w:
            del _later[i]
            return True
    return False


cdef bint is_over(point):
    # One that cannot be asked any more never will be: nobody waits for it
    try:
        return point.done()
    except BaseException as e:
        _report(e)
        return True
