# Thread teams, the row operations one by one (for tests and samplers). Textually included by _native.pyx.

from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.string cimport memcpy, memset

from phasewise.cython_kernels.errors import GroupFailed, ProgramError, TeamError


cdef extern from "team/team.h" nogil:
    ctypedef struct pw_team:
        pass

    enum:
        PW_TEAM_OK, PW_TEAM_FORKED, PW_TEAM_NO_MEMORY

    ctypedef struct pw_place:
        int l3, node

    pw_team *pw_team_open(int n_members, const int *cpus, const pw_place *places, int idle_spin_us, char *message,
                          size_t message_bytes)
    int pw_team_crossings(const pw_team *team)
    unsigned pw_team_passed(const pw_team *team)
    int pw_team_run(pw_team *team, void (*task)(void *, int) noexcept nogil, void *context)
    void pw_team_barrier(pw_team *team, int member)
    int pw_team_size(const pw_team *team)
    void pw_team_observed(const pw_team *team, int *cpus)
    long pw_team_misplaced(const pw_team *team)
    int pw_team_weigh(pw_team *team, const int *streaming, const int *computing)
    void pw_team_rest(pw_team *team)
    void pw_team_close(pw_team *team)


cdef const pw_op_kernels *_ops() noexcept nogil:
    return &pw_active().ops


def lanes():
    """Floats in a vector of the active instruction set."""
    return _ops().lanes


# ---- teams --------------------------------------------------------------------------------------------------------

cdef dict TEAM_FAILURES = {
    PW_TEAM_FORKED: "a thread team does not survive fork(): open one in the child",
    PW_TEAM_NO_MEMORY: "no memory",
}


MOST_WEIGHT = 1_000_000


cdef int _check_team(int status) except -1:
    if status != PW_TEAM_OK:
        raise TeamError(TEAM_FAILURES[status])
    return 0


cdef struct BarrierCount:
    pw_team *team
    long rounds
    int64_t *seen


cdef void _count_barriers(void *context, int member) noexcept nogil:
    """Each member counts its rounds where all can see; after every barrier all counts must be equal."""
    cdef BarrierCount *work = <BarrierCount *>context
    cdef int size = pw_team_size(work.team)
    cdef int64_t *own = work.seen + 8 * member
    cdef long i
    cdef int other
    for i in range(work.rounds):
        own[0] += 1
        pw_team_barrier(work.team, member)
        for other in range(size):
            if work.seen[8 * other] != own[0]:
                own[1] += 1
        pw_team_barrier(work.team, member)


