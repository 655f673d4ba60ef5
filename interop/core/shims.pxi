# What CPython offers to C alone, and the few lines of C that Cython cannot say.

cdef extern from *:
    """
    #include <stdlib.h>
    #if PY_VERSION_HEX >= 0x030D0000
    #define interop_finalizing() Py_IsFinalizing()
    #else
    #define interop_finalizing() _Py_IsFinalizing()
    #endif

    /* A static type's version tag is 0 until something looked an attribute up through it, and again when it was changed. */
    #define interop_type_tag(tp) ((tp)->tp_version_tag)

    static __thread int interop_foreign_thread = 0;    /* a deleter has brought the GIL to a thread that had none */

    /* Give a reference back from anywhere: any thread, with or without the GIL, with an error pending, after the end. */
    static void interop_drop(PyObject *o) {
        if (!o || !Py_IsInitialized() || interop_finalizing()) return;   /* leaks on purpose: nobody is left to free it */
        if (PyGILState_Check()) {
            PyObject *t, *v, *tb;
            PyErr_Fetch(&t, &v, &tb);
            Py_DECREF(o);
            PyErr_Restore(t, v, tb);
            return;
        }
        PyGILState_STATE s = PyGILState_Ensure();
        interop_foreign_thread++;
        Py_DECREF(o);
        interop_foreign_thread--;
        PyGILState_Release(s);
    }

    /* One word of a managed block: who may free it. 0: the deleter; 1: a call into a foreign importer is under way; 2: deleted since. */
    static int interop_cas(int *p, int from, int to) {
        return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }

    static void *interop_aligned_alloc(size_t alignment, size_t n) {
        void *p = NULL;
        return posix_memalign(&p, alignment, n ? n : 1) ? NULL : p;
    }

    /* The C function behind a getset or a METH_NOARGS method: calling it saves the attribute lookup and the bound method. */
    typedef PyObject *(*interop_unary)(PyObject *, void *);
    static interop_unary interop_c_getter(PyObject *descr, void **closure) {
        if (Py_IS_TYPE(descr, &PyGetSetDescr_Type)) {
            PyGetSetDef *d = ((PyGetSetDescrObject *)descr)->d_getset;
            *closure = d->closure;
            return (interop_unary)d->get;
        }
        if (Py_IS_TYPE(descr, &PyMethodDescr_Type)) {
            PyMethodDef *m = ((PyMethodDescrObject *)descr)->d_method;
            *closure = NULL;
            if (m->ml_flags == METH_NOARGS) return (interop_unary)(void (*)(void))m->ml_meth;
        }
        return NULL;
    }
    /* Reuse of Tensor objects: what PyObject_Init and the collector need, and nothing Cython's generated allocator adds. */
    #ifdef Py_GIL_DISABLED
    #define INTEROP_REUSE 0
    #else
    #define INTEROP_REUSE 64
    #endif
    static inline void interop_clear_weakrefs(PyObject *o) {
        PyObject **list = (PyObject **)((char *)o + Py_TYPE(o)->tp_weaklistoffset);
        if (*list) PyObject_ClearWeakRefs(o);
    }
    typedef int (*interop_visit)(PyObject *, void *);
    static inline void interop_set_slots(PyObject *type, int (*traverse)(PyObject *, interop_visit, void *),
                                         PyObject *(*make)(PyTypeObject *, PyObject *, PyObject *)) {
        if (traverse) ((PyTypeObject *)type)->tp_traverse = (traverseproc)traverse;
        ((PyTypeObject *)type)->tp_new = make;
    }
    static inline PyObject *interop_exporter(Py_buffer *view) { return view->obj; }
    static inline void interop_free_object(PyObject *o) { Py_TYPE(o)->tp_free(o); }
    static inline PyObject *interop_revive(PyObject *o, PyTypeObject *tp) { return PyObject_Init(o, tp); }
    static inline void interop_set_dealloc(PyObject *type, void (*f)(PyObject *)) { ((PyTypeObject *)type)->tp_dealloc = f; }

    /* log2 of a power of two. */
    static inline int interop_log2(int64_t n) { return __builtin_ctzll((unsigned long long)n); }

    static int interop_add_overflow(int64_t a, int64_t b, int64_t *out) { return __builtin_add_overflow(a, b, out); }
    static int interop_mul_overflow(int64_t a, int64_t b, int64_t *out) { return __builtin_mul_overflow(a, b, out); }
    """
    bint interop_finalizing() noexcept nogil
    unsigned int interop_type_tag(PyTypeObject*) noexcept nogil
    void interop_drop(PyObject*) noexcept nogil
    int interop_foreign_thread
    bint interop_cas(int*, int, int) noexcept nogil
    void* interop_aligned_alloc(size_t, size_t) noexcept nogil
    ctypedef object (*interop_unary)(PyObject*, void*)
    interop_unary interop_c_getter(PyObject*, void**)
    int INTEROP_REUSE
    ctypedef int (*visit_function "interop_visit")(PyObject*, void*) noexcept
    void interop_set_slots(object, int (*)(PyObject*, visit_function, void*) noexcept,
                           PyObject* (*)(PyTypeObject*, PyObject*, PyObject*) except NULL)
    PyObject* interop_exporter(Py_buffer*) noexcept
    void interop_clear_weakrefs(PyObject*) noexcept
    object interop_revive(PyObject*, PyTypeObject*)
    void interop_set_dealloc(object, void (*)(PyObject*) noexcept)
    int log2 "interop_log2"(int64_t) noexcept nogil
    bint add_overflow "interop_add_overflow"(int64_t, int64_t, int64_t*) noexcept nogil
    bint mul_overflow "interop_mul_overflow"(int64_t, int64_t, int64_t*) noexcept nogil

