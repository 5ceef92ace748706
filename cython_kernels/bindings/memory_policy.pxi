# On which NUMA nodes memory lies. Textually included by _native.pyx.

cdef extern from "memory/memory_policy.h" nogil:
    enum:
        PW_MOST_NODES
    int pw_prefer_nodes(const int32_t *nodes, int n_nodes)
    int pw_prefer_no_node()
    int pw_place_on_nodes(void *memory, size_t bytes, const int32_t *nodes, int n_nodes)
    int pw_pages_by_node(const void *memory, size_t bytes, int64_t *pages)
    void pw_huge_pages_within(void *memory, size_t bytes)
    int pw_own_page(void *memory)
    void pw_drop_mapped(void *memory, size_t bytes)


cdef int _list_nodes(nodes, int32_t *numbers) except -1:
    """As many as there are; a number that no node has stays one."""
    count = 0
    for number in nodes:
        if count == PW_MOST_NODES:
            raise ValueError(f"at most {count} nodes")
        numbers[count] = number if 0 <= number < PW_MOST_NODES else -1
        count += 1
    return count


def prefer_nodes(nodes):
    """Pages that this thread, and threads it starts from now on, touch first go to `nodes` by turns, or None: where they run.

    0 or an errno, as memory_policy.h says.
    """
    if nodes is None:
        return pw_prefer_no_node()
    cdef int32_t numbers[PW_MOST_NODES]
    return pw_prefer_nodes(numbers, _list_nodes(nodes, numbers))


def place_on_nodes(unsigned char[::1] memory not None, size_t begin, size_t end, nodes):
    """Pages of `memory[begin:end]` that do not exist yet go to `nodes` by turns. 0 or an errno."""
    cdef int32_t numbers[PW_MOST_NODES]
    if not begin <= end <= <size_t>memory.shape[0]:
        raise ValueError(f"bytes {begin} to {end} of {memory.shape[0]}")
    if begin == end:
        return 0
    return pw_place_on_nodes(&memory[begin], end - begin, numbers, _list_nodes(nodes, numbers))


cdef dict _bytes_by_node(const void *memory, size_t n_bytes):
    """As `bytes_by_node`."""
    cdef int64_t pages[PW_MOST_NODES]
    cdef int error
    memset(pages, 0, sizeof(pages))
    with nogil:
        error = pw_pages_by_node(memory, n_bytes, pages)
    page = os.sysconf("SC_PAGESIZE")
    return None if error else {node: pages[node] * page for node in range(PW_MOST_NODES) if pages[node]}


def bytes_by_node(const unsigned char[::1] memory not None, size_t begin, size_t end):
    """Bytes of the pages of `memory[begin:end]` that this process has touched, by node; pages partly covered count
    whole. None where the system does not tell."""
    if not begin <= end <= <size_t>memory.shape[0]:
        raise ValueError(f"bytes {begin} to {end} of {memory.shape[0]}")
    return {} if begin == end else _bytes_by_node(&memory[begin], end - begin)


def huge_pages_within(unsigned char[::1] memory not None):
    """Pages of it that do not exist yet may be huge ones, where the system gives them."""
    if memory.shape[0]:
        pw_huge_pages_within(&memory[0], memory.shape[0])


def own_page(unsigned char[::1] memory not None, size_t at):
    """The page of a shared mapping that holds this byte becomes this process's own, zeroed. 0 or an errno."""
    if at >= <size_t>memory.shape[0]:
        raise ValueError(f"byte {at} of {memory.shape[0]}")
    return pw_own_page(&memory[at])


def drop_mapped(size_t address, size_t n_bytes):
    """Give back the pages of a mapped file, which are read again where they are wanted."""
    pw_drop_mapped(<void *>address, n_bytes)
