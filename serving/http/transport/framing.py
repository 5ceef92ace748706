"""HTTP/1 framing: cuts the bytes of a connection at the ends of requests, for h11. h11 reads HTTP more
leniently than is safe behind a proxy: it takes a bare LF for the end of a line, joins folded header lines,
and lets Transfer-Encoding win over Content-Length (RFC 9112, sections 2.2, 5.2 and 6.1, allows or demands a
refusal of each). It also makes Python objects of every chunk, however small. So heads are checked here before
h11 reads them, and chunks are decoded here and passed on as few large ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from phasewise.serving.http.errors import ApiError

PIECE_BYTES = 64 * 1024
"""Most bytes of a body that one call of `Framing.next_piece` returns."""
MAX_TARGET_BYTES = 8 * 1024
"""Longest request line: method, path, query and version."""
MAX_HEADERS = 100
FREE_CHUNKS = 1024
"""Number of chunks of any size that a body may have."""
MIN_MEAN_CHUNK_BYTES = 64
"""A body of more than FREE_CHUNKS chunks has at least this many bytes a chunk on average."""

_CHUNKS_A_PIECE = 256
"""Most chunks decoded in one call: they take some 200 us."""
_MAX_CHUNK_LINE_BYTES = 256
"""Longest line with a chunk's size and its extensions; extensions are ignored."""
_MAX_TRAILER_BYTES = 4 * 1024

_NO_METHOD = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_LONE_CR_OR_LF = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_FOLDED = re.compile(rb"\r\n[ \t]")
_REQUEST_LINE = re.compile(rb"[^ ]+ [^ ]+ HTTP/1\.[01]")
_FRAMING_FIELD = re.compile(rb"\r\n(content-length|transfer-encoding):[ \t]*([^\r]*)", re.IGNORECASE)
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


def _not_http(why: str) -> ApiError:
    return ApiError(400, f"this is no HTTP/1.1 request: {why}", code="invalid_http", closes=True)


@dataclass(slots=True)
class _Chunks:
    """State of a body with chunked encoding."""

    n_chunks: int = 0
    n_bytes: int = 0
    left_in_chunk: int = 0
    in_trailers: bool = False
    trailer_bytes: int = 0


