# cython: language_level=3, binding=False, embedsignature=True, boundscheck=False, wraparound=False, freethreading_compatible=False
"""The compiled core: Tensor, the reading and making of DLPack, and conversion between frameworks.

One extension from pieces, one noun each, in the order in which they need each other. It knows DLPack and memory; NumPy is the one
framework it names. Policy that is not on a hot path lives in the Python modules above and is called through names imported here.
"""
cimport cython
from cpython.buffer cimport (PyBuffer_Release, PyBUF_FORMAT, PyBUF_FULL_RO, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE,
                             PyBUF_C_CONTIGUOUS, PyBUF_F_CONTIGUOUS, PyBUF_ANY_CONTIGUOUS, PyObject_GetBuffer)
from cpython.object cimport PyObject, PyTypeObject
from cpython.pycapsule cimport (PyCapsule_CheckExact, PyCapsule_GetName, PyCapsule_GetPointer, PyCapsule_IsValid,
                                PyCapsule_New, PyCapsule_SetName)
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset, strcmp

cimport numpy as cnp

from .dlpack cimport *
from .native cimport *

import numpy as np

from . import device as _device_names
from . import dtypes as _dtypes
from .errors import ExchangeError

cnp.import_array()

include "core/shims.pxi"
include "core/values.pxi"
include "core/validate.pxi"
include "core/managed.pxi"
include "core/tensor.pxi"
include "core/retention.pxi"
include "core/ledger.pxi"
include "core/allocation.pxi"
include "core/lending.pxi"
include "core/npy.pxi"
include "core/host.pxi"
include "core/views.pxi"
include "core/types.pxi"
include "core/streams.pxi"
include "core/consume.pxi"
include "core/expose.pxi"
include "core/exchange.pxi"
include "core/convert.pxi"
include "core/crossing.pxi"
include "core/native.pxi"
