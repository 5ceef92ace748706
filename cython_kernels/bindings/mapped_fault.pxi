# What ends a process when a file that it maps is cut short. Textually included by _native.pyx.


cdef extern from "memory/mapped_fault.h":
    enum:
        MAPPED_FAULT_MESSAGE_BYTES
    int pw_watch_mapping(const void *start, size_t n_bytes, const char *message)


def watch_mapping(size_t address, size_t n_bytes, str message):
    """End with exit code 70 and `message`, in one line on stderr, when memory of this mapping of a file cannot
    be read any more (SIGBUS): somebody cut the file short, or its disk failed. OSError without signals."""
    cdef bytes line = " ".join(message.split()).encode("utf-8", "replace")[:MAPPED_FAULT_MESSAGE_BYTES - 2] + b"\n"
    cdef int error = pw_watch_mapping(<const void *>address, n_bytes, line)
    if error:
        raise OSError(error, os.strerror(error))
