# The loops that measure the machine's limits. Textually included by _native.pyx.


def limit_peak(str kind, uint64_t rounds):
    cdef const pw_limit_kernels *limits = &pw_active().limits
    cdef uint64_t (*loop)(uint64_t) noexcept nogil
    if kind == "f32":
        loop = limits.f32
    elif kind == "f16":
        loop = limits.f16
    elif kind == "bf16":
        loop = limits.bf16
    elif kind == "int8":
        loop = limits.int8
    else:
        raise ValueError(f"no peak is measured for {kind!r}")
    cdef uint64_t done
    with nogil:
        done = loop(rounds)
    return done


def limit_read(const uint8_t[::1] buffer):
    cdef uint64_t done = 0
    cdef size_t size = buffer.shape[0]
    if size:
        with nogil:
            done = pw_active().limits.read(&buffer[0], size)
    return done


def limit_read_pieces(const uint64_t[::1] buffer, size_t words, bint scattered):
    """Pieces of so many words, as many as the largest power of two that fits: in their order, or scattered.

    The bytes that were read, and the sum of all words.
    """
    cdef size_t n_pieces = 1, index, place, word, size = buffer.shape[0]
    cdef int half = 0
    cdef uint64_t total = 0
    if words == 0 or size < words:
        return 0, 0
    while 2 * n_pieces * words <= size:
        n_pieces *= 2
    while (<size_t>1 << (2 * half)) < n_pieces:
        half += 1
    cdef const uint64_t *first = &buffer[0]
    cdef const uint64_t *piece
    with nogil:
        for index in range(n_pieces):
            place = index
            if scattered:  # odd factors and shifts to the right are one-to-one among the pieces
                place = (place * <size_t>0x9E3779B97F4A7C15) & (n_pieces - 1)
                place ^= place >> half
                place = (place * <size_t>0xD1B54A32D192ED03) & (n_pieces - 1)
            piece = first + place * words
            for word in range(words):
                total += piece[word]
    return n_pieces * words * 8, total
