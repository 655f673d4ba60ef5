"""Build the compiled core. Everything declarative stands in pyproject.toml; extensions with include paths cannot."""

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

setup(
    ext_modules=[
        *cythonize(
            [
                Extension(
                    "interop._core",
                    ["interop/_core.pyx"],
                    include_dirs=[numpy.get_include()],
                    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"), ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION")],
                    depends=["interop/dlpack.pxd", "interop/native.pxd", *__import__("glob").glob("interop/core/*.pxi")],
                    extra_compile_args=["-O2", "-fno-strict-aliasing", "-fvisibility=hidden"],
                )
            ]
        ),
        # Plain C without headers of CUDA's: torch loads it by its path, and it loads the driver when torch allocates through it.
        Extension(
            "interop.adapters.cuda._vmm",
            ["interop/adapters/cuda/vmm.c"],
            libraries=["dl", "pthread"],
            extra_compile_args=["-O2", "-fvisibility=hidden"],
        ),
    ]
)
