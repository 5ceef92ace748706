# On which NUMA node memory lies. Textually included by _native.pyx.

cdef extern from "memory/memory_policy.h" nogil:
    int pw_prefer_node(int node)
    int pw_prefer_no_node()
    int pw_place_on_node(void *memory, size_t bytes, int node)


def prefer_node(node):
    """Pages that this thread, and threads it starts from now on, touch first go to `node`, or None: where they run.

    0 or an errno, as memory_policy.h says.
    """
    return pw_prefer_no_node() if node is None else pw_prefer_node(node)


def place_on_node(unsigned char[::1] memory not None, size_t begin, size_t end, int node):
    """Pages of `memory[begin:end]` that do not exist yet go to `node`. 0 or an errno."""
    if not begin <= end <= <size_t>memory.shape[0]:
        raise ValueError(f"bytes {begin} to {end} of {memory.shape[0]}")
    return 0 if begin == end else pw_place_on_node(&memory[begin], end - begin, node)
