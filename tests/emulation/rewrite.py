"""Rewrites the parts of a CUDA source that a C++ compiler cannot read. Every line keeps its number."""

import re

OPENING, CLOSING = "([{", ")]}"


def rewrite(source: str, name: str) -> str:
    """The text of a .cu, .cuh or .h file as C++ for this folder's `cuda_runtime_api.h`. The compiler's messages call it
    `name`.
    """
    for rule in (_macros, _launches, _dynamic_shared, _static_shared, _instructions):
        source = rule(source, name)
    return f'#line 1 "{name}"\n{source}'


def _macros(source, name):
    """Expands macros with one parameter that a later `#undef` ends, so that `_instructions` finds `asm` in them."""
    pattern = r"#define (\w+)\((\w+)\) ((?:.*\\\n)*.*)(?=\n[\s\S]*#undef \1\b)"
    for macro, parameter, body in reversed(re.findall(pattern, source)):
        definition = re.search(rf"#define {macro}\((?:.*\\\n)*.*", source)[0]
        source = re.sub(rf"#undef {macro}\b", "", source.replace(definition, "\n" * definition.count("\n")))
        parts = re.split(r'("(?:\\.|[^"\\])*")', re.sub(r"\\\n", " ", body))  # every second one a string

        def expanded(match, parts=parts, parameter=parameter):
            replaced = [re.sub(rf"\b{parameter}\b", lambda _: match[1], part) for part in parts[::2]]
            return "".join(sum(zip(replaced, [*parts[1::2], ""], strict=True), ()))

        source = re.sub(rf"\b{macro}\(([^()]*)\)", expanded, source)
    return source


def _launches(source, name):
    """`kernel<<<grid, block>>>(x)` becomes a binary operator, so that no parser must find where `kernel` begins."""
    return re.sub(r"<<<(.*?)>>>", r" ->* EmulatedLaunch(\1)", source, flags=re.DOTALL)


_ALIGNMENT = r"(?:(?:alignas|__align__)\s*\(\s*(?P<alignment>[^()]+?)\s*\)\s*)?"
_QUALIFIERS = rf"__shared__\s+{_ALIGNMENT}(?P<type>[^;=[]+?)\s*\b(?P<array>\w+)\s*"


def _dynamic_shared(source, name):
    return re.sub(
        rf"extern\s+{_QUALIFIERS}\[\s*\]\s*;",
        r"\g<type>* const \g<array> = reinterpret_cast<\g<type>*>(emulation::dynamic_shared());",
        source,
    )


def _static_shared(source, name):
    def declaration(match):
        parts = match.groupdict()
        alignment = f", {parts['alignment']}" if parts["alignment"] else ""
        storage = f"static emulation::Shared<{parts['type']}{parts['dims'] or ''}{alignment}> {parts['array']}_storage;"
        return f"{storage} auto& {parts['array']} = {parts['array']}_storage.array();"

    source = re.sub(rf"{_QUALIFIERS}(?P<dims>(?:\[[^\]]*\]\s*)*);", declaration, source)
    if re.search(r"^[^/]*__shared__", source, flags=re.MULTILINE):
        raise ValueError(f"{name}: a __shared__ declaration must declare one array, without a value; split it")
    return source


def _instructions(source, name):
    """`asm("add.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));` becomes `ptx::add_f32(c, a, b);`."""
    result, at = [], 0
    for match in re.finditer(r"\basm\b\s*(?:volatile\s*)?\(", source):
        end = _closing(source, match.end() - 1)
        text = source[match.end() : end]
        operands = [text[m.end() : _closing(text, m.end() - 1)] for m in re.finditer(r'"[=+]?[a-z]+"\s*\(', text)]
        instruction = "".join(re.findall(r'"([^"]*)"', re.split(r':\s*(?=")', text)[0]))
        mnemonic, _, wanted = _without_predicate(instruction).rstrip(";").partition(" ")
        wanted = wanted.removeprefix("_,")  # a result that the code drops
        if mnemonic and re.findall(r"[^,\s\[\]{}]+", wanted) != [f"%{i}" for i in range(len(operands))]:
            raise ValueError(f"{name}: asm must be one instruction of all its operands in order, got {instruction!r}")
        lines = "\n" * text.count("\n")
        function = re.sub(r"\W", "_", mnemonic) or "none"
        result += [source[at : match.start()], f"ptx::{function}({', '.join(operands)}{lines})"]
        at = end + 1
    return "".join([*result, source[at:]])


def _without_predicate(instruction):
    """One instruction out of several: a predicate that is made from an operand, or becomes one, is replaced by it."""
    instruction = instruction.replace("\\n", " ").strip()
    made, becomes = r"(?:setp\.ne\.b32 \1, (%\d+), 0; +)?", r"(?:selp\.u32 (%\d+), 1, 0, \1; +)?"
    match = re.fullmatch(rf"{{ +\.reg \.pred (\w+); +{made}([^;]*;) +{becomes}}}", instruction)
    return instruction if match is None else re.sub(rf"\b{match[1]}\b", match[2] or match[4] or match[1], match[3])


def _closing(text, start):
    """The position of the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in OPENING) - (text[at] in CLOSING)
        if depth == 0:
            return at
    raise ValueError(f"a bracket must close, got {text[start : start + 60]!r}")