cdef class Team:
    """Threads pinned one per core; the caller of a run is member 0. See team.h.

    cpus: distinct CPU numbers; or None and `members` threads that the kernel may move (for tests). places: the L3
    and NUMA node of each member, by which they meet; None: as the system says of the CPUs.
    """

    cdef pw_team *team
    cdef readonly object cpus
    cdef readonly int size

    def __cinit__(self, cpus, int members=0, int idle_spin_us=200, places=None):
        cdef char message[256]
        cdef int *wanted = NULL
        cdef pw_place *told = NULL
        self.cpus = None if cpus is None else tuple(cpus)
        self.size = members if cpus is None else len(self.cpus)
        if cpus is not None:
            wanted = <int *>PyMem_Malloc(sizeof(int) * max(self.size, 1))
            if wanted == NULL:
                raise MemoryError
            for i, cpu in enumerate(self.cpus):
                wanted[i] = cpu if 0 <= cpu < 1 << 30 else -1
        if places is not None:
            if len(places) != self.size:
                PyMem_Free(wanted)
                raise ValueError(f"{len(places)} places for {self.size} members")
            told = <pw_place *>PyMem_Malloc(sizeof(pw_place) * max(self.size, 1))
            if told == NULL:
                PyMem_Free(wanted)
                raise MemoryError
            for i, (l3, node) in enumerate(places):
                told[i].l3, told[i].node = l3, node
        self.team = pw_team_open(self.size, wanted, told, idle_spin_us, message, sizeof(message))
        PyMem_Free(wanted)
        PyMem_Free(told)
        if self.team == NULL:
            raise TeamError(message.decode())

    def observed_cpus(self):
        """The CPU on which each member was last seen working; -1 before its first task."""
        cdef int *seen = <int *>PyMem_Malloc(sizeof(int) * self.size)
        if seen == NULL:
            raise MemoryError
        try:
            pw_team_observed(self._open(), seen)
            return tuple(seen[i] for i in range(self.size))
        finally:
            PyMem_Free(seen)

    @property
    def crossings(self):
        """How many arrivals of one barrier may find its counter in another NUMA node's caches."""
        return pw_team_crossings(self._open())

    @property
    def passed(self):
        """Barriers that the team has passed, modulo 2^32."""
        return pw_team_passed(self._open())

    def misplaced(self):
        """How often a member was seen on another core than its own."""
        return pw_team_misplaced(self._open())

    def weigh(self, streaming, computing):
        """Members have so much of a product, in proportion: of one that memory limits, and of others.

        Numbers from 1 to 1,000,000 for each member. No result depends on them. While nothing runs.
        """
        cdef pw_team *team = self._open()
        cdef int *weights = <int *>PyMem_Malloc(2 * sizeof(int) * self.size)
        cdef int status, i
        if weights == NULL:
            raise MemoryError
        try:
            for begin, numbers in ((0, tuple(streaming)), (self.size, tuple(computing))):
                if len(numbers) != self.size or not all(1 <= number <= MOST_WEIGHT for number in numbers):
                    raise ValueError(f"{self.size} weights from 1 to {MOST_WEIGHT} are needed, not {numbers}")
                for i in range(self.size):
                    weights[<int>begin + i] = numbers[i]
            status = pw_team_weigh(team, weights, weights + self.size)
        finally:
            PyMem_Free(weights)
        _check_team(status)

    def rest(self):
        """Members stop spinning at once, because another team is about to use their cores."""
        pw_team_rest(self._open())

    def barriers(self, long rounds):
        """Passes 2 * rounds barriers and returns how often a member saw another lag behind: 0."""
        counts = np.zeros((self.size, 8), dtype=np.int64)
        cdef int64_t[:, ::1] seen = counts
        cdef BarrierCount work
        cdef int status
        work.team, work.rounds, work.seen = self._open(), rounds, &seen[0, 0]
        with nogil:
            status = pw_team_run(work.team, _count_barriers, &work)
        _check_team(status)
        return int(counts[:, 1].sum())

    def close(self):
        """Ends the threads and gives the calling thread its affinity back. Closing twice is harmless."""
        cdef pw_team *team = self.team
        self.team = NULL
        with nogil:
            pw_team_close(team)

    cdef pw_team *_open(self) except NULL:
        if self.team == NULL:
            raise TeamError("this thread team has been closed")
        return self.team

    def __dealloc__(self):
        pw_team_close(self.team)


# ---- rows ---------------------------------------------------------------------------------------------------------

