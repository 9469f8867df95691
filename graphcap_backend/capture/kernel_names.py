"""Kernel names as people read them, without what changes from build to build.

Three kinds are told apart: generated names with a number at the end (Inductor's Triton and C++
kernels), mangled C++ names (ATen, CUTLASS, CUB), and everything else (cuBLAS, cuDNN, hand-written
Triton), which is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_MAX_WORDS = 6

# Inductor: a category of three letters, then what was fused, then a number.
_NUMBERED = re.compile(r"(triton_(?:poi|red|per|coo|spl|tem|for|mix|unk)_\w*?|cpp_\w*?|multi_kernel|halide_kernel)_\d+")
_LIBRARY_VERSION = re.compile(r"__\d\w_cublas$")
_HASH = re.compile(r"_(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}(?=_|$)")
_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|\b_GLOBAL__N__\w*::|\b_INTERNAL_[0-9a-f]+_\w+::|\[clone [^]]*\]")
# Of a lambda only its parameter types say something; "int" alone is an index into the tensor.
_LAMBDA = re.compile(r"(?:::)?\{(?:lambda\((?:int\)|([^(){}]*)\))|unnamed type)#\d+\}(?: const)?")
_CALL = re.compile(r"::operator\(\)(?:\([^()]*\))?(?: const)?")
_PARENTHESES = re.compile(r"\([^()]*\)")
_WORD = re.compile(r"unsigned char|signed char|unsigned \w+|[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*")
# What tells two instances of a template apart for a reader: what it computes, and on which type.
_COMPUTES = re.compile(r"functor|kernel|impl|ops?$|cutlass|gemm|launch_|reduce", re.IGNORECASE)
_SCALAR = re.compile(
    r"float|double|half|__half|Half|half_t|BFloat16|bfloat16_t|__nv_bfloat16|complex|Float8_\w+"
    r"|bool|char|signed char|unsigned char|short|int|long"
)
# Arguments of these say how memory is walked, not what is computed.
_PLUMBING = re.compile(r"(?:\w+::)*(?:array|Array|tuple|\w*OffsetCalculator|memory::\w+)<")


def display_name(name: str, *, template_arguments: bool = True) -> str:
    """``name`` shortened to what a reader needs; equal for equal kernels in every build.

    >>> display_name("triton_poi_fused_gelu_0")
    'triton_poi_fused_gelu'

    A mangled name becomes its qualified name. With ``template_arguments``, the functors and scalar
    types among the template's arguments follow in angle brackets, each once; sizes, lambda numbers
    and index types are left out.
    """
    if numbered := _NUMBERED.fullmatch(name):
        return numbered[1]
    if not name.startswith("_Z"):
        return _HASH.sub("", _LIBRARY_VERSION.sub("", name))
    return _short_cxx(_demangled(name), template_arguments)


def _demangled(name: str) -> str:
    import torch

    return str(torch._C._demangle(name))


def _short_cxx(text: str, template_arguments: bool) -> str:
    """The qualified name in a demangled declaration, and the telling template arguments."""
    text = _ANONYMOUS.sub("", text).strip()
    text = _until_stable(_LAMBDA, text, _parameter_types)
    text = _until_stable(_CALL, text, "")
    qualified = _without_return_type(_without_parameters(text))
    base, arguments = _split_templates(qualified)
    words = _words(arguments) if template_arguments else []
    if len(words) > _MAX_WORDS:
        words = [*words[:_MAX_WORDS], "..."]
    return f"{base}<{', '.join(words)}>" if words else base


def _parameter_types(lambda_: re.Match[str]) -> str:
    return f"<{lambda_[1]}>" if lambda_[1] else ""


def _until_stable(pattern: re.Pattern[str], text: str, put: str | Callable[[re.Match[str]], str]) -> str:
    while (shorter := pattern.sub(put, text)) != text:
        text = shorter
    return text


def _without_parameters(text: str) -> str:
    """``text`` up to the parenthesis that closes at its very end."""
    if not text.endswith(")"):
        return text
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += (text[position] == ")") - (text[position] == "(")
        if depth == 0:
            return text[:position]
    return text


def _without_return_type(text: str) -> str:
    depth = 0
    start = 0
    for position, character in enumerate(text):
        depth += (character in "<(") - (character in ">)")
        if character == " " and depth == 0:
            start = position + 1
    return text[start:]


def _split_templates(text: str) -> tuple[str, str]:
    """What is outside the outermost angle brackets, and what is inside."""
    depth = 0
    outside: list[str] = []
    inside: list[str] = []
    for character in text:
        if character == ">":
            depth -= 1
        if depth:
            inside.append(character)
        elif character not in "<>":
            outside.append(character)
        if character == "<":
            depth += 1
            inside.append(" ")  # two groups must not run together
    return "".join(outside), "".join(inside)


def _words(arguments: str) -> list[str]:
    arguments = _without_plumbing(_until_stable(_PARENTHESES, arguments, ""))
    found: dict[str, None] = {}
    for word in _WORD.findall(arguments):
        last = word.rpartition("::")[2]
        if _SCALAR.fullmatch(last) or _COMPUTES.search(last):
            found[last] = None
    return list(found)


def _without_plumbing(text: str) -> str:
    while match := _PLUMBING.search(text):
        depth = 1
        end = match.end()
        while end < len(text) and depth:
            depth += (text[end] == "<") - (text[end] == ">")
            end += 1
        text = text[: match.start()] + text[end:]
    return text
