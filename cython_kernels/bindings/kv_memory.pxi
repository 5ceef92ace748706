cdef extern from "memory/kv_memory.h" nogil:
    ctypedef struct pw_kv_memory:
        char *kv
        pw_shape shape
        pw_capacity room
        const int32_t *copies

    int64_t pw_states_after(int64_t kv_bytes)
    int64_t pw_kv_wire_bytes(const pw_kv_memory *memory, int64_t slots)
    void pw_kv_to_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, char *wire)
    void pw_kv_from_wire(const pw_kv_memory *memory, int64_t layer, int64_t slot, int64_t slots, const char *wire)
    void pw_kv_between(const pw_kv_memory *source, const pw_kv_memory *target, int64_t layer, int64_t from_slot,
                       int64_t to_slot, int64_t slots)


cdef class KvMemory:
    """Keys and values of all layers, from byte `offset` of `memory` on, and places of states behind them; they may be
    another process's.

    state_bytes: of one sequence's state, 0 where no layer keeps any. A state is moved in parts, as it lies.
    copies: how many the memory keeps of each KV head, where ranks share these; (): one. The first is read, all are
    written, and memories of one shape may differ in them. Ranges of slots begin and end at multiples of 16. On the wire a range of a layer is `wire_bytes(n_slots)` long,
    the same on every instruction set. ValueError outside the memory, the layers or the slots.
    """

    cdef pw_kv_memory memory
    cdef object kept
    cdef char *states
    cdef readonly int64_t state_bytes
    cdef int64_t state_places
    cdef int32_t[::1] copies

    def __cinit__(self, memory, int64_t offset, int32_t n_layers, int32_t n_kv_heads, int32_t head_dim,
                  int64_t kv_slots, str kv_format, bint latent=False, int64_t state_bytes=0, int64_t state_places=0,
                  copies=()):
        cdef unsigned char[::1] view = memory
        cdef pw_shape *shape = &self.memory.shape
        cdef int64_t states_at
        cdef int32_t most = PW_MAX_LATENT_DIM + PW_MAX_INDEX_DIM if latent else PW_MAX_HEAD_DIM
        if min(n_layers, n_kv_heads) < 1 or not 2 <= head_dim <= most or head_dim % 2:
            raise ValueError(f"{n_layers} layers of {n_kv_heads} KV heads of {head_dim} dimensions")
        if not 0 < kv_slots <= 1 << 30 or kv_slots % 16:
            raise ValueError(f"{kv_slots} KV slots: a multiple of 16 expected")
        shape.n_layers, shape.n_kv_heads, shape.head_dim, shape.latent, shape.index = n_layers, n_kv_heads, head_dim, latent, 0
        self.memory.room.kv_slots = kv_slots
        self.memory.room.kv_format = kv_format_code(kv_format)
        if latent and not pw_latent_can_be(self.memory.room.kv_format):
            raise ValueError(f"latent vectors in {kv_format}: f32, f16 or bf16 expected")
        each = np.asarray(copies or [1] * n_kv_heads, np.int64)
        if each.shape != (n_kv_heads,) or each.min() < 1 or each.max() > PW_GROUP_MAX_RANKS:
            raise ValueError(f"copies {copies!r:.80} of {n_kv_heads} KV heads: 1 to {PW_GROUP_MAX_RANKS} of each expected")
        self.copies = np.concatenate([[0], np.cumsum(each)]).astype(np.int32)
        self.memory.copies = &self.copies[0]
        needed = n_layers * (pw_kv_wire_bytes(&self.memory, kv_slots) // n_kv_heads) * self.copies[n_kv_heads]
        if offset < 0 or offset % 64 or needed > view.shape[0] - offset:
            raise ValueError(f"keys and values of {needed} bytes from byte {offset} of {view.shape[0]}")
        self.memory.kv = <char *>&view[0] + offset
        if state_bytes < 0 or state_bytes % 64 or (state_bytes and not 0 < state_places <= 1 << 20):
            raise ValueError(f"{state_places} places for states of {state_bytes} bytes")
        self.state_bytes, self.state_places = state_bytes, state_places if state_bytes else 0
        if state_bytes:
            needed = pw_states_after(needed)
            if state_places > (view.shape[0] - offset - needed) // state_bytes:
                raise ValueError(f"{state_places} states of {state_bytes} bytes behind {needed} of {view.shape[0]}")
            states_at = needed
            self.states = self.memory.kv + states_at
        self.kept = view

    @property
    def n_layers(self):
        return self.memory.shape.n_layers

    def wire_bytes(self, int64_t n_slots):
        """Of `n_slots` slots of one layer."""
        return pw_kv_wire_bytes(&self.memory, n_slots)

    def read(self, int64_t layer, int64_t slot, int64_t n_slots, out):
        """Write slots of a layer to `out`, in the form of the wire."""
        cdef unsigned char[::1] wire = out
        self._check(layer, slot, n_slots, wire.shape[0])
        with nogil:
            pw_kv_to_wire(&self.memory, layer, slot, n_slots, <char *>&wire[0])

    def write(self, int64_t layer, int64_t slot, int64_t n_slots, data):
        """Take slots of a layer from `data`, which has the form of the wire."""
        cdef const unsigned char[::1] wire = data
        self._check(layer, slot, n_slots, wire.shape[0])
        with nogil:
            pw_kv_from_wire(&self.memory, layer, slot, n_slots, <const char *>&wire[0])

    def copy_to(self, KvMemory target not None, int64_t layer, int64_t from_slot, int64_t to_slot, int64_t n_slots):
        """Copy slots of a layer to another memory of the same shape and format."""
        mine, theirs = self.memory.shape, target.memory.shape
        if (mine.n_layers, mine.n_kv_heads, mine.head_dim, mine.latent, self.memory.room.kv_format) != (
                theirs.n_layers, theirs.n_kv_heads, theirs.head_dim, theirs.latent, target.memory.room.kv_format):
            raise ValueError("the two memories hold keys and values of different shapes")
        self._check(layer, from_slot, n_slots, self.wire_bytes(n_slots))
        target._check(layer, to_slot, n_slots, self.wire_bytes(n_slots))
        with nogil:
            pw_kv_between(&self.memory, &target.memory, layer, from_slot, to_slot, n_slots)

    def read_state(self, int64_t place, int64_t begin, out):
        """Write bytes of a state, from `begin` on, to `out`."""
        cdef unsigned char[::1] wire = out
        cdef char *state = self._state(place, begin, wire.shape[0])
        with nogil:
            memcpy(&wire[0], state, wire.shape[0])

    def write_state(self, int64_t place, int64_t begin, data):
        """Take bytes of a state, from `begin` on, from `data`."""
        cdef const unsigned char[::1] wire = data
        cdef char *state = self._state(place, begin, wire.shape[0])
        with nogil:
            memcpy(state, &wire[0], wire.shape[0])

    def copy_state_to(self, KvMemory target not None, int64_t source, int64_t place, int64_t begin, int64_t n_bytes):
        """Copy bytes of a state to another memory of states of the same size."""
        if self.state_bytes != target.state_bytes:
            raise ValueError(f"states of {self.state_bytes} and {target.state_bytes} bytes")
        cdef char *given = self._state(source, begin, n_bytes)
        cdef char *taken = target._state(place, begin, n_bytes)
        with nogil:
            memcpy(taken, given, n_bytes)

    cdef char *_state(self, int64_t place, int64_t begin, int64_t n_bytes) except NULL:
        if not 0 <= place < self.state_places:
            raise ValueError(f"state {place} of {self.state_places}")
        if n_bytes < 1 or not 0 <= begin <= self.state_bytes - n_bytes:
            raise ValueError(f"bytes {begin} to {begin + n_bytes} of a state of {self.state_bytes}")
        return self.states + place * self.state_bytes + begin

    cdef int _check(self, int64_t layer, int64_t slot, int64_t n_slots, int64_t n_bytes) except -1:
        cdef int64_t slots = self.memory.room.kv_slots
        if not 0 <= layer < self.memory.shape.n_layers:
            raise ValueError(f"layer {layer} of {self.memory.shape.n_layers}")
        if n_slots < 16 or slot % 16 or n_slots % 16 or not 0 <= slot <= slots - n_slots:
            raise ValueError(f"slots {slot} to {slot + n_slots} of {slots}: whole panels of 16 expected")
        if n_bytes != pw_kv_wire_bytes(&self.memory, n_slots):
            raise ValueError(f"{n_bytes} bytes for {n_slots} slots of {self.wire_bytes(n_slots)}")
        return 0
