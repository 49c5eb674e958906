"""Reads a file through blkmq, one block at a time and with 16 reads in flight: read_a_file.py [PATH]

BLKMQ_LIBRARY names the library, libblkmq.so by default. Without a path it makes a file of its own.
"""

import ctypes
import json
import os
import sys
import tempfile
from ctypes import byref, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

BLOCK = 4096
DEPTH = 16
OP_READ = 0


class Io(ctypes.Structure):
    _fields_ = [
        ("op", c_uint32),
        ("flags", c_uint32),
        ("offset", c_uint64),
        ("len", c_uint64),
        ("data", c_void_p),
        ("user", c_void_p),
    ]


class Completion(ctypes.Structure):
    _fields_ = [("user", c_void_p), ("code", c_int32)]


def load():
    """The library, with the types of what is used here."""
    library = ctypes.CDLL(os.environ.get("BLKMQ_LIBRARY", "libblkmq.so"))
    for name, result, *arguments in [
        ("blkmq_error", c_char_p),
        ("blkmq_engine_open", c_int32, c_char_p, c_uint32, c_void_p),
        ("blkmq_engine_statistics", c_int64, c_void_p, c_char_p, c_size_t),
        ("blkmq_engine_close", c_int32, c_void_p, c_uint64),
        ("blkmq_disk_open", c_int32, c_void_p, c_char_p, c_char_p, c_void_p),
        ("blkmq_disk_size", c_uint64, c_void_p),
        ("blkmq_disk_run", c_int32, c_void_p, c_void_p),
        ("blkmq_disk_close", None, c_void_p),
        ("blkmq_queue_open", c_int32, c_void_p, c_void_p),
        ("blkmq_queue_submit", c_int32, c_void_p, c_void_p, c_void_p),
        ("blkmq_queue_wait", c_int32, c_void_p, c_void_p, c_uint32, c_int64),
        ("blkmq_queue_close", c_int32, c_void_p),
    ]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


blkmq = load()


def check(code):
    """Raises the library's text if a call has failed."""
    if code < 0:
        raise OSError(blkmq.blkmq_error().decode())
    return code


def read_all(queue, disk, size):
    """Reads all whole blocks with DEPTH reads in flight; returns how many bytes."""
    memory = [(c_char * BLOCK)() for _ in range(DEPTH)]
    offsets = iter(range(0, size - size % BLOCK, BLOCK))
    ended = (Completion * DEPTH)()
    free, under_way, count = list(range(DEPTH)), 0, 0
    while True:
        while free and (offset := next(offsets, None)) is not None:
            slot = free.pop()
            # `user` comes back with the end; ctypes reads 0 as None.
            io = Io(OP_READ, 0, offset, BLOCK, ctypes.addressof(memory[slot]), slot)
            check(blkmq.blkmq_queue_submit(queue, disk, byref(io)))
            under_way += 1
        if not under_way:
            return count
        for n in range(check(blkmq.blkmq_queue_wait(queue, ended, DEPTH, -1))):
            check(ended[n].code)
            free.append(ended[n].user or 0)
            under_way, count = under_way - 1, count + BLOCK


def read(path):
    engine, disk, queue = c_void_p(), c_void_p(), c_void_p()
    config = f"[disk.image]\nfile = {json.dumps(path)}\nread_only = true\n"
    check(blkmq.blkmq_engine_open(config.encode(), 0, byref(engine)))
    check(blkmq.blkmq_disk_open(engine, b"image", None, byref(disk)))
    check(blkmq.blkmq_queue_open(engine, byref(queue)))

    block = ctypes.create_string_buffer(BLOCK)
    io = Io(OP_READ, 0, 0, BLOCK, ctypes.addressof(block), None)
    check(blkmq.blkmq_disk_run(disk, byref(io)))
    print(f"the first block begins with {block.raw[:8]!r}")

    size = blkmq.blkmq_disk_size(disk)
    print(f"{DEPTH} in flight: {read_all(queue, disk, size)} bytes of {size}")

    text = ctypes.create_string_buffer(4096)
    check(blkmq.blkmq_engine_statistics(engine, text, len(text)))
    print(json.loads(text.value)["groups"]["/image"]["read"])
    blkmq.blkmq_disk_close(disk)
    check(blkmq.blkmq_queue_close(queue))
    check(blkmq.blkmq_engine_close(engine, 10_000))


if len(sys.argv) > 1:
    read(sys.argv[1])
else:
    with tempfile.NamedTemporaryFile() as made:
        made.write(b"contents" * 8192)
        made.flush()
        read(made.name)