cdef extern from "Python.h":
    PyObject* _PyType_Lookup(PyTypeObject*, object)
    PyTypeObject* Py_TYPE(PyObject*) noexcept nogil
    # Declared as they behave on a capsule that is one: without errors, without references
    const char* capsule_name "PyCapsule_GetName"(PyObject*) noexcept
    void* capsule_pointer "PyCapsule_GetPointer"(PyObject*, const char*) noexcept
    PyObject* new_capsule "PyCapsule_New"(void*, const char*, void (*)(PyObject*) noexcept) noexcept
    void PyObject_GC_Track(PyObject*) noexcept
    void PyObject_GC_UnTrack(PyObject*) noexcept
    void PyType_FreeObject "interop_free_object"(PyObject*) noexcept
    bint PyLong_CheckExact(object) noexcept
    long PyLong_AsLongAndOverflow(object, int*) except? -1
    bint PyTuple_CheckExact(object) noexcept
    Py_ssize_t PyTuple_GET_SIZE(object) noexcept
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t) noexcept
    void PyErr_Fetch(PyObject**, PyObject**, PyObject**)
    void PyErr_Restore(PyObject*, PyObject*, PyObject*)
    PyObject* PyErr_Occurred() noexcept
    void PyErr_WriteUnraisable(object) noexcept
    PyObject* PyDict_GetItemWithError(object, object) except? NULL
    object PyObject_VectorcallMethod(object name, PyObject** args, size_t nargsf, PyObject* kwnames)

cdef extern from "numpy/arrayobject.h":
    PyTypeObject PyArray_Type
    ctypedef struct NpyArray "PyArrayObject":
        pass
    ctypedef struct NpyDescr "PyArray_Descr":
        char byteorder
        int type_num
    object PyArray_NewFromDescr(PyTypeObject*, NpyDescr* descr, int, cnp.npy_intp*, cnp.npy_intp*, void*, int, PyObject*)
    int PyArray_SetBaseObject(NpyArray*, PyObject*) except -1
    int NPY_ARRAY_WRITEABLE
    int NPY_ARRAY_ALIGNED
    int NPY_ARRAY_BEHAVED
    void* PyArray_DATA(NpyArray*) noexcept nogil
    int PyArray_NDIM(NpyArray*) noexcept nogil
    cnp.npy_intp* PyArray_DIMS(NpyArray*) noexcept nogil
    cnp.npy_intp* PyArray_STRIDES(NpyArray*) noexcept nogil
    int PyArray_FLAGS(NpyArray*) noexcept nogil
    NpyDescr* PyArray_DESCR(NpyArray*) noexcept nogil
    size_t PyDataType_ELSIZE(NpyDescr*) noexcept nogil
    bint PyArray_ISNBO(char) noexcept nogil
