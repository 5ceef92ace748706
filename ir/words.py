"""The operations as C functions for vectors that fit a register of the target: a `static inline` function, or
word, for each. Arithmetic, comparisons and moves are the vector extensions of gcc and clang. An operation
that they lack is an intrinsic of the target, or a loop over lanes if it has none; so every target has every
word. Semantics are those of cython_kernels/simd: min and max give the second argument if either is NaN,
`v_sum` is the reduction in halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from phasewise.ir.targets import IsaTarget
from phasewise.ir.types import SCALARS, Scalar, Vec

C_NAMES = {
    "i8": "int8_t", "u8": "uint8_t", "i16": "int16_t", "u16": "uint16_t", "i32": "int32_t", "u32": "uint32_t",
    "i64": "int64_t", "u64": "uint64_t", "f32": "float", "f64": "double",
}  # fmt: skip


def vec_name(of: Vec) -> str:
    return f"{of.elem.name}x{of.lanes}"


def x86_register(of: Vec) -> str:
    suffix = {"f32": "", "f64": "d"}.get(of.elem.name, "i")
    return f"__m{8 * max(16, of.size)}{suffix}"


def x86_prefix(size: int) -> str:
    return "_mm_" if size <= 16 else f"_mm{8 * size}_"


class Words:
    """Makes the words of one target, and remembers the words that were asked for."""

    def __init__(self, target: IsaTarget) -> None:
        self._target = target
        self.by_name: dict[str, str] = {}
        """The C of each word, by the word's name."""
        self.types: dict[str, Vec] = {}

    def type(self, of: Vec) -> str:
        name = vec_name(of)
        self.types[name] = of
        return name

    def make(self, operation: str, result: Vec | Scalar, args: tuple[Vec | Scalar, ...]) -> str:
        """Make the word for an operation on vectors of these types; returns the function's name."""
        shapes = [arg for arg in args if isinstance(arg, Vec)]
        key = "_".join(
            dict.fromkeys(vec_name(shape) for shape in (result, *shapes) if isinstance(shape, Vec))
        )
        name = f"{key}_{operation}"
        if name not in self.by_name:
            for shape in (result, *args):
                if isinstance(shape, Vec):
                    self.type(shape)
            self.by_name[name] = self._text(name, operation, result, args)
        return name

    def paired(self, op: str, of: Vec, a: str, b: str) -> str:
        """C that combines two registers lane by lane, for a reduction."""
        if op == "add" and of.elem.is_float:
            return f"({a} + {b})"
        return f"{self.make(op, of, (of, of))}({a}, {b})"

    def reduction(self, op: str, of: Vec, order: str) -> str:
        """Make the word that reduces a register to a number; returns the function's name."""
        word, c = self.type(of), C_NAMES[of.elem.name]
        name = f"{word}_reduce_{op}_{order}"
        if name in self.by_name:
            return name
        lines, register, lanes = [], "v", of.lanes
        while lanes > 1:
            half = Vec(of.elem, lanes // 2)
            is_pairs = order == "pairs" or (order == "halves_pairs" and lanes * of.elem.size <= 16)
            first = list(range(0, lanes, 2)) if is_pairs else list(range(lanes // 2))
            second = list(range(1, lanes, 2)) if is_pairs else list(range(lanes // 2, lanes))
            smaller = self.type(half)
            if half.size < 8 or lanes == 2:
                break
            sides = [
                f"__builtin_shufflevector({register}, {register}, {', '.join(map(str, places))})"
                for places in (first, second)
            ]
            text = self.paired(op, half, *sides)
            lines.append(f"    {smaller} v{lanes // 2} = {text};")
            register, lanes = f"v{lanes // 2}", lanes // 2
        lines.append(f"    return {_last_lanes(op, register, lanes, of.elem, order)};")
        self.by_name[name] = "\n".join([f"static inline {c} {name}({word} v) {{", *lines, "}"])
        return name

    def quads(self, part: Vec) -> str:
        """C of dot_u8i8 where no instruction does it: even and odd bytes in sixteen bits never saturate."""
        lanes = 4 * part.lanes
        name = f"{self.type(part)}_dot_u8i8"
        words16, u16 = (
            self.type(Vec(Scalar("i16"), 2 * part.lanes)),
            self.type(Vec(Scalar("u16"), 2 * part.lanes)),
        )
        a8, b8 = self.type(Vec(Scalar("u8"), lanes)), self.type(Vec(Scalar("i8"), lanes))
        dot = self.make("dot_i16", part, (Vec(Scalar("i16"), 2 * part.lanes),) * 2)
        add = self.make("add", part, (part, part))
        word = self.type(part)
        self.by_name.setdefault(
            name,
            f"static inline {word} {name}({word} a, {a8} b, {b8} c) {{\n"
            f"    {words16} even = ({words16})((({u16})b) & 255), odd = ({words16})((({u16})b) >> 8);\n"
            f"    {words16} c_even = ({words16})((({u16})c) << 8) >> 8, c_odd = (({words16})c) >> 8;\n"
            f"    return {add}({add}(a, {dot}(even, c_even)), {dot}(odd, c_odd));\n}}",
        )
        return name

    # ---- one definition ----

    def _text(self, name: str, operation: str, result: Vec | Scalar, args: tuple[Vec | Scalar, ...]) -> str:
        letters = "abcd"
        spelled = ", ".join(f"{self._c(of)} {letter}" for of, letter in zip(args, letters, strict=False))
        head = f"static inline {self._c(result)} {name}({spelled})"
        body = None
        if self._target.family == "x86":
            body = self._x86(operation, result, args)
        elif self._target.family == "arm":
            body = self._arm(operation, result, args)
        if body is not None:
            return f"{head} {{ return {body}; }}"
        general = self._general(operation, result, args)
        if general is not None:
            return f"{head} {{ return {general}; }}"
        loop = _LOOPS[operation](result, args)
        return f"{head} {{\n    {self._c(result)} r;\n    {loop}\n    return r;\n}}"

    def _c(self, of: Vec | Scalar) -> str:
        return C_NAMES[of.name] if isinstance(of, Scalar) else self.type(of)

    def _general(self, operation: str, result: Vec | Scalar, args: tuple[Vec | Scalar, ...]) -> str | None:
        """C of an operation by vector extensions alone; None if they lack it."""
        if not isinstance(result, Vec):
            return None
        r, u = vec_name(result), self._unsigned(result)
        match operation:
            case "add" | "sub" | "mul":
                op = {"add": "+", "sub": "-", "mul": "*"}[operation]
                return f"({r})(({u})a {op} ({u})b)"
            case "neg":
                return f"({r})-({u})a"
            case "andnot":
                return f"({r})(~({u})a & ({u})b)"
            case "min" | "max":
                m = self._mask(result)
                op = "<" if operation == "min" else ">"
                return f"({r})((({m})a & ({m})(a {op} b)) | (({m})b & ~({m})(a {op} b)))"
            case "select":
                m = self._mask(result)
                bits = 8 * result.elem.size - 1
                return f"({r})((({m})b & (({m})a >> {bits})) | (({m})c & ~(({m})a >> {bits})))"
            case "abs":
                m = self._mask(result)
                bits = 8 * result.elem.size - 1
                if result.elem.is_float:
                    return f"({r})(({u})a & (~({u}){{}} >> 1))"
                return f"({r})((({u})a ^ ({u})(({m})a >> {bits})) - ({u})(({m})a >> {bits}))"
            case "sign":
                m = self._mask(result)
                return f"({r})(((({u})a ^ ({u})(({m})b < 0)) - ({u})(({m})b < 0)) & ~({u})(b == 0))"
            case "convert" | "widen" | "narrow" | "trunc_i32":
                return f"__builtin_convertvector(a, {r})"
        return None

    def _unsigned(self, of: Vec) -> str:
        return self.type(Vec(SCALARS[f"u{8 * of.elem.size}"], of.lanes))

    def _mask(self, of: Vec) -> str:
        return self.type(Vec(SCALARS[f"i{8 * of.elem.size}"], of.lanes))

    # ---- x86 ----

    def _x86(self, operation: str, result: Vec | Scalar, args: tuple[Vec | Scalar, ...]) -> str | None:
        if not isinstance(result, Vec) or not all(isinstance(arg, Vec) and arg.size >= 8 for arg in args):
            return None
        source = args[0]
        assert isinstance(source, Vec)
        if operation == "from_f16":
            return (
                self._as(result, f"{x86_prefix(result.size)}cvtph_ps({_m128(source, 'a')})")
                if result.size >= 16
                else None
            )
        if operation == "to_f16":
            if source.size < 16:
                return None
            text = f"{x86_prefix(source.size)}cvtps_ph(({x86_register(source)})a, _MM_FROUND_TO_NEAREST_INT)"
            return (
                self._as(result, text)
                if result.size >= 16
                else f"({vec_name(result)})_mm_cvtsi128_si64({text})"
            )
        if operation == "widen":
            return self._x86_widen(result, source)
        if result.size < 16 or source.size < 16:
            return None
        name = _x86_name(operation, result, self._target)
        if name is None:
            return None
        values = ", ".join(
            f"({x86_register(arg)}){letter}"
            for arg, letter in zip(args, "abcd", strict=False)
            if isinstance(arg, Vec)
        )
        if operation == "select":
            values = ", ".join(f"({x86_register(result)}){letter}" for letter in "cba")
        extra = _X86_ROUND.get(operation, "")
        return self._as(result, f"{x86_prefix(max(result.size, source.size))}{name}({values}{extra})")

    def _x86_widen(self, result: Vec, source: Vec) -> str | None:
        if result.elem.is_float or result.size < 16:
            return None
        sign = "i" if source.elem.is_signed else "u"
        name = f"cvtep{sign}{8 * source.elem.size}_epi{8 * result.elem.size}"
        return self._as(result, f"{x86_prefix(result.size)}{name}({_m128(source, 'a')})")

    def _as(self, of: Vec, text: str) -> str:
        return f"({self.type(of)}){text}"

    # ---- Arm ----

    def _arm(self, operation: str, result: Vec | Scalar, args: tuple[Vec | Scalar, ...]) -> str | None:
        if not isinstance(result, Vec) or not isinstance(args[0], Vec):
            return None
        source = args[0]
        r = vec_name(result)
        if result.elem.name == "f32" and result.lanes == 4:
            simple = {
                "sqrt": "vsqrtq_f32", "nearest": "vrndnq_f32", "floor": "vrndmq_f32", "ceil": "vrndpq_f32",
                "trunc": "vrndq_f32",
            }  # fmt: skip
            if operation in simple:
                return f"({r}){simple[operation]}((float32x4_t)a)"
            if operation == "fma":
                return f"({r})vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b)"
            if operation == "from_f16":
                return f"({r})vcvt_f32_f16((float16x4_t)a)"
        if operation == "to_f16" and source.lanes == 4:
            return f"({r})vcvt_f16_f32((float32x4_t)a)"
        if operation == "nearest_i32" and source.lanes == 4:
            return f"({r})vcvtnq_s32_f32((float32x4_t)a)"
        if operation == "lookup" and result.size == 16:
            return f"({r})vqtbl1q_u8((uint8x16_t)a, vandq_u8((uint8x16_t)b, vdupq_n_u8(0x8F)))"
        if result.size == 16:
            return self._arm_dots(operation, r)
        return None

    def _arm_dots(self, operation: str, r: str) -> str | None:
        if operation == "dot_i16":
            low = "vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b))"
            return f"({r})vpaddq_s32({low}, vmull_high_s16((int16x8_t)a, (int16x8_t)b))"
        if operation == "dot_u8i8_sat":
            low = (
                "vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8((uint8x16_t)a))), "
                "vmovl_s8(vget_low_s8((int8x16_t)b)))"
            )
            high = (
                "vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8((uint8x16_t)a)), vmovl_high_s8((int8x16_t)b))"
            )
            return f"({r})vqaddq_s16(vuzp1q_s16({low}, {high}), vuzp2q_s16({low}, {high}))"
        if operation == "dot_i8i8":
            if self._target.has_dotprod:
                return f"({r})vdotq_s32((int32x4_t)a, (int8x16_t)b, (int8x16_t)c)"
            low = "vmull_s8(vget_low_s8((int8x16_t)b), vget_low_s8((int8x16_t)c))"
            high = "vmull_high_s8((int8x16_t)b, (int8x16_t)c)"
            return f"({r})vaddq_s32((int32x4_t)a, vpaddq_s32(vpaddlq_s16({low}), vpaddlq_s16({high})))"
        return None


def _last_lanes(op: str, v: str, lanes: int, elem: Scalar, order: str) -> str:
    values = [f"{v}[{i}]" for i in range(lanes)]
    c = C_NAMES[elem.name]
    while len(values) > 1:
        half = len(values) // 2
        pairs = (
            [(values[i], values[i + 1]) for i in range(0, len(values), 2)]
            if order != "halves"
            else [(values[i], values[i + half]) for i in range(half)]
        )
        if op == "add":
            values = [f"({c})({a} + {b})" for a, b in pairs]
        else:
            values = [f"({a} {'>' if op == 'max' else '<'} {b} ? {a} : {b})" for a, b in pairs]
    return values[0]


def _m128(of: Vec, letter: str) -> str:
    """C that reads a vector of 8 bytes, or of a register's size, as a register of bits."""
    if of.size > 16:
        return f"({x86_register(Vec(SCALARS['u8'], of.size))}){letter}"
    return f"(__m128i){letter}" if of.size == 16 else f"_mm_cvtsi64_si128((long long){letter})"


_X86_ROUND = {
    "nearest": ", _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC",
    "floor": ", _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC",
    "ceil": ", _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC",
    "trunc": ", _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC",
}


def _x86_name(operation: str, result: Vec, target: IsaTarget) -> str | None:
    """The x86 intrinsic for an operation, without its prefix; None if it has none."""
    elem, width = result.elem, 8 * result.elem.size
    suffix = {"f32": "ps", "f64": "pd"}.get(elem.name)
    is_wide = result.size == 64
    match operation:
        case "fma" if suffix:
            return f"fmadd_{suffix}"
        case "min" | "max" if suffix:
            return f"{operation}_{suffix}"
        case "min" | "max" if width < 64:
            return f"{operation}_ep{'i' if elem.is_signed else 'u'}{width}"
        case "sqrt" if suffix:
            return f"sqrt_{suffix}"
        case "nearest" | "floor" | "ceil" | "trunc" if suffix:
            return f"{'roundscale' if is_wide else 'round'}_{suffix}"
        case "nearest_i32":
            return "cvtps_epi32"
        case "trunc_i32":
            return "cvttps_epi32"
        case "abs" if not suffix and width < 64:
            return f"abs_epi{width}"
        case "sign" if not is_wide and width < 64:
            return f"sign_epi{width}"
        case "select" if elem.name == "f32" and not is_wide:
            return "blendv_ps"
        case "select" if width == 8 and not is_wide:
            return "blendv_epi8"
        case "lookup":
            return "shuffle_epi8"
        case "avg":
            return f"avg_epu{width}"
        case "mulhi":
            return "mulhi_epi16" if elem.name == "i16" else None
        case "add_sat" | "sub_sat" if width <= 16:
            return f"{operation[:3]}s_ep{'i' if elem.is_signed else 'u'}{width}"
        case "pack":
            return f"pack{'s' if elem.is_signed else 'us'}_epi{2 * width}"
        case "dot_i16":
            return "madd_epi16"
        case "dot_u8i8_sat":
            return "maddubs_epi16"
        case "dot_u8i8" if target.has_vnni:
            return "dpbusd_epi32"
    return None


# ---- loops over lanes ------------------------------------------------------------------------------------


Loop: TypeAlias = Callable[[Any, Any], str]
"""Function that writes the body of a word, from the types of its result and of its arguments."""


def _each(lanes: int, text: str) -> str:
    return f"for (int i = 0; i < {lanes}; ++i) {text}"


def _mapped(function: str) -> Loop:
    return lambda result, args: _each(result.lanes, f"r[i] = {function}(a[i]);")


def _saturated(op: str) -> Loop:
    def loop(result: Vec, args: object) -> str:
        low, high = _bounds(result.elem)
        return _each(
            result.lanes,
            f"{{ int32_t x = a[i] {op} b[i]; r[i] = x < {low} ? {low} : x > {high} ? {high} : x; }}",
        )

    return loop


def _bounds(of: Scalar) -> tuple[int, int]:
    bits = 8 * of.size
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if of.is_signed else (0, (1 << bits) - 1)


def _packed(result: Vec, args: tuple[Vec, ...]) -> str:
    low, high = _bounds(result.elem)
    group = 16 // result.elem.size
    return (
        f"for (int i = 0; i < {result.lanes}; ++i) {{\n"
        f"        int at = i / {group} * {group // 2} + i % {group // 2};\n"
        f"        int32_t x = i % {group} < {group // 2} ? a[at] : b[at];\n"
        f"        r[i] = x < {low} ? {low} : x > {high} ? {high} : x;\n    }}"
    )


def _dotted(a: str, b: str, products: int, start: str, is_saturated: bool = False) -> Loop:
    def loop(result: Vec, args: object) -> str:
        terms = " + ".join(f"{a}[{products} * i + {k}] * {b}[{products} * i + {k}]" for k in range(products))
        if products == 2 and not is_saturated:
            terms = " + ".join(f"(uint32_t)({a}[2 * i + {k}] * {b}[2 * i + {k}])" for k in range(2))
            return _each(result.lanes, f"r[i] = (int32_t)({terms});")
        if is_saturated:
            return _each(
                result.lanes,
                f"{{ int32_t x = {terms}; r[i] = x < -32768 ? -32768 : x > 32767 ? 32767 : x; }}",
            )
        return _each(result.lanes, f"r[i] = (int32_t)((uint32_t){start}[i] + (uint32_t)({terms}));")

    return loop


def _builtin(name: str, values: str) -> Loop:
    """Make a word that calls the compiler's built-in function of this name on floats of either size."""
    return lambda result, args: _each(
        result.lanes, f"r[i] = __builtin_{name}{'f' if result.elem.name == 'f32' else ''}({values});"
    )


def _written(text: str) -> Loop:
    return lambda result, args: _each(result.lanes, text)


_LOOPS: dict[str, Loop] = {
    "fma": _builtin("fma", "a[i], b[i], c[i]"),
    "sqrt": _builtin("sqrt", "a[i]"),
    "nearest": _mapped("__builtin_nearbyintf"),
    "floor": _mapped("__builtin_floorf"),
    "ceil": _mapped("__builtin_ceilf"),
    "trunc": _mapped("__builtin_truncf"),
    "nearest_i32": _written(
        "r[i] = a[i] >= -2147483648.0f && a[i] < 2147483648.0f ? "
        "(int32_t)__builtin_nearbyintf(a[i]) : INT32_MIN;"
    ),
    "from_f16": _mapped("from_f16"),
    "to_f16": _mapped("to_f16"),
    "mulhi": _written("r[i] = (int16_t)((a[i] * b[i]) >> 16);"),
    "avg": _written("r[i] = (a[i] + b[i] + 1) >> 1;"),
    "add_sat": _saturated("+"),
    "sub_sat": _saturated("-"),
    "pack": _packed,
    "lookup": _written("r[i] = b[i] & 128 ? 0 : a[i / 16 * 16 + (b[i] & 15)];"),
    "dot_i16": _dotted("a", "b", 2, ""),
    "dot_u8i8_sat": _dotted("a", "b", 2, "", is_saturated=True),
    "dot_u8i8": _dotted("b", "c", 4, "a"),
    "dot_i8i8": _dotted("b", "c", 4, "a"),
}

HALVES = """static inline float from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7FFFu, bits;
    float x;
    if (magnitude >= 0x7C00u) {
        bits = sign | 0x7F800000u | (magnitude & 0x3FFu) << 13 | (magnitude > 0x7C00u ? 0x400000u : 0u);
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    bits = magnitude << 13;
    memcpy(&x, &bits, sizeof x);
    x *= 0x1p112f; /* moves the exponent from bias 15 to bias 127, and normalises subnormals in passing */
    memcpy(&bits, &x, sizeof bits);
    bits |= sign;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline uint16_t to_f16(float x) {
    uint32_t bits, magnitude, rounded;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u;
    magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | (magnitude >> 13 & 0x1FFu));
    if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) { /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low
    bits */
        memcpy(&x, &magnitude, sizeof x);
        x += 0.5f;
        memcpy(&rounded, &x, sizeof rounded);
        return (uint16_t)(sign | (rounded - 0x3F000000u));
    }
    rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (rounded - 0x38000000u) >> 13);
}"""


_X86_HALVES = """static inline float from_f16(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t to_f16(float x) { return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }"""
_ARM_HALVES = """static inline float from_f16(uint16_t h) {
    __fp16 x;
    memcpy(&x, &h, sizeof x);
    return (float)x;
}
static inline uint16_t to_f16(float x) {
    __fp16 y = (__fp16)x;
    uint16_t h;
    memcpy(&h, &y, sizeof h);
    return h;
}"""


def halves(target: IsaTarget) -> str:
    """C that converts one float16, by the processor's instruction where the target has one."""
    return {"x86": _X86_HALVES, "arm": _ARM_HALVES}.get(target.family, HALVES)


def typedef(of: Vec) -> str:
    return f"typedef {C_NAMES[of.elem.name]} {vec_name(of)} __attribute__((vector_size({of.size})));"
