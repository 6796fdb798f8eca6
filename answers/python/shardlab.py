"""Does a layout fit, and which layout is best: shardlab's C interface (shardlab.h) for Python.

    >>> import shardlab
    >>> shardlab.memory(model="llama-3.1-8b", machine="h100", devices=8, zero=3)["fits"]
    True
    >>> best = shardlab.search(model="llama-3.1-70b", machine="h100", devices=64, global_batch_tokens="4Mi")["layouts"][0]
    >>> best["tp"], best["pp"], best["predicted_step_s"]

Words are the flags of `shardlab memory` and `shardlab search` with underscores; other keys of a sweep file go in by their path:
memory(..., **{"model.layers": 40}). A question that shardlab refuses raises Refused, with what to change.

The library is the one that the environment variable SHARDLAB_LIBRARY names, else the one of the prefix that this file is installed in, else
the one that the loader finds.
"""

import ctypes
import ctypes.util
import glob
import json
import os

__all__ = ["Refused", "memory", "names", "search", "version"]


class Refused(Exception):
    """A question that was not answered. `status` is a value of shardlab.h, `hint` says what to do next."""

    def __init__(self, status, message, hint):
        super().__init__(f"{message}\n  {hint}" if hint else message)
        self.status, self.message, self.hint = status, message, hint


_YES, _NO = 0, 3


def _files():
    named = os.environ.get("SHARDLAB_LIBRARY")
    if named:
        return [named]
    prefix = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))  # PREFIX/lib/python3/dist-packages
    found = [file for folder in ("lib", "lib64", "lib/*-linux-gnu") for file in sorted(glob.glob(f"{prefix}/{folder}/libshardlab_c.so.0"))]
    return found or [ctypes.util.find_library("shardlab_c") or "libshardlab_c.so.0"]


def _load():
    library = ctypes.CDLL(_files()[0])
    library.shardlab_version.restype = ctypes.c_char_p
    for ask in (library.shardlab_memory, library.shardlab_search):
        ask.argtypes, ask.restype = [ctypes.c_char_p], ctypes.c_void_p
    library.shardlab_names.restype = ctypes.c_void_p
    library.shardlab_status.argtypes, library.shardlab_status.restype = [ctypes.c_void_p], ctypes.c_int
    library.shardlab_json.argtypes, library.shardlab_json.restype = [ctypes.c_void_p], ctypes.c_char_p
    library.shardlab_free.argtypes, library.shardlab_free.restype = [ctypes.c_void_p], None
    return library


_library = _load()


def _told(answer):
    try:
        status, told = _library.shardlab_status(answer), json.loads(_library.shardlab_json(answer).decode())
    finally:
        _library.shardlab_free(answer)
    if status not in (_YES, _NO):
        raise Refused(status, told["error"], told["hint"])
    return told


def memory(**question):
    """Bytes of each stage of one layout: the object of `shardlab memory --format json`, whose `fits` is the verdict."""
    return _told(_library.shardlab_memory(json.dumps(question).encode()))


def search(**question):
    """The best layouts: the object of `shardlab search --format json`. `layouts` is empty where none fits."""
    return _told(_library.shardlab_search(json.dumps(question).encode()))


def names():
    """Models, machines and profiles that questions may name, as lists by "models", "machines", "profiles"."""
    return _told(_library.shardlab_names())


def version():
    """The library's version, "0.1.0"."""
    return _library.shardlab_version().decode()