@dataclass(slots=True)
class Framing:
    """The bytes of one connection that h11 has not seen. `add` received bytes, then take pieces with
    `next_piece`, once the previous request has been answered. `next_piece` raises ApiError (400, 414, 431)
    for an invalid request; the connection must end then."""

    max_head_bytes: int
    unread: bytearray = field(default_factory=bytearray)
    _searched: int = 0
    """Bytes of an unfinished head that have been searched for its end."""
    _sized: int = 0
    """Bytes still to come of a body with Content-Length."""
    _chunks: _Chunks | None = None

    def add(self, data: bytes | memoryview) -> None:
        self.unread += data

    def next_piece(self) -> bytes | None:
        """The next whole head, or a part of a body encoded for h11; None if more bytes must come first."""
        if not self.unread:
            return None
        if self._chunks is not None:
            return self._next_chunks(self._chunks)
        if self._sized:
            piece = self._taken(min(self._sized, PIECE_BYTES))
            self._sized -= len(piece)
            return piece
        return self._next_head()

    def _taken(self, n_bytes: int) -> bytes:
        taken = bytes(self.unread[:n_bytes])
        del self.unread[:n_bytes]
        return taken

    # ---- heads -------------------------------------------------------------------------------------------

    def _next_head(self) -> bytes | None:
        end = self.unread.find(b"\r\n\r\n", max(0, self._searched - 3))
        self._refuse_part_of_head(end)
        if end < 0:
            self._searched = len(self.unread)
            return None
        self._searched = 0
        head = self._taken(end + 4)
        self._begin_body(head)
        return head

    def _refuse_part_of_head(self, end: int) -> None:
        """Refuse a head that is invalid however it goes on, without waiting for its end."""
        n_bytes = len(self.unread) if end < 0 else end + 4
        if _NO_METHOD.match(self.unread):
            raise _not_http("it does not begin with a method")
        line_bytes = self.unread.find(b"\r\n", 0, MAX_TARGET_BYTES + 2)
        if line_bytes < 0 and n_bytes > MAX_TARGET_BYTES:
            raise ApiError(
                414, f"the URL is longer than {MAX_TARGET_BYTES} bytes", code="url_too_long", closes=True
            )
        if n_bytes > self.max_head_bytes:
            message = f"the head of the request is larger than {self.max_head_bytes} bytes"
            raise ApiError(431, message, code="header_too_large", closes=True)
        lone = _LONE_CR_OR_LF.search(self.unread, max(0, self._searched - 1), n_bytes)
        if lone and lone.start() < len(self.unread) - 1 + (lone[0] == b"\n"):  # a last CR may get its LF yet
            raise _not_http("a line ends in something else than CR LF")

    def _begin_body(self, head: bytes) -> None:
        """Set the length or encoding of the body, or refuse a head that is ambiguous about it."""
        if head.count(b"\r\n") > MAX_HEADERS + 2:
            raise ApiError(
                431, f"the request has more than {MAX_HEADERS} headers", code="header_too_large", closes=True
            )
        if _FOLDED.search(head):
            raise _not_http("a header goes on in a second line")
        line = head[: head.index(b"\r\n")]
        if not _REQUEST_LINE.fullmatch(line):
            raise _not_http("its first line is not METHOD TARGET HTTP/1.1")
        fields: dict[bytes, list[bytes]] = {}
        for name, value in _FRAMING_FIELD.findall(head):
            fields.setdefault(name.lower(), []).append(value.strip(b" \t"))
        lengths, codings = fields.get(b"content-length", []), fields.get(b"transfer-encoding", [])
        if codings:
            if lengths:
                raise _not_http("it has both Content-Length and Transfer-Encoding")
            if len(codings) > 1 or codings[0].lower() != b"chunked" or line.endswith(b"1.0"):
                raise _not_http("the one Transfer-Encoding known here is chunked, in HTTP/1.1")
            self._chunks = _Chunks()
        elif lengths:
            if len(lengths) > 1 or not re.fullmatch(rb"[0-9]{1,15}", lengths[0]):
                raise _not_http("Content-Length is not one number of bytes")
            self._sized = int(lengths[0])

    # ---- bodies in chunks --------------------------------------------------------------------------------

    def _next_chunks(self, body: _Chunks) -> bytes | None:
        """The received chunks, up to a bound, as one chunk; the last chunk unchanged, without trailers."""
        parts: list[bytes] = []
        n_bytes = offset = 0
        end = len(self.unread)
        for _ in range(_CHUNKS_A_PIECE):
            if body.in_trailers or n_bytes >= PIECE_BYTES:
                break
            if body.left_in_chunk == 0:
                line = self._chunk_line(offset)
                if line is None:
                    break
                offset = line.end()
                body.left_in_chunk = int(line[1], 16)
                if body.left_in_chunk == 0:
                    body.in_trailers = True
                    break
                self._count(body)
                body.left_in_chunk += 2  # its CR LF
            part = self.unread[offset : offset + min(body.left_in_chunk, PIECE_BYTES)]
            offset += len(part)
            body.left_in_chunk -= len(part)
            data = self._without_end(part, body.left_in_chunk)
            parts.append(data)
            n_bytes += len(data)
            if offset >= end:
                break
        del self.unread[:offset]
        body.n_bytes += n_bytes
        piece = b"%x\r\n%b\r\n" % (n_bytes, b"".join(parts)) if n_bytes else b""
        if body.in_trailers and self._skip_trailers(body):
            self._chunks = None
            piece += b"0\r\n\r\n"
        return piece or None

    def _chunk_line(self, offset: int) -> re.Match[bytes] | None:
        line = _CHUNK_LINE.match(self.unread, offset, offset + _MAX_CHUNK_LINE_BYTES)
        if line is None and (
            len(self.unread) - offset >= _MAX_CHUNK_LINE_BYTES
            or b"\n" in self.unread[offset:]
            or (offset < len(self.unread) and not re.match(rb"[0-9A-Fa-f]", self.unread[offset : offset + 1]))
        ):
            raise _not_http("a chunk does not begin with its size")
        return line

    @staticmethod
    def _without_end(part: bytearray, left: int) -> bytes:
        """`part` without the CR LF at the chunk's end. `left`: bytes still to come, CR LF included."""
        n_of_end = max(0, 2 - left)
        n_data = max(0, len(part) - n_of_end)
        n_missing = n_of_end - (len(part) - n_data)
        if bytes(part[n_data:]) != b"\r\n"[n_missing:n_of_end]:
            raise _not_http("a chunk is longer than it says")
        return bytes(part[:n_data])

    @staticmethod
    def _count(body: _Chunks) -> None:
        body.n_chunks += 1
        if body.n_chunks > FREE_CHUNKS and body.n_bytes < MIN_MEAN_CHUNK_BYTES * (
            body.n_chunks - _CHUNKS_A_PIECE
        ):
            raise ApiError(
                400,
                f"the body has more than {FREE_CHUNKS} chunks of less than {MIN_MEAN_CHUNK_BYTES} bytes on "
                "average; send larger ones",
                code="chunks_too_small",
                closes=True,
            )

    def _skip_trailers(self, body: _Chunks) -> bool:
        """Check and drop trailers; True once the empty line at their end has come."""
        while True:
            line = self.unread.find(b"\r\n")
            n_bytes = line + 2 if line >= 0 else len(self.unread)
            if body.trailer_bytes + n_bytes > _MAX_TRAILER_BYTES:
                raise ApiError(431, "the trailers are too large", code="header_too_large", closes=True)
            if line < 0:
                if b"\n" in self.unread:
                    raise _not_http("a line ends in something else than CR LF")
                return False
            text = self._taken(n_bytes)[:-2]
            body.trailer_bytes += n_bytes
            if not text:
                return True
            if b"\n" in text or b"\r" in text or text[:1] in b" \t" or b":" not in text:
                raise _not_http("a trailer is not NAME: VALUE")