def rmsnorm(const float[::1] x, const float[::1] weight, float eps):
    """x * weight / sqrt(mean(x^2) + eps), float32 [n]."""
    if x.shape[0] < 1 or weight.shape[0] != x.shape[0]:
        raise ValueError(f"a row of {x.shape[0]} and a weight of {weight.shape[0]}")
    out = np.empty(x.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    _ops().rmsnorm(x.shape[0], &x[0], &weight[0], eps, &y[0])
    return out


cdef _bias_of(bias, int64_t n):
    """As an array; zeros, which are not read, where there is none."""
    return np.zeros(n, np.float32) if bias is None else np.ascontiguousarray(bias, np.float32)


def layernorm(const float[::1] x, bias, const float[::1] weight, const float[::1] norm_bias, float eps):
    """(t - mean(t)) / sqrt(var(t) + eps) * weight + norm_bias of t = x + bias, float32 [n]; bias may be None."""
    n = x.shape[0]
    cdef const float[::1] added = _bias_of(bias, n)
    if n < 1 or weight.shape[0] != n or norm_bias.shape[0] != n or added.shape[0] != n:
        raise ValueError(
            f"a row of {n}, a weight of {weight.shape[0]} and biases of {norm_bias.shape[0]}, {added.shape[0]}")
    out = np.empty(n, dtype=np.float32)
    cdef float[::1] y = out
    cdef pw_norm norm = pw_norm(&weight[0], &norm_bias[0], eps)
    cdef const float *first = NULL
    if bias is not None:
        first = &added[0]
    _ops().layernorm(n, &x[0], first, &norm, &y[0])
    return out


def activated(str activation, const float[::1] x, bias=None):
    """act(x + bias) by an activation of ACTIVATIONS, float32 [n]; of xielu `bias` are the layer's numbers."""
    n, length = x.shape[0], PW_XIELU_NUMBERS if activation == "xielu" else x.shape[0]
    cdef const float[::1] added = _bias_of(bias, length)
    if n < 1 or added.shape[0] != length or (bias is None and activation == "xielu"):
        raise ValueError(f"a row of {n} and a bias of {added.shape[0]}")
    out = np.empty(n, dtype=np.float32)
    cdef float[::1] y = out
    cdef const float *first = NULL
    if bias is not None:
        first = &added[0]
    _ops().activations[<int>ACTIVATIONS[activation]](n, &x[0], first, &y[0])
    return out


def rope(const float[::1] x, const float[::1] cosine, const float[::1] sine, float factor=1.0):
    """The pairs (x[i], x[half + i]) turned by the angles given, times `factor`: float32 [2 * half]."""
    if cosine.shape[0] < 1 or sine.shape[0] != cosine.shape[0] or x.shape[0] != 2 * cosine.shape[0]:
        raise ValueError(f"a head of {x.shape[0]} and {cosine.shape[0]} angles")
    out = np.empty(x.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    cdef pw_turn turn = pw_turn(&cosine[0], &sine[0], factor)
    _ops().rope(cosine.shape[0], &turn, &x[0], &y[0])
    return out


def gated(str activation, const float[::1] gate, const float[::1] up):
    """What a feed-forward layer makes of gate and up by an activation of GATES, float32 [n]."""
    if gate.shape[0] < 1 or up.shape[0] != gate.shape[0]:
        raise ValueError(f"a gate of {gate.shape[0]} and {up.shape[0]} values")
    out = np.empty(gate.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    _ops().gates[<int>GATES[activation]](gate.shape[0], &gate[0], &up[0], &y[0])
    return out


def capped(const float[::1] x, float c):
    """c tanh(x / c), float32 [n]."""
    out = np.empty(x.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    if x.shape[0]:
        _ops().cap(x.shape[0], c, &x[0], &y[0])
    return out


def exponential(const float[::1] x, out=None):
    """exp(x) as the kernels compute it, float32 [n], in `out` where it is given, which may be x; 0 below -87.68."""
    if out is None:
        out = np.empty(x.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    if y.shape[0] != x.shape[0]:
        raise ValueError(f"{x.shape[0]} exponentials in a row of {y.shape[0]}")
    if x.shape[0]:
        _ops().exponential(x.shape[0], &x[0], &y[0])
    return out


def softmax(const float[::1] x):
    """exp(x - max) / sum, float32 [n]."""
    if x.shape[0] < 1:
        raise ValueError("softmax of an empty row")
    out = np.empty(x.shape[0], dtype=np.float32)
    cdef float[::1] y = out
    with nogil:
        _ops().softmax(x.shape[0], &x[0], &y[0])
    return out


def argmax(const float[::1] x):
    """Index of the first NaN if there is one, else of the largest, the lowest of equals."""
    if x.shape[0] < 1:
        raise ValueError("argmax of an empty row")
    return _ops().argmax(x.shape[0], &x[0])


def logsumexp(const float[::1] x):
    """log(sum(exp(x))), a Python float."""
    if x.shape[0] < 1:
        raise ValueError("logsumexp of an empty row")
    return _ops().logsumexp(x.shape[0], &x[0])


def top_k(const float[::1] x, int64_t k):
    """(values float32, indices int64) of the k largest, largest first, lower index first among equals."""
    if k < 0:
        raise ValueError(f"the {k} largest")
    k = min(k, x.shape[0])
    values, indices = np.empty(k, dtype=np.float32), np.empty(k, dtype=np.int64)
    cdef float[::1] heap = values
    cdef int64_t[::1] index = indices
    if k:
        _ops().top_k(x.shape[0], &x[0], k, &heap[0], &index[0])
    return values, indices


KV_FORMATS = ("f32", "f16", "bf16", "int8", "int4", "int16")


cdef int32_t kv_format_code(str name) except -1:
    """pw_kv_format."""
    if name not in KV_FORMATS:
        raise ProgramError(f"keys and values in {name!r}: {', '.join(KV_FORMATS)} are supported")
    return KV_FORMATS.index(name)


cdef int check_latent(int32_t latent, int32_t n_kv_heads, int32_t head_dim, int32_t kv_format) except -1:
    """Of latent attention: one KV head, vectors of head_dim numbers whose first `latent` are values."""
    if n_kv_heads != 1 or latent < PW_PANEL or latent % PW_PANEL or not latent < head_dim <= PW_MAX_LATENT_DIM:
        raise ProgramError(f"{n_kv_heads} latent vectors of {head_dim} numbers, values of {latent}: one of up to "
                           f"{PW_MAX_LATENT_DIM}, values a multiple of {PW_PANEL} can run")
    if head_dim % 2 or not pw_latent_can_be(kv_format):
        raise ProgramError(f"latent vectors of {head_dim} numbers in {KV_FORMATS[kv_format]}: an even number in f32, f16 or"
                           " bf16 can run")
    return 0


def kv_slot_bytes(str kv_format, int64_t head_dim, bint latent=False):
    """Bytes of one slot of a KV head; with latent attention that is one vector."""
    cdef int32_t code = kv_format_code(kv_format)
    if not latent:
        return pw_kv_slot_bytes(code, head_dim)
    if not pw_latent_can_be(code):
        raise ProgramError(f"latent attention keeps f32, f16 or bf16, not {kv_format}: leave --kv-format out")
    return pw_kv_elements(code, head_dim) * pw_kv_element_bytes(code)


def attend_one_head(q, keys, values, first, last, table, str kv_format="f32", float cap=0, slopes=None, positions=None):
    """Attention of rows over one KV head, chunk by chunk: float32 [rows, head_dim].

    q [rows, head_dim] already scaled; keys and values [positions, head_dim]; row r sees first[r]..last[r]. table: the
    slot of the first of every PW_CHUNK positions. cap: scores are cap tanh(score / cap), 0: as they are. slopes: what scores of a row lose for each position between a key and the row's own. What holds no position is NaN, so that nothing may depend on it.
    """
    rows, dim = q.shape
    wide, slots = -(-dim // 16) * 16, -(-(max(table) + PW_CHUNK) // 16) * 16
    if rows < 1 or dim > PW_MAX_HEAD_DIM or keys.shape[1] != dim or keys.shape != values.shape:
        raise ValueError("queries, keys and values do not fit together")
    if min(table) < 0 or len(table) * PW_CHUNK < len(keys):
        raise ValueError("the table does not fit the keys")
    cache = np.full(slots * kv_slot_bytes(kv_format, dim), 0xFF, np.uint8)  # NaN in every format, or its scale is
    padded = np.zeros((rows, PW_ROW_STRIDE), np.float32)
    padded[:, :dim] = q
    work = np.zeros(2 * rows * (wide + 2) + pw_attention_scratch(dim), np.float32)
    out = np.empty((rows, dim), np.float32)
    cdef float[:, ::1] q_rows = padded, result = out
    cdef float[::1] memory = work
    cdef const float[:, ::1] k_rows = np.ascontiguousarray(keys, np.float32)
    cdef const float[:, ::1] v_rows = np.ascontiguousarray(values, np.float32)
    cdef const int64_t[::1] firsts = np.ascontiguousarray(first, np.int64)
    cdef const int64_t[::1] lasts = np.ascontiguousarray(last, np.int64)
    cdef const int64_t[::1] chunk_slots = np.ascontiguousarray(table, np.int64)
    cdef pw_kv_head head = pw_kv_head_at(<char *><size_t>cache.ctypes.data, slots, kv_format_code(kv_format), dim)
    cdef pw_queries queries
    cdef pw_partial part, into
    cdef int64_t n = rows, r, chunk
    queries.q, queries.first, queries.last = &q_rows[0, 0], &firsts[0], &lasts[0]
    queries.rows, queries.tile_rows, queries.cap, queries.next_keys = rows, 0, cap, NULL
    cdef const float[::1] falls = np.ascontiguousarray(np.zeros(rows) if slopes is None else slopes, np.float32)
    cdef const int64_t[::1] places = np.ascontiguousarray(last if positions is None else positions, np.int64)
    if len(falls) != rows or len(places) != rows:
        raise ValueError("one slope and one position for each row expected")
    queries.slopes, queries.positions = NULL, &places[0]
    if slopes is not None:
        queries.slopes = &falls[0]
    part.top, part.sum, part.values = &memory[0], &memory[n], &memory[2 * n]
    into.top = part.values + n * head.value_dim
    into.sum, into.values = into.top + n, into.top + 2 * n
    for r in range(k_rows.shape[0]):
        _ops().store_key(&head, chunk_slots[r // PW_CHUNK] + r % PW_CHUNK, &k_rows[r, 0])
        _ops().store_value(&head, chunk_slots[r // PW_CHUNK] + r % PW_CHUNK, &v_rows[r, 0])
    _ops().prepare_queries(head.format, head.head_dim, head_rows(n), &q_rows[0, 0])
    _ops().begin(head_rows(n), head.value_dim, into)
    for chunk in range(min(first) // PW_CHUNK, max(last) // PW_CHUNK + 1):
        _ops().attend_chunk(&head, &queries, chunk, chunk_slots[chunk], into.values + n * head.value_dim, part)
        _ops().merge(head_rows(n), head.value_dim, part, into)
    for r in range(n):
        _ops().finish(head.head_dim, into.sum[r], into.values + r * head.value_dim, &result[r, 0])
    return out


cdef int32_t head_rows(int64_t n) noexcept nogil:
    return <int32_t>n
