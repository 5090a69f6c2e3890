"""Reads enums and constants from the C++ sources, to compare them with their twins in Python."""

import ast
import operator
import pathlib
import re

CSRC = pathlib.Path(__file__).parents[1] / "csrc"
OPERATORS = {ast.Mult: operator.mul, ast.LShift: operator.lshift, ast.Add: operator.add, ast.Sub: operator.sub}


def source(file: str) -> str:
    """The text of a file in csrc/, without its comments."""
    return re.sub(r"//.*", "", (CSRC / file).read_text())


def enum(file: str, name: str) -> dict[str, int]:
    """The members of a C++ enum with their values, by their names in Python: kHasParam is HAS_PARAM."""
    body = re.search(rf"\benum (?:class )?{name}\b[^{{]*{{(.*?)}}", source(file), re.DOTALL)
    assert body, f"csrc/{file} must define enum {name}"
    members, following = {}, 0
    for member in filter(None, map(str.strip, body[1].split(","))):
        found, _, value = map(str.strip, member.partition("="))
        members[python_name(found)] = following = number(value) if value else following
        following += 1
    return members


def constant(file: str, name: str) -> int:
    """The value of `constexpr <integer type> name = ...;`."""
    found = re.search(rf"\bconstexpr \w+ {name} = ([^;]+);", source(file))
    assert found, f"csrc/{file} must define the constant {name}"
    return number(found[1])


def number(text: str) -> int:
    """The value of an expression of integers, as C++ and Python both write it."""

    def evaluate(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int), f"must be made of integers, got {text}"
        return node.value

    return evaluate(ast.parse(text.replace("'", "").strip(), mode="eval").body)


def python_name(name: str) -> str:
    """kHasValuesT as HAS_VALUES_T."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("k")).upper()
