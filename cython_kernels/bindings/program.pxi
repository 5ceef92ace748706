# A program's runs, by one rank or several. Textually included by _native.pyx.


cdef dict RUN_FAILURES = {
    PW_RUN_GROUP_FAILED: "another rank has failed or ended",
    PW_RUN_LATE: "another rank did not arrive in time",
    PW_RUN_MISFIT: "this rank was not built for the step that rank 0 runs",
    PW_SERVE_ORPHANED: "rank 0's process has ended",
}


cdef int _check_run(int status) except -1:
    if status in RUN_FAILURES:
        raise GroupFailed(RUN_FAILURES[status])
    return _check_team(status)


cdef class Program(StreamBuilder):
    """What a builder made, once it is sealed: seal, then run. The buffer protocol gives the logits, float32
    [max_logit_rows, outputs], of the last run.

    Where several ranks share the work, each builds the same program and calls seal_shared with the same memory, rank 0
    before the others; rank 0 runs steps while the others serve.
    """

    cdef Py_ssize_t logits_shape[2]
    cdef Py_ssize_t logits_strides[2]
    cdef readonly int64_t native_ns
    """Time spent inside `run`'s native call so far; the rest of a step's time is Python's."""

    def seal(self, int64_t logits, kv=None):
        """Allocates the arena, scratch and KV; `logits` is the arena offset of [max_logit_rows, outputs].

        kv: page-aligned memory for keys and values, `whole_kv_bytes` of it; None: they are allocated too.
        """
        cdef unsigned char[::1] memory
        if self.program.n_ranks > 1:
            raise ProgramError("a program of several ranks is sealed with the memory that they share")
        if kv is None:
            self._seal(logits, NULL, NULL)
            return
        memory = kv
        if memory.shape[0] < self.whole_kv_bytes() or <size_t>&memory[0] % 4096:
            raise ProgramError(f"{memory.shape[0]} bytes where {self.whole_kv_bytes()} from a page's start on belong")
        self._seal(logits, NULL, <char *>&memory[0])
        self.kept.append(memory)

    def seal_shared(self, int64_t logits, buffer):
        """The same where several ranks share `buffer`: page-aligned, shared_bytes() of it, zero when rank 0 seals.

        The others seal it after rank 0 has, and before rank 0 runs a step.
        """
        cdef unsigned char[::1] memory = buffer
        if self.program.n_ranks == 1:
            raise ProgramError("a program of one rank shares no memory")
        if memory.shape[0] < self.shared_bytes() or <size_t>&memory[0] % 4096:
            raise ProgramError(f"{memory.shape[0]} shared bytes where {self.shared_bytes()} from a page's start on belong")
        if self.program.rank and not pw_orders_fit(self.program, <char *>&memory[0]):
            raise ProgramError("rank 0 has not sealed this memory, or not for the same program")
        self._seal(logits, <char *>&memory[0], NULL)
        self.kept.append(memory)
        if self.program.rank == 0:
            pw_orders_open(self.program)

    cdef int _seal(self, int64_t logits, char *shared, char *kv) except -1:
        cdef pw_capacity *room = &self.program.capacity
        if self.sealed:
            raise ProgramError("a program is sealed once")
        if logits < 0 or logits + room.max_logit_rows * self.program.outputs > self.program.arena_floats:
            raise ProgramError("no op writes the logits that the program promises")
        self.program.logits = logits
        self.sealed = pw_program_seal(self.program, shared, kv)
        if not self.sealed:
            raise ProgramError(f"the system refused {self.bytes() / 2**20:.0f} MiB for scratch and the KV cache")
        return 0

    def run(self, Team team, slices, bint every_row=False, int32_t table=0, Team resting=None, bint first_row=False):
        """One forward step. Returns the number of rows of logits: those that slices want, or every row.

        A slice's row of logits is that of its last token, or with first_row that of its first.

        table: which schedules the products run by, from 0 on (set_schedules). resting: the team that ran the step
        before, if it is another one: its threads leave their cores at once.

        slices: objects with token_ids, start, slot_base, wants_logits, table (None, or the slots where every
        PW_CHUNK positions begin; then slot_base is not read), n_drafted (N: the N rows before the last one want
        logits too), adapter (of `adapt`; 0: none) and ring (where layers with windows keep rings: its first slot,
        counted from kv_slots on, and its slots); where layers keep states `state` (its place; a start of 0 begins
        with zeros) and `keeps`, pairs (position, place): the state before that position is copied there; where
        embeddings have segments also `second`, its tokens before those of the second text, None: all. ValueError
        when a token, a position or a slot is out
        of range; then nothing has been written. Of several ranks, rank 0 runs it for all; GroupFailed
        when one of them fails or does not come.
        """
        cdef pw_team *members = team._open()
        cdef pw_team *last = NULL if resting is None else resting._open()
        cdef const char *problem
        cdef int status
        self._check_sealed()
        if not 0 <= table < PW_SCHEDULE_TABLES:
            raise ValueError(f"there is no table {table} of schedules")
        self._check_ranks(team, table)
        if self.program.rank:
            raise ProgramError(f"rank {self.program.rank} serves what rank 0 runs")
        self._fill(slices, every_row, first_row)
        problem = pw_program_check(self.program, team.size, table)
        if problem != NULL:
            raise ValueError(f"this step cannot be run: {problem.decode()}")
        cdef int64_t began
        with nogil:
            began = pw_now_ns()
            if self.program.shared:
                status = pw_orders_run(self.program, members, table, last)
            else:
                if last != NULL:
                    pw_team_rest(last)
                status = pw_program_run(self.program, members, table)
            self.native_ns += pw_now_ns() - began
        _check_run(status)
        return self.program.step.n_logit_rows

    cdef int _check_ranks(self, Team team, int table) except -1:
        if self.division is None:
            return 0
        teams = self.division.teams[table] if table < len(self.division.teams) else ()
        if self.division.rank >= len(teams) or teams[self.division.rank] != team.size:
            raise ValueError(f"a team of {team.size} for rank {self.division.rank} of teams {teams}")
        return 0

    def serve(self, teams):
        """Runs what rank 0 tells this rank to run, until it says stop. GroupFailed when that is no longer possible.

        teams: for each table of the division the Team that this rank runs it by, None where it takes no part. Holds no GIL and
        answers no signal.
        """
        cdef pw_team *members[PW_SCHEDULE_TABLES]
        cdef int status, table
        self._check_shared()
        if self.program.rank == 0 or len(teams) != len(self.division.teams):
            raise ProgramError("ranks from 1 on serve, with a team or None for each table")
        for table in range(PW_SCHEDULE_TABLES):
            members[table] = NULL
        for table, team in enumerate(teams):
            if team is not None:
                self._check_ranks(team, table)
                members[table] = (<Team?>team)._open()
        with nogil:
            status = pw_orders_serve(self.program, members)
        _check_run(PW_TEAM_OK if status == PW_SERVED else status)

    def stop(self):
        """Ends `serve` on every other rank."""
        self._check_shared()
        if self.program.rank:
            raise ProgramError("rank 0 says when to stop")
        pw_orders_stop(self.program)

    def fail(self):
        """Ends every wait of every rank, now and later. From any thread of any rank."""
        self._check_shared()
        pw_group_fail(self.program.group)

    def observed(self, int table):
        """For each rank of a table the CPUs that its threads were last seen on; -1 before its first step."""
        cdef const int32_t *cpus
        cdef int rank, thread
        seen = []
        self._check_shared()
        for rank, threads in enumerate(self.division.teams[table]):
            cpus = pw_orders_observed(self.program, table, rank)
            seen.append(tuple(cpus[thread] for thread in range(threads)))
        return seen

    def misplaced(self, int table):
        """How often threads of a table's ranks were seen on other CPUs than their own."""
        self._check_shared()
        return sum(pw_orders_misplaced(self.program, table, rank) for rank in range(len(self.division.teams[table])))

    def kv_span(self, int64_t layer, int64_t kv_head, int64_t copy=0):
        """(offset, bytes) of the keys and values of a head, or of one of its copies, in the shared memory."""
        cdef pw_shape *shape = &self.program.shape
        self._check_shared()
        if not (0 <= layer < shape.n_layers and 0 <= kv_head < self.program.layers[layer].n_kv_heads):
            raise ValueError(f"KV head {kv_head} of layer {layer}: {shape.n_layers} x {shape.n_kv_heads} are there at most")
        copies = pw_copies_of(self.program, self.program.layers[layer].n_kv_heads, <int32_t>kv_head)
        if not 0 <= copy < copies:
            raise ValueError(f"copy {copy} of KV head {kv_head}: {copies} are there")
        at = <char *>pw_kv_head_of(self.program, layer, kv_head, copy).keys - self.program.shared
        return at, pw_layer_head_bytes(self.program, layer)

    cdef int _check_shared(self) except -1:
        self._check_sealed()
        if self.program.shared == NULL:
            raise ProgramError("this program has one rank")
        return 0

    cdef int _fill(self, slices, bint every_row, bint first_row) except -1:
        cdef pw_step *step = &self.program.step
        cdef pw_capacity *room = &self.program.capacity
        cdef pw_slice *out
        cdef int64_t row = 0, token, drafted, n_runs = 0, n_keeps = 0
        cdef int64_t vocab = self.program.shape.vocab
        step.n_tokens = step.n_slices = step.n_logit_rows = 0
        try:
            for piece in slices:
                if step.n_slices == room.max_slices:
                    raise ValueError(f"a step holds at most {room.max_slices} slices")
                out = &step.slices[step.n_slices]
                out.first_row, out.start, out.slot_base, out.first_run = row, piece.start, 0, -1
                out.ring_base, out.ring_slots = (0, 0) if piece.ring is None else piece.ring
                out.adapter = piece.adapter
                for token in piece.token_ids:
                    if row == room.max_tokens:
                        raise ValueError(f"a step holds at most {room.max_tokens} tokens")
                    if not 0 <= token < vocab:
                        raise ValueError(f"token {token} is outside the vocabulary of {vocab}")
                    step.tokens[row] = <int32_t>token
                    row += 1
                    if every_row:
                        self._want(row - 1)
                out.n_rows = out.second = row - out.first_row
                if self.has_segments and piece.second is not None:
                    out.second = piece.second
                if self.program.state_floats:
                    n_keeps = self._fill_state(out, piece, n_keeps)
                if piece.table is None:
                    out.slot_base = piece.slot_base
                else:
                    self._copy_table(out, piece.table, n_runs)
                    n_runs += out.n_runs
                step.n_slices += 1
                if piece.wants_logits and not every_row and out.n_rows:
                    drafted = piece.n_drafted
                    if not 0 <= drafted < out.n_rows:
                        raise ValueError(f"{drafted} drafts in a slice of {out.n_rows} tokens")
                    if first_row:
                        self._want(out.first_row)
                        continue
                    for token in range(row - 1 - drafted, row):
                        self._want(token)
        except OverflowError:
            raise ValueError("a token, position or slot does not fit in 64 bits") from None
        step.n_tokens = row
        return 0

    cdef int64_t _fill_state(self, pw_slice *slice, piece, int64_t n_keeps) except -1:
        """Its place, and the copies of it that are kept; `keeps` has room for them behind those of other slices."""
        cdef int64_t position, place
        slice.state, slice.first_keep, slice.n_keeps = -1 if piece.state is None else piece.state, n_keeps, 0
        for position, place in piece.keeps:
            if n_keeps == self.program.capacity.max_tokens:
                raise ValueError(f"a step keeps at most {n_keeps} copies of states")
            self.program.step.keeps[n_keeps] = pw_keep(position - slice.start, place)
            slice.n_keeps += 1
            n_keeps += 1
        return n_keeps

    cdef int _copy_table(self, pw_slice *slice, table, int64_t first_run) except -1:
        """As many runs of it as the slice's positions need; `runs` has room for them behind those of other slices."""
        cdef int64_t slots = self.program.capacity.kv_slots
        cdef int64_t positions = slice.start + slice.n_rows if 0 <= slice.start <= slots else 0
        cdef int64_t needed = min(-(-positions // PW_CHUNK), pw_runs_each(&self.program.capacity)), i
        cdef int64_t slot
        slice.first_run, slice.n_runs = first_run, min(needed, len(table))
        for i in range(slice.n_runs):
            slot = table[i]
            if not 0 <= slot < slots:
                raise ValueError(f"this step cannot be run: a table's run begins at slot {slot}")
            self.program.step.runs[first_run + i] = <int32_t>slot
        return 0

    cdef int _want(self, int64_t row) except -1:
        cdef pw_step *step = &self.program.step
        if step.n_logit_rows == self.program.capacity.max_logit_rows:
            raise ValueError(f"at most {step.n_logit_rows} rows of a step can have logits")
        step.logit_rows[step.n_logit_rows] = row
        step.n_logit_rows += 1
        return 0

    def touch(self, Team team):
        """Every page of what the program runs in exists from now on, shared memory included; it is not cleared.

        Each member of the team touches a part. While no step runs. ProgramError where the system has not so much.
        """
        cdef pw_team *members = team._open()
        cdef int status
        self._check_sealed()
        with nogil:
            status = pw_program_touch(self.program, members)
        if status > 0:
            raise ProgramError(f"the system has not the {self.bytes() / 2**20:.0f} MiB that it granted for scratch and "
                               f"the KV cache: {os.strerror(status)}")
        _check_team(status)

    def spread(self, nodes):
        """Rows, keys and values of a program of one rank go to `nodes` by turns; scratch stays near the thread that uses it.

        Before the first step, and before `touch`. 0 or an errno.
        """
        cdef int32_t numbers[PW_MOST_NODES]
        cdef int count = _list_nodes(nodes, numbers), error
        self._check_sealed()
        if self.program.n_ranks > 1:
            raise ProgramError("several ranks have their memory each on its own node")
        error = pw_place_on_nodes(self.program.rows, self.program.rows_bytes, numbers, count)
        return error or pw_place_on_nodes(self.program.kv, self.program.kv_bytes, numbers, count)

    def memory_by_node(self):
        """Bytes that this process has touched of scratch, of rows, and of keys and values: of each by node, None where
        the system does not tell."""
        self._check_sealed()
        return {
            "scratch": _bytes_by_node(self.program.memory, self.program.memory_bytes),
            "rows": _bytes_by_node(self.program.rows, self.program.rows_bytes),
            "kv": _bytes_by_node(self.program.kv, self.program.kv_bytes),
        }

    def copy_kv(self, Team team, int64_t source, int64_t target, int64_t n_slots):
        """Moves keys and values of n_slots slots, in every layer without rings; the ranges may overlap.

        Slots from kv_slots on are those of layers that keep rings, and behind them, one each, lie the places of states.
        ValueError for ranges in two of them, or outside.
        """
        cdef pw_team *members = team._open()
        cdef int64_t slots = self.program.capacity.kv_slots
        cdef int status
        self._check_sealed()
        cdef int64_t first = 0 if source < slots else slots
        if first:
            slots = self.program.capacity.ring_slots
        if source >= first + slots and self.program.state_floats:
            first, slots = self.program.capacity.kv_slots + self.program.capacity.ring_slots, self.program.capacity.state_places
        if not (0 <= n_slots <= slots and 0 <= source - first <= slots - n_slots
                and 0 <= target - first <= slots - n_slots):
            raise ValueError(f"slots {source} to {target}, {n_slots} of them, of {slots} from {first} on")
        if n_slots == 0:
            return
        if first and first == self.program.capacity.kv_slots + self.program.capacity.ring_slots:
            if abs(source - target) < n_slots:
                raise ValueError(f"states {source} to {target}, {n_slots} of them, overlap")
            with nogil:
                status = pw_program_copy_states(self.program, members, source - first, target - first, n_slots)
            _check_team(status)
            return
        with nogil:
            status = pw_program_copy_kv(self.program, members, source, target, n_slots)
        _check_team(status)

    def read_rows(self, int64_t at, int64_t stride, float[:, ::1] rows):
        """Fills `rows` with those of the arena from offset `at` on, as the last run left them."""
        cdef int64_t row
        self._check_rows(at, stride, rows.shape[0], rows.shape[1])
        for row in range(rows.shape[0]):
            memcpy(&rows[row, 0], self.program.arena + at + row * stride, rows.shape[1] * sizeof(float))

    def write_rows(self, int64_t at, int64_t stride, const float[:, ::1] rows):
        """Puts `rows` into the arena from offset `at` on, for the next run. Of one rank."""
        cdef int64_t row
        self._check_rows(at, stride, rows.shape[0], rows.shape[1])
        for row in range(rows.shape[0]):
            memcpy(self.program.arena + at + row * stride, &rows[row, 0], rows.shape[1] * sizeof(float))

    cdef int _check_rows(self, int64_t at, int64_t stride, int64_t n_rows, int64_t width) except -1:
        cdef int64_t room = self.program.arena_floats
        self._check_sealed()
        if n_rows < 1 or width < 1 or stride < width:
            raise ValueError(f"{n_rows} rows of {width} numbers, {stride} apart")
        if at < 0 or stride > room or n_rows > room or at > room - (n_rows - 1) * stride - width:
            raise ValueError(f"{n_rows} rows from number {at} on lie outside the arena")
        return 0

    cdef int _check_sealed(self) except -1:
        if not self.sealed:
            raise ProgramError("this program has not been sealed")
        return 0

    def kv_bytes(self):
        return self.program.kv_bytes

    @property
    def progress(self):
        """(Steps begun, layers of the newest whose keys and values are all stored). Any thread may ask."""
        cdef long long told = pw_progress_of(self.program)
        return told // PW_PROGRESS_LAYERS, told % PW_PROGRESS_LAYERS

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        self._check_sealed()
        self.logits_shape[0], self.logits_shape[1] = self.program.capacity.max_logit_rows, self.program.outputs
        self.logits_strides[1] = sizeof(float)
        self.logits_strides[0] = self.logits_shape[1] * self.logits_strides[1]
        buffer.buf = self.program.arena + self.program.logits
        buffer.obj = self
        buffer.len = self.logits_shape[0] * self.logits_strides[0]
        buffer.itemsize, buffer.ndim, buffer.readonly = sizeof(float), 2, 0
        buffer.format = "f"
        buffer.shape, buffer.strides, buffer.suboffsets = self.logits_shape, self.logits_strides, NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer *buffer):
        pass
