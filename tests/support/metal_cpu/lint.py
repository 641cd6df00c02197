"""What clang's C++ for OpenCL takes and MSL does not: `check_source` refuses it with the line.

The rest of what MSL lacks (`new`, exceptions, virtual functions, function pointers, pointers that
cross address spaces, threadgroup variables outside kernel scope, functions the specification does
not have, matrix products of mixed types) is an error of compilation already. Apple's own headers
hold more than the specification; that is refused too: it may change unannounced.
"""

from __future__ import annotations

import re

_FORBIDDEN: dict[str, str] = {
    r"\bdouble\b": "MSL has no double",
    r"\bstd\s*::": "there is no std:: in MSL",
    r"\b(new|delete)\b": "MSL allocates nothing",
    r"\b(try|catch|throw)\b": "MSL has no exceptions",
    r"\bvirtual\b": "MSL has no virtual functions",
    r"\b(dynamic_cast|typeid)\b": "MSL has no run-time types",
    r"\bgoto\b": "MSL has no goto",
    r"\bthread_local\b": "MSL has no thread_local",
    r"\blong\s+double\b": "MSL has no long double",
    r"\basm\b|__asm": "MSL has no inline assembly",
    r"\b__\w+": "names with two underscores belong to compilers; MSL documents none that shaders need",
    r"\b(global|local|private|generic)\b\s+\w+\s*[*&]": "OpenCL's address spaces are not MSL's words",
    r"\bhb_\w+": "names of the stand-in are not MSL",
    r"\(\s*[*&]\s*\w+\s*\)\s*\(": "MSL has no function pointers",
    r"\[\s*[=&\w, ]*\]\s*\([^()]*\)\s*(?:mutable\s*)?(?:->\s*\w+\s*)?\{": "MSL has no lambda expressions",
    r"\bstatic\b(?!\s+constexpr\s+constant|\s+constant|_assert|_cast|[\w\s:<>,]+\([^;{}]*\)\s*\{)": "MSL has no static variables",
    r"\b(struct|class)\s+\w+\s*(<[^<>{};]*>)?\s*:(?!:)": "MSL has no derived classes",
    r"\b(noexcept|register)\b": "not in MSL",
    r"\bthread_elements\b": "the specification does not say which lane holds which element; store the matrix",
    r"\bsimdgroup_(event|async_copy\w*|matrix_storage)\b": "in nobody's specification",
    r"\bMETAL_FUNC\b": "a macro of Apple's headers, not of the specification: inline",
    r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif|undef)\b": "the sources are the same everywhere: no conditional compilation",
    r"^[ \t]*#[ \t]*pragma(?!\s+METAL\s+fp\s+contract\(off\)\s*$)": "the one pragma here is `METAL fp contract(off)`",
    r"\b(printf|malloc|free|memcpy|memset|assert)\b": "not an MSL function",
    r"\bif\s+constexpr\b|\bauto\s*\[|\binline\s+constexpr\b|\bnamespace\s+\w+::": "MSL 3 is C++14; this is C++17",
    r"\b(concept|requires|co_await|consteval|constinit)\b": "MSL 3 is C++14; this is C++20",
    r"\bint\s+main\b": "a shader has kernels",
}
_HEADERS = ("metal_stdlib", "metal_simdgroup", "metal_simdgroup_matrix")
_SPACES = ("device", "constant", "threadgroup", "thread")
_TYPE = r"(?:bool|char|short|int|long|float|half|bfloat|void|auto|u?int\d+_t|size_t|uchar|ushort|uint|ulong|vec|simdgroup_\w+)\d?"
_DECLARED = (
    r"(?:^|[(,;{{<])\s*((?:(?:const|volatile|device|constant|threadgroup|thread)\s+)*)(?:metal::)?({types})(?:<[^<>;(){{}}]*>)?"
    r"\s*(?:const\s*)?[*&]\s*[A-Za-z_]\w*\s*(?=[,)=;\[])"
)
_OWN_TYPE = re.compile(r"\b(?:typename|struct|class|using)\s+([A-Za-z_]\w*)|\btypedef\s[^;]*?(\w+)\s*;")
_FUNCTION = re.compile(r"\b(?!(?:if|for|while|switch)\b)(\w+)\s*\(([^;{}]*)\)\s*(?:const\s*)?\{")


class MetalLintError(AssertionError):
    """A line of a shader that Apple's compiler would not take."""


def _without_comments(source: str) -> str:
    keep_lines = lambda m: "\n" * m[0].count("\n")  # noqa: E731
    return re.sub(r"//[^\n]*|/\*.*?\*/", keep_lines, source, flags=re.S)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _bodies(text: str) -> dict[str, str]:
    """Function name -> the text of all its bodies."""
    out: dict[str, str] = {}
    for m in _FUNCTION.finditer(text):
        depth, i = 1, m.end()
        while depth and i < len(text):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            i += 1
        out[m[1]] = out.get(m[1], "") + text[m.end() : i]
    return out


def check_source(source: str) -> None:
    """Raise MetalLintError, naming line and reason, for the first thing MSL lacks."""
    text = _without_comments(source)
    for pattern, why in _FORBIDDEN.items():
        found = re.search(pattern, text, re.M)
        if found:
            raise MetalLintError(f"line {_line(text, found.start())}: {found[0].strip()!r}: {why}")
    for m in re.finditer(r"^\s*#\s*include\s*[<\"]([^>\"]+)", text, re.M):
        if m[1] not in _HEADERS:
            raise MetalLintError(f"line {_line(text, m.start())}: #include {m[1]}: allowed: {', '.join(_HEADERS)}")
    own = [re.escape(a or b) for a, b in _OWN_TYPE.findall(text)]
    for m in re.finditer(_DECLARED.format(types="|".join([_TYPE, *own])), text, re.M):
        if not any(s in m[1].split() for s in _SPACES):
            raise MetalLintError(
                f"line {_line(text, m.start(2))}: {m[0].strip('(,;{< ')!r}: a pointer or reference needs an address space"
            )
    bodies = _bodies(text)
    calls = {f: {g for g in re.findall(r"\b(\w+)\s*(?:<[^;<>{}]*>)?\s*\(", b) if g in bodies} for f, b in bodies.items()}
    for start in calls:
        seen: set[str] = set()
        frontier = set(calls[start])
        while frontier:
            f = frontier.pop()
            if f == start:
                raise MetalLintError(f"{start} calls itself: MSL has no recursion")
            if f not in seen:
                seen.add(f)
                frontier |= calls[f]
